"""What the command says of arguments that are missing, or cannot be."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from launcher import cli
from runtime.models import tiny_model


@pytest.mark.parametrize("command", [["train"], ["eval"], ["validate"], ["render", "slurm"], ["data", "prepare"]])
def test_a_configuration_is_needed_and_overrides_are_not(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(command) == 2
    see = " ".join(("sluice", *command, "--help"))
    assert capsys.readouterr().err == f"error: the following arguments are required: config; see {see}\n"


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ([], "arguments are required: COMMAND"),
        (["trian"], r"argument COMMAND: invalid choice: 'trian' \(choose from '?quickstart'?, '?train'?, "),
        (["bench", "nothing"], r"argument name: invalid choice: 'nothing' \(choose from '?all'?, "),
        (["samples", "runs/a", "--limit", "few"], "argument --limit: invalid int value: 'few'"),
        (["status", "runs/a", "--wach"], "unrecognized arguments: --wach"),
    ],
)
def test_a_mistake_is_one_line_that_names_argument_and_value(
    command: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(f"error: .*{named}", line)


def test_validate_finds_what_files_of_ones_own_lack(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text("from runtime.rewards.rules import rule\n@rule('mine_alone')\ndef mine(*_): return 1.0\n")
    (tmp_path / "broken.py").write_text("import no_such_module\n")
    config = Path(__file__).parents[2] / "configs/quickstart.yaml"
    names = [f"rewards.rules.1.name={tmp_path}/mine.py:mine_alnoe", f"algorithm.loss={tmp_path}/broken.py:mine"]
    assert ended(["validate", str(config), *names]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert said[0].startswith("error: algorithm.loss: ")
    assert said[0].endswith("broken.py cannot be imported: ModuleNotFoundError: No module named 'no_such_module'")
    told = f"unknown name 'mine_alnoe'; did you mean 'mine_alone'? no decorator in {tmp_path}/mine.py registers it"
    assert said[1] == f"error: rewards.rules.1.name: {told}"
    assert ended(["validate", str(config), f"rewards.rules.1.name={tmp_path}/mine.py:mine_alone"]) == 0


def test_a_file_of_ones_own_imports_its_neighbour_and_registers_what_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "neighbour_alone.py").write_text("def neighbour_score(*_): return 1.0\n")
    (tmp_path / "calls.py").write_text(
        "from neighbour_alone import neighbour_score\nfrom sluice import rule\n"
        "@rule('calls_alone')\ndef calls(*_): return neighbour_score()\n"
    )
    config = str(Path(__file__).parents[2] / "configs/quickstart.yaml")
    assert ended(["validate", config, f"rewards.rules.1.name={tmp_path}/calls.py:calls_alone"]) == 0
    capsys.readouterr()
    assert ended(["validate", config, f"rewards.rules.1.name={tmp_path}/neighbour_alone.py:neighbour_score"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"unknown name 'neighbour_score'; no decorator in {tmp_path}/neighbour_alone.py registers it")


def test_validate_reads_the_tokenizer_with_its_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_model.write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny_model.described("tiny:qwen2")))
    (tmp_path / "model.safetensors").touch()
    config = Path(__file__).parents[2] / "configs/quickstart.yaml"
    arguments = ["validate", str(config), f"model.path={tmp_path}"]
    assert ended(arguments) == 0
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": None}))
    assert ended(arguments) == 2
    assert capsys.readouterr().err.startswith(f"error: data.prompt_type: {tmp_path} has no chat template, which 'model' needs")
    assert ended([*arguments, "data.prompt_type=qwen"]) == 0


def test_validate_names_the_defaults_that_were_others(capsys: pytest.CaptureFixture[str]) -> None:
    config = str(Path(__file__).parents[2] / "configs/quickstart.yaml")
    assert ended(["validate", config, "training.depth=bound"]) == 0
    assert "version 0.1" not in capsys.readouterr().out
    assert ended(["validate", config, "--since", "0.1", "training.depth=bound"]) == 0
    said = capsys.readouterr().out
    assert "training.lr_staleness_power: 0.5 by default; version 0.1 did what 0.0 does\n" in said
    assert said.count("version 0.1 did") == 3  # the quickstart says itself how often it saves


def ended(arguments: list[str]) -> int | str | None:
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    return end.value.code or 0
