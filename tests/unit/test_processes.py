"""Processes: their start-up, their calls, counted and drained at the end, and what a coordinator says of itself."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import sluice
from launcher.commands import train
from runtime.cluster.nodes import Death
from runtime.config import Config, Run
from runtime.errors import ServiceFault, UserError
from runtime.process import keys, os_process
from runtime.status import Loss, Progress
from runtime.telemetry import startup
from runtime.telemetry.startup import Phases, Startup
from runtime.types import LogprobRequest
from services.coordinator import CoordinatorProcess
from services.rpc import contract
from services.rpc.server import Calls
from tests.unit.actor_desk import run as run_desk
from tests.unit.actor_desk import settle

PHASES = ("launcher", "coordinator", "data", "services", "first weight sync", "evaluation", "first step", "to first step")
FOUND = Startup(
    phases=dict(zip(PHASES, (0.5, 0.4, 0.2, 3.9, 0.1, 0.4, 0.2, 5.3), strict=True)),
    processes={
        "coordinator": {"interpreter": 0.1, "imports": 9.0},
        "rollout-0": {"interpreter": 0.1, "imports": 0.3, "libraries": 1.5, "load": 0.1},
        "trainer-0": {"interpreter": 0.1, "imports": 0.3, "libraries": 3.0, "load": 0.4},
    },
)


def test_the_line_has_the_phases_in_order_and_who_was_waited_for() -> None:
    assert startup.line(FOUND) == (
        "5.3 s to the first step: launcher 0.5, coordinator 0.4, data 0.2, "
        "services 3.9 (trainer-0: interpreter 0.1, imports 0.3, libraries 3.0, load 0.4), "
        "first weight sync 0.1, first step 0.2; not counted: evaluation 0.4"
    )


def test_the_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert Startup.read(tmp_path) is None
    FOUND.write(tmp_path)
    assert Startup.read(tmp_path) == FOUND
    assert [path.name for path in tmp_path.iterdir()] == ["startup.json"]


def test_phases_follow_each_other_from_the_start_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter((100.0, 106.5))
    monkeypatch.setattr(startup.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(os_process, "age", lambda: 2.0)
    phases = Phases()
    phases.mark("interpreter", 99.0)
    phases.mark("imports")
    assert (phases.born, phases.seconds) == (98.0, {"interpreter": 1.0, "imports": 7.5})
    shuffled = {"load": 4.0, "imports": 2.0, "libraries": 3.0, "interpreter": 1.0}  # as by a message
    assert list(startup.in_order(shuffled)) == ["interpreter", "imports", "libraries", "load"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere known to a second only")
def test_the_age_of_a_process_counts_from_its_start() -> None:
    """Not from its first line, nor from a second before."""
    code = "import sys; from runtime.process import os_process; print(os_process.age(), flush=True)"
    before = time.monotonic()
    told = float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout)
    most = time.monotonic() - before  # the process lived within it; its start is known to a tick of the kernel's
    assert 0 < told <= most + 1 / os.sysconf("SC_CLK_TCK")
    assert os_process.age() > told


def test_nothing_is_collected_while_an_engine_is_made() -> None:
    frozen = gc.get_freeze_count()
    try:
        with startup.uncollected():
            assert not gc.isenabled()
        assert gc.isenabled()
        assert gc.get_freeze_count() > frozen
    finally:
        gc.unfreeze()


def test_a_run_that_a_program_starts_is_counted_from_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not from the program's start: it may have trained others before."""
    jobs = []

    async def run(self: train._TrainJob) -> None:
        jobs.append(self)

    monkeypatch.setattr(train._TrainJob, "run", run)
    called = time.monotonic()
    sluice.train(Config(run=Run(name="a")))
    (job,) = jobs
    assert job.started == job.launched >= called


# ------------------------------------------------------------------------------------------------------------------------ calls
DATA = contract.METHODS["Reference", "Logprobs"]
CONTROL = contract.METHODS["Rollout", "CommitWeights"]
REQUEST = LogprobRequest(group_id=1, payload=b"")


class Handled:
    """Calls whose answers the test gives."""

    def __init__(self) -> None:
        self.calls = Calls("desk")
        self.answers: list[asyncio.Future[Any]] = []

    def begin(self, method: contract.Method = DATA) -> asyncio.Future[Any]:
        def handler(_: Any) -> Awaitable[Any]:
            self.answers.append(asyncio.get_running_loop().create_future())
            return self.answers[-1]

        answer = self.calls.counted(method, handler)(REQUEST)
        assert isinstance(answer, asyncio.Future)
        return answer

    @property
    def counts(self) -> tuple[int, int, int, int]:
        stats = self.calls.stats
        return stats.open, stats.answered, stats.failed, stats.withdrawn


