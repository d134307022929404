"""Which checkpoint `run.resume: auto` goes on from, where some are not whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from runtime import codec
from runtime.data.prompts import StreamState
from runtime.errors import UserError
from runtime.ledger import checkpoint
from runtime.ledger.position import Position
from runtime.types import PolicyVersion

STREAM = StreamState(position=0, ordinal=0, returned=[], seed=0, shuffle=True, problems=1, fingerprint=0)
POSITION = Position(version=PolicyVersion(0, 9), stream=STREAM, trained=[])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (10, 20):
        folder = checkpoint.folder_for(tmp_path, step)
        (folder / "model").mkdir(parents=True)
        (folder / checkpoint.TRAINER).write_text('{"format": 1}')
        save_file({"a": np.ones(8, np.float32)}, folder / "model" / "model.safetensors", {"format": "pt"})
        (folder / checkpoint.POSITION).write_bytes(codec.encode(POSITION))
    return tmp_path


def test_it_is_the_newest_where_all_are_whole(run: Path) -> None:
    said: list[str] = []
    assert checkpoint.resolve("auto", run, said.append) == str(checkpoint.folder_for(run, 20))
    assert said == []


@pytest.mark.parametrize(
    ("name", "left", "fault"),
    [
        ("model/model.safetensors", -1, "model/model.safetensors is not as long as its header says"),
        ("model/model.safetensors", 20, "model/model.safetensors is not as long as its header says"),
        ("model/model.safetensors", 0, "model/model.safetensors is not as long as its header says"),
        (checkpoint.TRAINER, 5, "Input data was truncated"),
        (checkpoint.POSITION, 5, "truncated"),
    ],
)
def test_one_that_is_not_whole_is_left_out_and_said(run: Path, name: str, left: int, fault: str) -> None:
    newest = checkpoint.folder_for(run, 20)
    said: list[str] = []
    (newest / name).write_bytes((newest / name).read_bytes()[:left])
    assert checkpoint.resolve("auto", run, said.append) == str(checkpoint.folder_for(run, 10))
    (line,) = said
    assert line.startswith(f"run.resume: {newest} is left out: ")
    assert fault in line and "\n" not in line


def test_a_run_without_a_whole_one_is_not_begun_anew(run: Path) -> None:
    for step in (10, 20):
        (checkpoint.folder_for(run, step) / checkpoint.TRAINER).unlink()
    with pytest.raises(UserError, match=r"^run.resume: no checkpoint of .* is whole; step-00000020: .*No such file"):
        checkpoint.resolve("auto", run)
