"""Processes in whose place no other may come, stopped or killed in the middle of a run: it ends in time, says who it was, and
leaves nothing behind."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import psutil
import pytest

from tests.system.runs import LONG, Live, check_gone, eventually, listening, one_line, started

pytestmark = pytest.mark.timeout(360)

NEVER = tuple(f"services.{role}.restarts.attempts=0" for role in ("coordinator", "reward", "reference", "trainer"))
no_megatron = importlib.util.find_spec("megatron") is None
TOLD = 60.0  # seconds until a run whose process was killed has ended
STUCK = 90.0  # and one whose process does not answer: the deadlines below, and what it takes to end everything


def everyone(run: Live) -> list[psutil.Process]:
    """The launcher and all that descend from it, a reward's workers included."""
    launcher = psutil.Process(run.process.pid)
    return [launcher, *launcher.children(recursive=True)]


def all_gone(processes: list[psutil.Process]) -> None:
    def running() -> list[psutil.Process]:
        return [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]

    eventually(lambda: not running(), TOLD, "the end of every process")


class Ending:
    """What a run leads to that something is about to be done to."""

    def __init__(self, run: Live):
        self._run = run
        self._family = everyone(run)
        self._ports = listening(self._family)

    def told(self, timeout: float) -> str:
        """The one line in which the run says why it ended, within `timeout`; nothing may be left of it."""
        run = self._run
        assert run.wait(timeout) == 1, run.output + run.errors
        all_gone(self._family)
        check_gone(run.folder, self._ports)
        assert "Traceback" not in run.output
        return one_line(run.errors)


@pytest.mark.parametrize("name", ["trainer-0", "coordinator", "reward-0"])
def test_a_process_that_is_killed_is_named(config: Path, tmp_path: Path, name: str) -> None:
    """The coordinator, or the last of its role that may not be started again."""
    with started(config, *LONG, *NEVER, folder=tmp_path / "run") as run:
        run.reaches(2)
        ending = Ending(run)
        run.member(name).kill()
        line = ending.told(TOLD)
        assert line.startswith(f"error: {name}: ")
        assert "SIGKILL" in line


MEGATRON_REFERENCE = ("services.reference.engine=megatron", "services.reference.parallel.pipeline=2")


@pytest.mark.parametrize(
    ("role", "settings"),
    [
        ("trainer", ("publication.senders=all",)),
        pytest.param(
            "reference",
            MEGATRON_REFERENCE,
            marks=pytest.mark.skipif(no_megatron, reason="needs megatron-core: make install-dev"),
        ),
    ],
)
def test_a_rank_that_is_killed_ends_its_group_and_the_run(
    config: Path, tmp_path: Path, role: str, settings: tuple[str, ...]
) -> None:
    with started(config, *LONG, *NEVER, *settings, f"services.{role}.processes=2", folder=tmp_path / "run") as run:
        run.reaches(2)
        ending = Ending(run)
        run.member(f"{role}-0", rank=1).kill()
        assert role in ending.told(TOLD)


def test_a_trainer_that_is_stopped_in_the_middle_of_training_is_named(config: Path, tmp_path: Path) -> None:
    deadlines = ("publication.transfer_timeout=3", "publication.commit_timeout=3", "deadlines.train=5", "deadlines.stop=8")
    with started(config, *LONG, *NEVER, *deadlines, folder=tmp_path / "run") as run:
        run.reaches(2)
        ending = Ending(run)
        run.member("trainer-0").suspend()
        assert "trainer-0" in ending.told(STUCK)


@pytest.mark.parametrize("processes", [1, 2])
def test_nothing_outlives_a_launcher_that_is_killed(config: Path, tmp_path: Path, processes: int) -> None:
    with started(config, *LONG, f"services.trainer.processes={processes}", folder=tmp_path / "run") as run:
        run.reaches(2)
        family = everyone(run)
        assert len(family) >= 6 + processes  # itself, coordinator, rollouts, reward, reference, ranks
        run.process.kill()
        run.wait(TOLD)
        all_gone(family)
