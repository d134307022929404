"""What the command says of arguments that are missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher import cli


@pytest.mark.parametrize("command", [["train"], ["eval"], ["validate"], ["render", "slurm"], ["data", "prepare"]])
def test_a_configuration_is_needed_and_overrides_are_not(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(command)
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith("error: the following arguments are required: config\n")


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
    assert said[1].startswith("error: rewards.rules.1.name: unknown name 'mine_alnoe'; did you mean 'mine_alone'?")
    assert ended(["validate", str(config), f"rewards.rules.1.name={tmp_path}/mine.py:mine_alone"]) == 0


def ended(arguments: list[str]) -> int | str | None:
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    return end.value.code or 0
