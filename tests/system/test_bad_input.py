"""A user's mistakes: one line on stderr that names it, exit code 2, nothing started or left running. And what starts none."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import pytest

from tests.system.runs import ROOT, belonging, here, one_line, refused

pytestmark = pytest.mark.timeout(300)


def test_a_configuration_that_is_not_there(tmp_path: Path) -> None:
    assert str(tmp_path / "none.yaml") in refused(tmp_path / "none.yaml", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("training.stepz=3", ["training.stepz", "'steps'"]),
        ("trianing.steps=3", ["trianing", "'training'"]),
        ("training.steps=many", ["training.steps", "many"]),
        ("training.steps=0", ["training.steps", "1"]),
        ("algorithm.advantage=grop_norm", ["algorithm.advantage", "group_norm"]),
        ("data.train=/nowhere/train.jsonl", ["data.train", "/nowhere/train.jsonl"]),
        ("model.path=/nowhere/model", ["model.path", "/nowhere/model"]),
        ("run.resume=/nowhere/checkpoint", ["run.resume", "/nowhere/checkpoint"]),
        ("services.trainer.processes=3", ["services.trainer.processes", "training.groups_per_step"]),
    ],
)
def test_a_value_that_cannot_be(config: Path, tmp_path: Path, override: str, parts: list[str]) -> None:
    line = refused(config, tmp_path / "run", override)
    assert all(part in line for part in parts), line


def test_a_model_folder_without_weights(config: Path, tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny / "model", folder, ignore=shutil.ignore_patterns("*.safetensors"))
    line = refused(config, tmp_path / "run", f"model.path={folder}")
    assert line.startswith("model.path: ")
    assert str(folder) in line
    assert "weights" in line


def test_weights_that_are_torn(config: Path, tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny / "model", folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert str(folder) in refused(config, tmp_path / "run", f"model.path={folder}", whole=True)


def test_a_reference_with_another_vocabulary(config: Path, tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "reference"
    shutil.copytree(tiny / "model", folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"vocab_size": settings["vocab_size"] - 1}))
    line = refused(config, tmp_path / "run", f"model.reference={folder}")
    assert line.startswith("model.reference: ")
    assert str(folder) in line
    assert str(settings["vocab_size"]) in line


def test_a_port_in_use(config: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        line = refused(config, tmp_path / "run", f"services.coordinator.port={port}", whole=True)
    assert str(port) in line
    assert "in use" in line


def test_a_service_whose_interpreter_is_not_there(config: Path, tmp_path: Path) -> None:
    line = refused(config, tmp_path / "run", "services.reward.python=/nowhere/python")
    assert line.startswith("services.reward.python: ")
    assert "/nowhere/python" in line


def test_a_run_that_is_not_there(tmp_path: Path) -> None:
    for command in ("samples", "status", "report"):
        ended = here(command, str(tmp_path / "none"))
        assert ended.returncode == 2
        assert str(tmp_path / "none") in one_line(ended.stderr)


def test_a_variable_that_is_not_there(config: Path, tmp_path: Path) -> None:
    line = refused(config, tmp_path / "run", "services.trainer.env.A={from: NOT_SET_ANYWHERE}")
    assert line == "services.trainer.env.A: {from: NOT_SET_ANYWHERE}: this machine's environment has no NOT_SET_ANYWHERE"


def test_validate_looks_for_the_address_of_the_only_machine(config: Path) -> None:
    ended = here("validate", str(config), "network.interface=nowhere0")
    assert ended.returncode == 2
    assert one_line(ended.stderr).startswith("error: network.interface: 'nowhere0' is neither an address, nor a network")


def test_validate_finds_the_same_mistakes_and_starts_nothing(config: Path, tmp_path: Path) -> None:
    ended = here("validate", str(config), f"run.dir={tmp_path / 'run'}", "services.rollout.max_num_seqs=100000000")
    assert ended.returncode == 2
    assert one_line(ended.stderr).startswith("error: services.rollout.max_num_seqs: ")
    assert not (tmp_path / "run").exists()
    assert not belonging(tmp_path / "run")


def test_validate_says_what_would_run(config: Path) -> None:
    ended = here("validate", str(config), "services.trainer.processes=2")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "coordinator: " in ended.stdout
    (row,) = (line for line in ended.stdout.splitlines() if "trainer-0" in line)  # of this machine, without accelerators
    members = {"rollout-0", "rollout-1", "reward-0", "reference-0", "trainer-0", "trainer-1"}
    assert {name.strip() for name in row.split("│")[-2].split(",")} == members


@pytest.mark.parametrize("name", ["quickstart.yaml", "gsm8k.yaml"])
def test_a_configuration_that_is_shipped_is_valid_as_it_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    ended = here("validate", str(ROOT / "configs" / name))
    assert ended.returncode == 0, ended.stderr
