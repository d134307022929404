"""What vLLM's processes leave: whose it is, and when it goes."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from runtime.rollout.vllm import leftovers
from runtime.rollout.vllm.leftovers import Leftovers

MEETING = "vllm_dist_0123"
NOTED, NAMED_AFTER, ANOTHERS = "psm_1", f"{MEETING}-tp:0-[0-1]-cpushm_0", "psm_2"


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of /dev/shm, with files of one engine, and of another."""
    folder = tmp_path / "shm"
    folder.mkdir()
    for name in (NOTED, NAMED_AFTER, ANOTHERS):
        (folder / name).write_text("")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(leftovers, "SHARED", folder)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return folder


def engine() -> Leftovers:
    made = Leftovers()
    with made.starting():
        assert tempfile.gettempdir() == os.environ["TMPDIR"] == str(made._folder)
        (Path(tempfile.gettempdir()) / MEETING).write_text("")
    made._names.add(NOTED)
    made.note()
    return made


def left(shared: Path) -> tuple[set[str], int]:
    """Files in shared memory, and folders of engines."""
    return {file.name for file in shared.iterdir()}, len(list(Path(tempfile.gettempdir()).iterdir()))


def test_it_goes_with_the_engine(shared: Path) -> None:
    variables = dict(os.environ)
    made = engine()
    assert dict(os.environ) == variables
    made.remove()
    made.remove()
    assert left(shared) == ({ANOTHERS}, 0)


@pytest.mark.parametrize(("longest", "beside"), [(1000, False), (10, True)])
def test_sockets_go_with_the_engine_too_where_their_paths_are_short_enough(
    shared: Path, monkeypatch: pytest.MonkeyPatch, longest: int, beside: bool
) -> None:
    monkeypatch.setattr(leftovers, "_PATH_BYTES", longest)
    monkeypatch.delenv("VLLM_RPC_BASE_PATH", raising=False)
    usual, made = tempfile.gettempdir(), Leftovers()
    with made.starting():
        assert os.environ["VLLM_RPC_BASE_PATH"] == (usual if beside else str(made._folder))
    made.remove()


def test_what_a_killed_engine_left_goes_with_the_next_and_what_is_in_use_stays(shared: Path) -> None:
    made = engine()
    leftovers.clear()
    assert left(shared) == ({NOTED, NAMED_AFTER, ANOTHERS}, 1)
    os.close(made._lock)  # as the kernel does
    Leftovers().remove()
    assert left(shared) == ({ANOTHERS}, 0)


def test_names_that_are_not_vllms_are_not_noted() -> None:
    names = ("psm_00e1b003", "vllm_dist_5d09-tp:0-[0-1]-cpushm_1", "29500-tp:0-[0-1]-cpushm_0", "sem.ga4gVC", "torch_1_2")
    assert [bool(leftovers._OF_VLLM.match(name)) for name in names] == [True, True, True, False, False]
