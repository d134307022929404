"""A run's folder: no earlier run is lost unasked."""

from __future__ import annotations

import asyncio
import fcntl
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from launcher import run_folder
from runtime import config, run_files, timeouts
from runtime.config import Run
from runtime.data.prompts import StreamState
from runtime.errors import UserError
from runtime.ledger import checkpoint
from runtime.ledger.journal import LedgerWriter
from runtime.ledger.position import Position
from runtime.ledger.records import CheckpointSaved
from runtime.types import PolicyVersion

STREAM = StreamState(position=0, ordinal=0, returned=[], seed=0, shuffle=True, problems=1, fingerprint=0)


def chosen(folder: Path, resume: object = "never", overwrite: bool = False, **sections: Any) -> config.Config:
    return config.Config(run=Run(name="a", dir=str(folder), resume=str(resume), overwrite=overwrite), **sections)


def taken(folder: Path, **run: Any) -> None:
    run_folder.prepare(folder, Run(name="a", **run))[1].close()


async def journal(folder: Path, trained: bool = False) -> None:
    ledger = await LedgerWriter.open(folder / run_files.LEDGER, 1 << 20)
    if trained:
        ledger.record(CheckpointSaved(step=40, incarnation=0, path="there", at=0.0))
    await ledger.close()


def save(folder: Path) -> None:
    partial = checkpoint.begin(folder)
    (partial / checkpoint.TRAINER).write_text("{}")
    checkpoint.complete(partial, folder, Position(version=PolicyVersion(0, 10), stream=STREAM, trained=[]))


@pytest.mark.parametrize("resume", ["never", ""])  # "" is what a run that began anew keeps in its own config.yaml
def test_a_folder_that_holds_a_run_is_refused(tmp_path: Path, resume: str) -> None:
    (tmp_path / run_files.LEDGER).mkdir()
    with pytest.raises(UserError, match="holds a run already"):
        taken(tmp_path, resume=resume)
    taken(tmp_path, resume=resume, overwrite=True)
    taken(tmp_path, resume="auto")


def test_a_run_that_ended_before_its_first_sample_is_replaced(tmp_path: Path) -> None:
    asyncio.run(journal(tmp_path))
    taken(tmp_path)
    (tmp_path / run_files.EVALUATIONS).mkdir()
    with pytest.raises(UserError, match="holds a run already"):
        taken(tmp_path)


def test_whoever_only_looks_whether_a_run_is_under_way_keeps_none_from_starting(tmp_path: Path) -> None:
    (tmp_path / run_files.LOCK).touch()
    looking = (tmp_path / run_files.LOCK).open("rb")
    fcntl.flock(looking, fcntl.LOCK_SH)
    threading.Timer(2 * timeouts.RUN_LOCK_POLL, looking.close).start()
    taken(tmp_path)


def test_a_folder_under_way_is_refused(tmp_path: Path) -> None:
    _, lock = run_folder.prepare(tmp_path, Run(name="a"))
    with lock, pytest.raises(UserError, match="a run is under way in"):
        run_folder.prepare(tmp_path, Run(name="a"))


@pytest.mark.parametrize("name", [run_files.MODEL, run_files.CHECKPOINTS, run_files.CONFIG])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, name: str, overwrite: bool) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "mine").touch()
    with pytest.raises(UserError, match=f"is no run's folder, and a run would replace '{name}' in it"):
        run_folder.prepare(tmp_path, Run(name="a", resume="auto", overwrite=overwrite))
    assert sorted(path.name for path in tmp_path.rglob("*")) == sorted([name, "mine"])


@pytest.mark.parametrize(
    "sections",
    [
        {"model": config.Model(path="RUN/model")},
        {"data": config.Data(train="RUN/evaluations/a.jsonl")},
        {"critic": config.Critic(path="RUN/checkpoints/step-00000001")},
    ],
    ids=["model", "data", "critic"],
)
def test_a_new_run_does_not_remove_what_it_is_to_read(tmp_path: Path, sections: dict[str, Any]) -> None:
    (tmp_path / run_files.MODEL).mkdir()
    text = msgspec.json.encode(chosen(tmp_path, overwrite=True, **sections))
    with pytest.raises(UserError, match="lies in what a new run in"):
        run_folder.begin(tmp_path, msgspec.json.decode(text.replace(b"RUN", str(tmp_path).encode()), type=config.Config))
    assert (tmp_path / run_files.MODEL).is_dir()


