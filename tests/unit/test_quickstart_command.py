"""`sluice quickstart`: whose configuration it trains, what it says afterwards, and the file that it writes."""

from __future__ import annotations

import shlex
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from launcher import cli
from runtime.config import Config
from runtime.config.loading import load, resolve

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


def ended(*arguments: str) -> Any:
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    return end.value.code or 0


def test_it_trains_its_own_configuration_and_says_what_to_look_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained: list[Config] = []
    monkeypatch.setattr(cli, "run_training", lambda config, *_: trained.append(config) or 0)
    monkeypatch.chdir(tmp_path)
    assert ended("quickstart", "training.steps=3", "run.dir=my runs/first") == 0
    assert trained == [resolve(load(QUICKSTART, ["training.steps=3", "run.dir=my runs/first"]))]
    said = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[1] for line in said[:4]] == [
        f"my runs/first/{name}" for name in ("model", "metrics.jsonl", "summary.json", "logs")
    ]
    commands = [shlex.split(line)[1:] for line in said[4:]]
    assert {command[0] for command in commands} == {"samples", "report", "page", "why", "quickstart"}
    for words in commands:
        options = cli._parser().parse_known_args(words)[0]
        assert "my runs/first" in map(str, vars(options).values()) or options.write == Path("my.yaml")


def test_its_file_is_written_once_and_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert ended("quickstart", "--write", "my.yaml", "training.steps=3") == 2
    assert not Path("my.yaml").exists()
    assert ended("quickstart", "--write", "my.yaml") == 0
    assert Path("my.yaml").read_bytes() == QUICKSTART.read_bytes()
    assert ended("quickstart", "--write", "my.yaml") == 2
    assert ended("quickstart", "--write", "there/my.yaml") == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: --write: training.steps=3 would not be in the file; must be without overrides",
        "error: --write: 'my.yaml': file exists; must be a new file in a folder that exists",
        "error: --write: 'there/my.yaml': no such file or directory; must be a new file in a folder that exists",
    ]


def test_the_version_is_that_of_the_installed_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended("--version") == 0
    assert capsys.readouterr().out == f"sluice {version('sluice-rl')}\n"
