"""What a job does with the run's progress: it heeds all of it, and does not go on without."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from launcher import job
from launcher.job import Job
from launcher.node.agent import Agent
from launcher.node.coordinator import CoordinatorKeeper
from launcher.node.local_node import LocalNode
from launcher.node.machine import Machine
from launcher.node.supervisor import Supervisor
from launcher.view import View
from runtime import config
from runtime.config import Config, Run
from runtime.status import Loss, Progress
from tests.unit.test_shown import GLOO

DEADLINE = 60.0
LOST = Loss(name="rollout-1", incarnation=0, reason=GLOO)
COURSE = [
    Progress(phase="training"),
    Progress(phase="recovering", detail=f"trainer-0: {GLOO}"),
    Progress(phase="training", lost=[LOST]),
    Progress(phase="recovering", detail=f"trainer-0: {GLOO}"),
]


class Coordinator:
    """In the place of its Child: a process that ends once `over` is set."""

    def __init__(self) -> None:
        self.over = asyncio.Event()
        self.process = self.spec = self
        self.name, self.incarnation = "coordinator", 0

    async def wait(self) -> int:
        await self.over.wait()
        return 0


class Heeding(Agent):
    """Follows nobody; hears."""

    def __init__(self, config: Config, hear: Callable[[Progress], None]):
        self.keys = None
        self.config = config
        self.apply_progress = hear  # type: ignore[method-assign]

    def look_for_keys(self) -> None:
        """Nobody needs any."""

    async def follow(self) -> None:
        await asyncio.Event().wait()


class Watching(Job[None]):
    trains = True
    stopped_early = stopped_late = ""

    async def prepared(self) -> Config:
        return self.config

    async def outcome(self) -> None:
        pass


def watched(folder: Path, view: View, monkeypatch: pytest.MonkeyPatch, course: list[Progress]) -> list[Progress]:
    """What is heeded of `course`, after all of which the coordinator ends. Raises what the job does."""
    heeded: list[Progress] = []

    async def until_done() -> None:
        found = Watching(config.Config(run=Run(name="a", dir=str(folder))), view, LocalNode("here", Machine()))
        coordinator: Any = Coordinator()
        heeding = Heeding(found.config, heeded.append)
        found.supervisor, found._agent = Supervisor(folder, view), heeding
        found._coordinator = CoordinatorKeeper(found.supervisor)
        found._coordinator.child = coordinator

        async def watch(address: str, silence: float, own: object) -> AsyncIterator[Progress]:
            for progress in course:
                yield progress
            coordinator.over.set()

        monkeypatch.setattr(job.session, "watch", watch)
        await asyncio.wait_for(found._until_done("here:1"), DEADLINE)

    asyncio.run(until_done())
    return heeded


@pytest.mark.parametrize("terminal", [False, True])
def test_whatever_an_error_says_the_progress_after_it_is_heeded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    out = io.StringIO()
    with View(Console(file=out, width=200, force_terminal=terminal), line_interval=0.0) as view:
        assert watched(tmp_path, view, monkeypatch, COURSE) == COURSE
    assert f"lost on another node: rollout-1: {GLOO[:20]}" in out.getvalue()


def test_a_job_that_cannot_watch_its_run_any_more_ends_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(View):
        def progress(self, progress: Progress) -> None:
            raise ValueError("cannot be shown")

    endless = Progress(phase="training")
    with Broken(Console(file=io.StringIO())) as view:

        async def never(*_: object) -> int:
            await asyncio.Event().wait()
            return 0

        monkeypatch.setattr(Coordinator, "wait", never)
        with pytest.raises(ValueError, match="cannot be shown"):
            watched(tmp_path, view, monkeypatch, [endless])
