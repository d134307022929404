"""Epochs over real gloo: the trainer's and the rollouts' services behind their actors, with engines that only hold tensors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from runtime import config
from runtime.actor import Actor, Priority
from runtime.commands import (
    AbortWeights,
    Apply,
    CommitWeights,
    HostWeights,
    JoinWeights,
    ReceiveWeights,
    SendWeights,
    WeightsSent,
)
from runtime.coordinator.register import ROLLOUT, Register, UnitState
from runtime.coordinator.rollout_pool import RolloutPool
from runtime.coordinator.weight_sync import Publisher
from runtime.errors import Unreachable
from runtime.process import os_process
from runtime.rollout.engine import EngineStats
from runtime.types import PolicyVersion, StepResult
from runtime.weights.plan import GroupAddress, Manifest
from runtime.weights.sender import WeightSender
from services.rollout import RolloutService
from services.trainer import TrainerService
from tests.loopback.publisher_cases import come
from tests.loopback.weight_cases import MANIFEST, expected, same

DEADLINE = 100.0
# Longer than a test may take: what waits for one of these deadlines fails.
PUBLICATION = config.Publication(join_timeout=600.0, transfer_timeout=600.0, commit_timeout=600.0, abort_timeout=600.0)
IMPATIENT = replace(PUBLICATION, transfer_timeout=4.0, abort_timeout=4.0)


class Held:
    """A rollout's engine: `swapped` are the versions that it took over, each of which has to be whole."""

    adopts = True
    torn = False

    def __init__(self) -> None:
        self.version = PolicyVersion()
        self.swapped: list[int] = []
        self._staged: Mapping[str, torch.Tensor] = {}

    @property
    def has_work(self) -> bool:
        return False

    def stats(self) -> EngineStats:
        return EngineStats()

    async def stage(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._staged = tensors

    async def swap(self, version: PolicyVersion, recompute: bool) -> None:
        assert same(dict(self._staged), version.step)
        self.version = version
        self.swapped.append(version.step)

    async def close(self) -> None:
        """There is nothing to free."""


class Worker:
    """A trainer's engine: the weights of a version are made from its number."""

    publication_backend = "gloo"
    senders = ("trainer-0",)
    manifest = MANIFEST

    def __init__(self, settings: config.Publication) -> None:
        self.version = PolicyVersion()
        self.sender = WeightSender(MANIFEST, whole=settings.overlap)
        self.gathered: list[int] = []

    def execute(self, command: Any) -> StepResult | None:
        if isinstance(command, Apply):
            self.version = PolicyVersion(0, command.step + 1)
            return StepResult(metrics={}, seconds=0.0)
        if isinstance(command, SendWeights):
            self.version = command.version
            self.gathered.append(command.version.step)
            self.sender.fill(self.weights(command.version.step))
        return None

    def weights(self, step: int) -> Iterable[torch.Tensor]:
        return expected(step).values()


class Port:
    """A service behind its actor, as the coordinator reaches it. `cut` is the death of a rollout's process."""

    apart = False  # on a machine of its own, so that weights go by the collective

    def __init__(self, service: Any, incarnation: int = 0):
        self.service = service
        self.name = service.name
        self.machine = self.name if self.apart else os_process.machine()
        self.incarnation = incarnation
        self.actor = Actor(service.name, service, capacity=9)
        self.silent = False  # under SIGSTOP
        self._gone = asyncio.Event()
        self._tell: Callable[[str], None] = lambda why: None

    def when_lost(self, tell: Callable[[str], None]) -> None:
        self._tell = tell

    def give_up(self, reason: str) -> None:
        self._gone.set()

    def cut(self) -> None:
        if self.service.weights.group is not None:
            self.service.weights.group.abort()
        self._gone.set()
        self._tell("connection lost")

    async def ask(self, message: Any, priority: Priority = Priority.CONTROL) -> Any:
        answer = asyncio.Event() if self.silent else self.actor.send(message, priority=priority)
        waiting = asyncio.ensure_future(answer.wait() if isinstance(answer, asyncio.Event) else answer)
        gone = asyncio.ensure_future(self._gone.wait())
        try:
            await asyncio.wait({waiting, gone}, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                raise Unreachable(self.name, type(message).__name__, "connection lost")
            return waiting.result()
        finally:
            gone.cancel()
            waiting.cancel()

    async def abort_weights(self, version: PolicyVersion, epoch: int) -> None:
        await self.ask(AbortWeights(version, epoch))


class RolloutHere(Port):
    def __init__(self, name: str, settings: config.Publication = PUBLICATION, incarnation: int = 0):
        services = config.Services(rollout=config.Rollout(replicas=3))
        service = RolloutService(config.Config(run=config.Run(name="test"), publication=settings, services=services), name, 0)
        self.engine = Held()
        service.use(self.engine)  # type: ignore[arg-type]
        super().__init__(service, incarnation)

    async def join_weights(self, address: GroupAddress, manifest: Manifest) -> None:
        await self.ask(JoinWeights(address, manifest))

    async def receive_weights(self, version: PolicyVersion, epoch: int) -> None:
        await self.ask(ReceiveWeights(version, epoch))

    async def commit_weights(self, version: PolicyVersion, epoch: int) -> float:
        return (await self.ask(CommitWeights(version, epoch))).pause_seconds


class TrainerHere(Port):
    def __init__(self, settings: config.Publication) -> None:
        service = TrainerService(config.Config(run=config.Run(name="test"), publication=settings), "trainer-0", 0)
        self.worker = service._worker = Worker(settings)  # type: ignore[assignment]
        super().__init__(service)
        self.machines = {self.name: self.machine}

    async def host_weights(self, epoch: int, names: Sequence[str], transport: str) -> tuple[GroupAddress, Manifest]:
        hosted = await self.ask(HostWeights(epoch, len(names), transport, tuple(names)))
        return hosted.address, hosted.manifest

    def send_weights(self, version: PolicyVersion, epoch: int) -> Coroutine[Any, Any, WeightsSent]:
        return self.ask(SendWeights(version, epoch), Priority.DATA)


class Stage:
    """A trainer, two rollouts, and what publishes over them."""

    def __init__(self, settings: config.Publication, trainer: TrainerHere | None = None) -> None:
        self.trainer = trainer or TrainerHere(settings)
        self.rollouts = [RolloutHere("rollout-0", settings), RolloutHere("rollout-1", settings)]
        self.pool = RolloutPool(Register(), {rollout.name: 1 for rollout in self.rollouts}, 20.0)
        for rollout in self.rollouts:
            come(self.pool, rollout)
        self.publisher = Publisher(self.trainer, self.pool, settings, 20.0)  # type: ignore[arg-type]
        self.tasks: list[asyncio.Task[None]] = []

    def serve(self, *ports: Port) -> None:
        self.tasks += [asyncio.create_task(port.actor.run()) for port in ports]

    def comes(self, rollout: RolloutHere) -> None:
        self.serve(rollout)
        self.rollouts.append(rollout)
        come(self.pool, rollout)

    async def publish(self, step: int) -> Any:
        return await self.publisher.publish(PolicyVersion(0, step))


@asynccontextmanager
async def stage(settings: config.Publication, trainer: TrainerHere | None = None) -> AsyncIterator[Stage]:
    torch.set_num_threads(1)
    here = Stage(settings, trainer)
    here.serve(here.trainer, *here.rollouts)
    await here.trainer.service.start()
    here.tasks.append(asyncio.create_task(here.publisher.run()))
    try:
        yield here
    finally:
        for task in here.tasks:
            task.cancel()
        await asyncio.gather(*here.tasks, return_exceptions=True)
        for port in (here.trainer, *here.rollouts):
            await port.service.close()


def run(test: Callable[[Stage], Coroutine[Any, Any, None]], settings: config.Publication = PUBLICATION) -> None:
    async def within() -> None:
        async with stage(settings) as here:
            await asyncio.wait_for(test(here), DEADLINE)

    asyncio.run(within())


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - the test's own deadline ends it
        await asyncio.sleep(0.002)


@pytest.fixture(autouse=True, params=[False, True], ids=["shared_memory", "collective"])
def apart(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Port, "apart", request.param)


@pytest.mark.parametrize("encoding", ["whole", "delta"])
@pytest.mark.parametrize("transport", ["auto", "files"])
def test_a_rollout_that_dies_is_left_out_and_the_one_that_comes_gets_the_committed_version(
    transport: str, encoding: str, tmp_path: Path
) -> None:
    folder = str(tmp_path) if transport == "files" else ""
    settings = replace(PUBLICATION, transport=transport, encoding=encoding, folder=folder)

    async def test(here: Stage) -> None:
        staying, dying = here.rollouts
        await here.publish(1)
        dying.cut()
        await until(lambda: not here.pool.membership.stale and here.publisher.group.epoch.number == 2)
        assert (await here.publish(2)).epoch == 2
        late = RolloutHere("rollout-1", settings, incarnation=1)
        here.comes(late)
        await until(lambda: late in here.pool.serving)  # type: ignore[comparison-overlap]
        assert late.engine.swapped == [2]
        assert staying.engine.swapped == [1, 2]  # what it has is not swapped in again
        assert here.trainer.worker.gathered == [1, 2]  # the buckets were sent once more as they were
        await here.publish(3)
        assert (late.engine.swapped, staying.engine.swapped) == ([2, 3], [1, 2, 3])

    run(test, settings)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("how", ["dies", "is silent"])
def test_a_rollout_that_is_lost_in_a_transfer_is_left_out_and_the_version_counts(how: str) -> None:
    async def test(here: Stage) -> None:
        staying, failing = here.rollouts
        await here.publish(1)
        transaction = await here.publisher.begin(PolicyVersion(0, 2))
        if how == "dies":
            failing.cut()
        else:
            failing.silent = True
            failing.service.weights.group.abort = lambda: None  # its sockets stay open
            failing.service.weights.staging._receiver.abort()
        figures = await transaction.finish()
        transaction.close()
        assert (figures.aborts, figures.epoch) == (1, 2)
        assert staying.engine.swapped == [1, 2]
        assert here.trainer.worker.gathered == [1, 2]
        assert [unit.name for unit in here.pool.register.units(ROLLOUT, UnitState.LOST)] == ["rollout-1"]

    run(test, PUBLICATION if how == "dies" else IMPATIENT)


def test_a_rollout_that_dies_on_its_way_to_the_rendezvous_keeps_nobody_waiting() -> None:
    async def test(here: Stage) -> None:
        staying, dying = here.rollouts
        dying.silent = True
        publishing = asyncio.create_task(here.publish(1))
        await until(lambda: staying.service.weights.epoch == 1)
        dying.cut()
        assert (await publishing).epoch == 2
        assert staying.engine.swapped == [1]

    run(test)


def test_the_group_is_left_and_met_anew_while_the_engine_computes() -> None:
    async def test(here: Stage) -> None:
        await here.publish(1)
        here.rollouts[1].cut()
        busy = asyncio.Event()

        async def computing(command: Any) -> None:
            await busy.wait()

        here.trainer.service._execute = computing
        step = asyncio.ensure_future(here.trainer.ask(Apply(1), Priority.DATA))
        late = RolloutHere("rollout-1", incarnation=1)
        here.comes(late)
        await until(lambda: late in here.pool.serving)  # type: ignore[comparison-overlap]
        assert not step.done()
        assert late.engine.swapped == [1]
        step.cancel()
        busy.set()

    run(test)