def test_a_trained_model_without_its_checkpoints_is_not_trained_over(tmp_path: Path) -> None:
    (tmp_path / run_files.MODEL).mkdir()
    with pytest.raises(UserError, match=r"finds no checkpoint in .*, which holds a trained model"):
        run_folder.begin(tmp_path, chosen(tmp_path, "auto"))
    assert run_folder.begin(tmp_path, chosen(tmp_path, "auto", overwrite=True)) == ""
    assert not (tmp_path / run_files.MODEL).exists()


def test_a_ledger_whose_checkpoints_are_gone_is_not_begun_over(tmp_path: Path) -> None:
    asyncio.run(journal(tmp_path, trained=True))
    finds = r"^run.resume: auto finds no checkpoint in .*, which holds a ledger of steps that were"
    with pytest.raises(UserError, match=finds):
        run_folder.begin(tmp_path, chosen(tmp_path, "auto"))
    assert (tmp_path / run_files.LEDGER).is_dir()
    assert run_folder.begin(tmp_path, chosen(tmp_path, "auto", overwrite=True)) == ""
    assert not (tmp_path / run_files.LEDGER).exists()
    asyncio.run(journal(tmp_path))  # which was killed before its first step
    assert run_folder.begin(tmp_path, chosen(tmp_path, "auto")) == ""
    (tmp_path / run_files.LEDGER).mkdir()
    (tmp_path / run_files.LEDGER / "ledger.sqlite").write_text("not a database")
    with pytest.raises(UserError, match=r"which holds a ledger that cannot be read \("):
        run_folder.begin(tmp_path, chosen(tmp_path, "auto"))


def test_a_run_with_checkpoints_is_not_replaced_without_a_word(tmp_path: Path) -> None:
    for step in (40, 50):
        save(checkpoint.folder_for(tmp_path, step))
    said: list[str] = []
    assert run_folder.begin(tmp_path, chosen(tmp_path, overwrite=True), said.append) == ""
    assert said == [f"run.overwrite: replaces the run in {tmp_path}, whose newest checkpoint was step-00000050"]


def test_a_checkpoint_of_a_branch_that_the_run_has_left_is_moved_back_first(tmp_path: Path) -> None:
    for step in (40, 50):
        save(checkpoint.folder_for(tmp_path, step))
    assert checkpoint.set_aside(tmp_path, 40, 1) == [50]
    dead = tmp_path / run_files.CHECKPOINTS / "dead-1" / "step-00000050"
    of_a_branch = r"^run.resume: .*dead-1/step-00000050 is of a branch that the run has left; move it to"
    with pytest.raises(UserError, match=of_a_branch):
        run_folder.begin(tmp_path, chosen(tmp_path, dead))
    dead.rename(checkpoint.folder_for(tmp_path, 50))
    said: list[str] = []
    found = run_folder.begin(tmp_path, chosen(tmp_path, "auto", overwrite=True), said.append)
    assert Path(found).name == "step-00000050"
    assert said == [f"run.resume: going on from {found}; run.overwrite replaces nothing"]


def test_a_checkpoint_of_another_run_begins_a_folder_of_its_own(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs" / run_files.CHECKPOINTS / "step-00000010"
    own = tmp_path / "own" / run_files.CHECKPOINTS / "step-00000020"
    for folder in (theirs, own):
        save(folder)
    ours = tmp_path / "own"
    (ours / run_files.LEDGER).mkdir()

    def begin(resume: Path, folder: Path, overwrite: bool = False) -> str:
        return run_folder.begin(folder, chosen(folder, resume, overwrite))

    assert begin(own, ours) == str(own)
    with pytest.raises(UserError, match=rf"^run.resume: {theirs} is not of the run that {ours} holds; .*run.resume=auto"):
        begin(theirs, ours)
    assert own.is_dir() and (ours / run_files.LEDGER).is_dir()
    assert begin(theirs, tmp_path / "new") == str(theirs)
    assert begin(theirs, ours, overwrite=True) == str(theirs)  # in the place of the run
    assert not own.exists() and not (ours / run_files.LEDGER).exists() and theirs.is_dir()


def test_a_checkpoint_is_not_removed_by_the_run_that_begins_with_it(tmp_path: Path) -> None:
    kept = tmp_path / run_files.CHECKPOINTS / "kept" / "step-00000010"
    save(kept)
    with pytest.raises(UserError, match=r"^run.resume: .* lies in what a new run in .* removes"):
        run_folder.begin(tmp_path, chosen(tmp_path, kept, overwrite=True))
    assert kept.is_dir()