def test_each_call_is_counted_by_how_it_ended() -> None:
    async def test() -> None:
        handled = Handled()
        answered, failed, withdrawn, _ = (handled.begin() for _ in range(4))
        handled.answers[0].set_result(1)
        handled.answers[1].set_exception(ServiceFault("desk", "serve", "closed"))
        withdrawn.cancel()
        await settle()
        assert handled.counts == (1, 1, 1, 1)
        assert (await answered, handled.answers[2].cancelled(), failed.exception() is None) == (1, True, False)

    run_desk(test())


def test_while_it_drains_data_is_not_answered_and_what_came_before_is_waited_for() -> None:
    async def test() -> None:
        handled = Handled()
        kept = handled.begin()
        draining = asyncio.create_task(handled.calls.drain(60.0))
        await settle()
        late = handled.begin()
        assert len(handled.answers) == 1
        handled.begin(CONTROL)
        handled.answers[1].set_result(None)
        await settle()
        assert not draining.done()
        handled.answers[0].set_result("done")
        await draining
        assert await kept == "done"
        assert not late.done()

    run_desk(test())


def test_what_is_still_open_when_the_time_is_over_is_withdrawn(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        handled = Handled()
        kept = handled.begin()
        await handled.calls.drain(0.0)
        assert kept.cancelled()
        await handled.calls.drain(0.0)  # of one that is idle, at once

    run_desk(test())
    assert [record.getMessage() for record in caplog.records] == ["desk: 1 calls were dropped at the end"]


def test_what_is_no_error_of_ours_is_logged_once_with_the_place_where_it_was_raised(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        handled = Handled()
        calls = [handled.begin() for _ in range(4)]
        try:
            raise AttributeError("no attribute 'nosuch'")
        except AttributeError as error:
            theirs = error
        for answer, error in zip(handled.answers, [ServiceFault("desk", "serve", "closed")] * 2 + [theirs] * 2, strict=True):
            answer.set_exception(error)
        await asyncio.wait(calls)
        for call in calls:
            call.exception()

    run_desk(test())
    (record,) = caplog.records
    assert record.getMessage() == "desk: Logprobs failed"
    assert "no attribute 'nosuch'" in caplog.text and "in test" in caplog.text


# ------------------------------------------------------------------------------------------------------ what a coordinator says
def coordinator(folder: Path, **sections: Any) -> CoordinatorProcess:
    keys.begun(folder)
    given = {"run": {"name": "a", "dir": str(folder)}, "rewards": {"rules": [{"name": "gsm8k"}]}, "model": {"path": "/m"}}
    return CoordinatorProcess(msgspec.convert({**given, **sections}, Config), Phases())


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"services": {"coordinator": {"host": "192.0.2.77"}}}, "services.coordinator.host"),
        ({"services": {"coordinator": {"host": "192.0.2.77", "port": 29777}}}, "services.coordinator.port"),
        ({"network": {"interface": "192.0.2.77"}}, "network.interface"),
    ],
)
def test_an_address_that_is_not_this_machines_is_told_with_its_key(tmp_path: Path, sections: dict[str, Any], key: str) -> None:
    read, write = os.pipe()
    try:
        with pytest.raises(UserError, match=f"^{key}: cannot listen on 192.0.2.77:[0-9]+: "):
            asyncio.run(coordinator(tmp_path, **sections).serve(write))
    finally:
        os.close(read)
        os.close(write)


def test_its_status_says_what_a_start_waits_for_and_why_a_run_recovers(tmp_path: Path) -> None:
    found = coordinator(tmp_path)
    found._wait_for_nodes("1 of 2 nodes")
    assert found.status().detail == "a: starting 0/1000: waits for 1 of 2 nodes"
    found.report(Progress(phase="recovering", step=3, steps=10, detail="trainer-0: run: connection lost"))
    assert found.status().detail == "a: recovering 3/10: trainer-0: run: connection lost"


def test_a_death_that_an_agent_tells_of_is_the_loss_of_the_process_though_its_session_stands(tmp_path: Path) -> None:
    class Standing:
        name, incarnation, given_up = "reward-1", 2, ""

        def when_lost(self, tell: Callable[[str], None]) -> None:
            """Its connection does not break."""

        def give_up(self, reason: str) -> None:
            self.given_up = reason

    async def test() -> None:
        found, session = coordinator(tmp_path), Standing()
        found._failed = asyncio.get_running_loop().create_future()
        found._register.place("reward", ["reward-0"])
        found._register.add("reward", session)
        found.report(Progress(phase="training"))
        death = Death(node="b", name="reward-1", incarnation=2, reason="reward-1: run: was killed by SIGKILL")
        found._died(death)
        assert session.given_up == death.reason
        assert found._progress.lost == [Loss(name="reward-1", incarnation=2, reason=death.reason)]
        assert not found._failed.done()  # there is another
        found._died(msgspec.structs.replace(death, name="reward-0", incarnation=0))
        assert found._failed.exception() is not None

    asyncio.run(test())
