"""A user's mistakes: one line on stderr that names it, exit code 2, nothing started or left running."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import pytest

from tests.system.runs import belonging, check_gone, one_line, sluice, trained

pytestmark = pytest.mark.timeout(300)

AT_ONCE = 150.0  # seconds, on a busy machine, until a mistake is told that can be seen without starting anything
STARTED = 200.0  # and until one that shows only once processes run


def refused(config: Path, folder: Path, *overrides: str, timeout: float = AT_ONCE) -> str:
    """What `sluice train` says of the mistake."""
    ended = sluice("train", str(config), f"run.dir={folder}", *overrides, timeout=timeout)
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert "Traceback" not in ended.stdout
    check_gone(folder)
    line = one_line(ended.stderr)
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


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


def test_each_mistake_has_a_line_of_its_own(config: Path, tmp_path: Path) -> None:
    ended = sluice("train", str(config), f"run.dir={tmp_path / 'run'}", "training.stepz=3", "sampling.group_size=x")
    assert ended.returncode == 2
    first, second = sorted(ended.stderr.splitlines())
    assert "sampling.group_size" in first
    assert "training.stepz" in second


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
    assert str(folder) in refused(config, tmp_path / "run", f"model.path={folder}", timeout=STARTED)


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
        line = refused(config, tmp_path / "run", f"services.coordinator.port={port}", timeout=STARTED)
    assert str(port) in line
    assert "in use" in line


def test_more_slots_than_memory(config: Path, tmp_path: Path) -> None:
    line = refused(config, tmp_path / "run", "services.rollout.slots=100000000")
    assert line.startswith("services.rollout.slots: ")
    assert "GiB" in line


def test_data_of_which_nothing_can_be_used(config: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"question": "1+1=", "reply": "2"}\n')
    line = refused(config, tmp_path / "run", f"data.train={data}", timeout=STARTED)
    assert str(data) in line
    assert "answer" in line


def test_a_folder_that_holds_a_run(config: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    trained(config, "training.steps=1", folder=folder, timeout=STARTED)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    line = refused(config, folder)
    assert str(folder) in line
    assert "run.resume=auto" in line
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_service_whose_interpreter_is_not_there(config: Path, tmp_path: Path) -> None:
    line = refused(config, tmp_path / "run", "services.reward.python=/nowhere/python")
    assert line.startswith("services.reward.python: ")
    assert "/nowhere/python" in line


@pytest.mark.parametrize("command", ["samples", "status"])
def test_a_run_that_is_not_there(command: str, tmp_path: Path) -> None:
    ended = sluice(command, str(tmp_path / "none"), timeout=AT_ONCE)
    assert ended.returncode == 2
    assert str(tmp_path / "none") in one_line(ended.stderr)


def test_validate_looks_for_the_address_of_the_only_machine(config: Path) -> None:
    ended = sluice("validate", str(config), "network.interface=nowhere0", timeout=AT_ONCE)
    assert ended.returncode == 2
    assert one_line(ended.stderr).startswith("error: network.interface: 'nowhere0' is neither an address, nor a network")


def test_validate_finds_the_same_mistakes_and_starts_nothing(config: Path, tmp_path: Path) -> None:
    ended = sluice("validate", str(config), f"run.dir={tmp_path / 'run'}", "services.rollout.slots=100000000", timeout=AT_ONCE)
    assert ended.returncode == 2
    assert one_line(ended.stderr).startswith("error: services.rollout.slots: ")
    assert not (tmp_path / "run").exists()
    assert not belonging(tmp_path / "run")
