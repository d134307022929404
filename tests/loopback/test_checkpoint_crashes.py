"""A process that saves checkpoints is killed before each of its operations on files in turn, and the run is begun again."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher import run_folder
from runtime import config, run_files
from runtime.data.prompts import StreamState
from runtime.errors import UserError
from runtime.ledger import checkpoint
from runtime.ledger.position import Position
from runtime.types import PolicyVersion

STREAM = StreamState(position=0, ordinal=0, returned=[], seed=0, shuffle=True, problems=1, fingerprint=0)
CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "open")  # what Python says of itself before it does them
KILLED, FAILED = 41, 42

Work = Callable[[Path], Any]


def save(run: Path, step: int, word: str, keep: int) -> None:
    """As the coordinator does it: a checkpoint whose files say `word`."""
    folder = checkpoint.folder_for(run, step)
    partial = checkpoint.begin(folder)
    (partial / "model").mkdir()
    for name in ("model/__0_0.distcp", "model/__1_0.distcp", checkpoint.TRAINER):
        (partial / name).write_text(f'"{word}"')
    checkpoint.complete(partial, folder, Position(version=PolicyVersion(0, step), stream=STREAM, trained=[]))
    checkpoint.prune(run, keep, {step})


def export(run: Path, word: str) -> None:
    with checkpoint.atomic_folder(run / run_files.MODEL) as partial:
        for name in ("config.json", "model.safetensors"):
            (partial / name).write_text(word)


def auto(run: Path) -> str:
    return run_folder.begin(run, config.Config(run=config.Run(name="a", dir=str(run), resume="auto")))


def words(folder: Path) -> set[str]:
    return {path.read_text() for path in folder.rglob("*") if path.is_file() and path.name != checkpoint.POSITION}


def killed_before(number: int, work: Callable[[], Any]) -> bool:
    """Do `work` in a child that is gone, with no clean-up, before its operation `number` on files. Whether it came that far."""
    child = os.fork()
    if not child:
        gc.disable()  # what earlier tests left, a gRPC server for one, would wait for threads that a child does not have
        left = [number]

        def count(event: str, _: tuple[Any, ...]) -> None:
            if event in CHANGES:
                left[0] -= 1
                if left[0] < 0:
                    os._exit(KILLED)

        try:
            sys.addaudithook(count)
            work()
        except BaseException:  # noqa: BLE001 - nothing of the parent's may go on here
            left[0] = 1 << 30
            traceback.print_exc()
            os._exit(FAILED)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, KILLED)
    return code == KILLED


def every_crash(template: Path, work: Work) -> Iterator[tuple[Path, bool]]:
    """A copy of `template` for each operation before which `work` was killed, and one of which it came to its end."""
    number, killed = 0, True
    while killed:
        run = template.with_name(f"killed-{number}")
        shutil.copytree(template, run)
        killed = killed_before(number, lambda run=run: work(run))  # type: ignore[misc]
        yield run, killed
        shutil.rmtree(run)
        number += 1
    assert number > 10


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    (run / run_files.LEDGER).mkdir(parents=True)
    (run / run_files.LEDGER / "payloads").touch()
    return run


@pytest.mark.parametrize("step", [40, 50], ids=["of the same step", "of the next one"])
def test_the_only_checkpoint_is_there_until_another_is(run: Path, step: int) -> None:
    save(run, 40, "old", keep=1)
    seen = []
    for again, killed in every_crash(run, lambda run: save(run, step, "new", keep=1)):
        found = Path(auto(again))
        (word,) = words(found)
        assert found.name == (f"step-{step:08d}" if word == '"new"' else "step-00000040")
        assert (again / run_files.LEDGER / "payloads").exists()
        assert sorted(path.name for path in (again / run_files.CHECKPOINTS).glob(".*")) == []
        assert killed or word == '"new"'
        seen.append(word)
    assert seen == sorted(seen, reverse=True) and len(set(seen)) == 2  # what counts once counts from then on


def test_a_crash_while_the_run_is_begun_again_changes_nothing(run: Path) -> None:
    save(run, 40, "old", keep=1)
    for crashed, _ in every_crash(run, lambda run: save(run, 40, "new", keep=1)):
        for number in range(100):
            killed = killed_before(number, lambda run=crashed: auto(run))  # type: ignore[misc]
            if not killed:
                break
        found = Path(auto(crashed))
        assert len(words(found)) == 1 and found.name == "step-00000040"


@pytest.mark.parametrize("keep", [1, 2])
def test_a_run_that_goes_back_keeps_its_base_until_it_has_saved_and_the_branch_that_it_left(run: Path, keep: int) -> None:
    for step in (40, 50, 60):
        save(run, step, "old", keep=9)

    def goes_back(run: Path) -> None:
        checkpoint.set_aside(run, 40, 2)
        save(run, 45, "new", keep)

    for again, killed in every_crash(run, goes_back):
        places = {path.parent.name for path in (again / run_files.CHECKPOINTS).rglob(checkpoint.POSITION)}
        assert {"step-00000050", "step-00000060"} <= places
        found = Path(auto(again))
        assert not checkpoint.fault(found)
        if not killed:
            assert found.name == "step-00000045"
            assert checkpoint.steps(again) == ([40, 45] if keep == 2 else [45])
        elif found.name != "step-00000045":
            assert checkpoint.steps(again)[0] == 40


def test_the_model_is_there_until_another_is(run: Path) -> None:
    save(run, 40, "old", keep=1)
    export(run, "old")
    seen = []
    for again, killed in every_crash(run, lambda run: export(run, "new")):
        auto(again)
        (word,) = words(again / run_files.MODEL)
        assert killed or word == "new"
        seen.append(word)
    assert seen == sorted(seen, reverse=True) and len(set(seen)) == 2


def test_what_is_half_deleted_under_its_own_name_is_not_whole(run: Path) -> None:
    """As version 0.1.0 left it, and whoever removes files by hand."""
    save(run, 40, "old", keep=9)
    save(run, 50, "old", keep=9)
    newest = checkpoint.folder_for(run, 50)
    (newest / "model" / "__0_0.distcp").unlink()
    assert Path(auto(run)) == checkpoint.folder_for(run, 40)
    chosen = config.Config(run=config.Run(name="a", dir=str(run), resume=str(newest)))
    with pytest.raises(UserError, match=r"^run.resume: .*step-00000050 is not whole: .*__0_0.distcp"):
        run_folder.begin(run, chosen)
