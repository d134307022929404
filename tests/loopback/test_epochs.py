"""Epochs over real gloo: the trainer's and the rollouts' services, with engines that only hold tensors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from runtime import config
from runtime.commands import Apply
from runtime.coordinator.pools import RolloutPool
from runtime.coordinator.register import ROLLOUT, Register, UnitState
from runtime.coordinator.weight_sync import WeightPublisher
from runtime.errors import Unreachable
from runtime.process import os_process
from runtime.rollout.engine import EngineStats
from runtime.trainer.backend import RankInfo
from runtime.trainer.rank import TrainRank
from runtime.trainer.step import ModelTrainer
from runtime.types import PolicyVersion, StepResult
from runtime.weights.plan import TensorSpec
from services.rollout import RolloutService
from services.rpc.contract import method_of
from services.trainer import TrainerService
from tests.loopback.publisher_cases import come
from tests.loopback.weight_cases import MANIFEST, expected, same

DEADLINE = 100.0
# Longer than a test may take: what waits for one of these deadlines fails.
PUBLICATION = config.Publication(join_timeout=600.0, transfer_timeout=600.0, commit_timeout=600.0, abort_timeout=600.0)
IMPATIENT = replace(PUBLICATION, transfer_timeout=4.0, abort_timeout=4.0)


class Held:
    """A rollout's engine: `swapped` are the versions that it took over, each of which has to be whole."""

    adopts = "float32"
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


class Untrained(ModelTrainer):
    """A trainer's engine: the weights of a version are made from its number, by `weights`."""

    def __init__(self) -> None:
        self.backend: Any = self
        self.rank_info = RankInfo(0, 1, torch.device("cpu"))
        self.gathered: list[int] = []
        self.version_of: Callable[[], PolicyVersion]
        self.may_apply = Event()
        self.may_apply.set()

    def weights(self, step: int) -> Iterable[torch.Tensor]:
        return expected(step).values()

    def tensor_specs(self) -> list[TensorSpec]:
        return list(MANIFEST.tensors)

    def gather(self, targets: Sequence[int] = ()) -> Iterator[torch.Tensor]:
        step = self.version_of().step
        self.gathered.append(step)
        return iter(self.weights(step))

    def begin_step(self, step: int) -> None:
        """Nothing is computed."""

    def apply(self) -> StepResult:
        assert self.may_apply.wait(DEADLINE)
        return StepResult(metrics={}, seconds=0.0)


class Port:
    """A service, as the coordinator reaches it. `cut` is the death of a rollout's process."""

    apart = False  # on a machine of its own, so that weights go by the collective

    def __init__(self, service: Any, incarnation: int = 0):
        self.service = service
        self.name = service.name
        self.machine = self.name if self.apart else os_process.machine()
        self.incarnation = incarnation
        self.silent = False  # under SIGSTOP
        self._gone = asyncio.Event()
        self._tell: Callable[[str], None] = lambda why: None

    def when_lost(self, tell: Callable[[str], None]) -> None:
        self._tell = tell

    def acknowledge(self, command: Any) -> None:
        """It keeps no answers."""

    def give_up(self, reason: str) -> None:
        self._gone.set()

    def cut(self) -> None:
        if self.service.weights.group is not None:
            self.service.weights.group.abort()
        self._gone.set()
        self._tell("connection lost")

    def begin(self, command: Any) -> Awaitable[Any]:
        """What the process does with a command that has come."""
        return self.service.handler(method_of(self.service.service, command))(command)

    def post(self, command: Any) -> Coroutine[Any, Any, Any]:
        return self._answer(asyncio.ensure_future(self.begin(command)), type(command).__name__)

    async def call(self, command: Any) -> Any:
        return await self.post(command)

    async def _answer(self, begun: asyncio.Future[Any], phase: str) -> Any:
        gone = asyncio.ensure_future(self._gone.wait())
        try:
            await asyncio.wait({gone} if self.silent else {begun, gone}, return_when=asyncio.FIRST_COMPLETED)
            if self.silent:
                await gone
            if gone.done():
                raise Unreachable(self.name, phase, "connection lost")
            return begun.result()
        finally:
            gone.cancel()
            begun.cancel()


class RolloutHere(Port):
    def __init__(self, name: str, settings: config.Publication = PUBLICATION, incarnation: int = 0):
        services = config.Services(rollout=config.Rollout(replicas=3))
        service = RolloutService(config.Config(run=config.Run(name="test"), publication=settings, services=services), name, 0)
        self.engine = Held()
        service.use(self.engine)  # type: ignore[arg-type]
        super().__init__(service, incarnation)


class TrainerHere(Port):
    def __init__(self, settings: config.Publication) -> None:
        publication = replace(settings, bucket_bytes=MANIFEST.bucket_bytes)
        made = config.Config(run=config.Run(name="test"), publication=publication)
        service = TrainerService(made, "trainer-0", 0)
        self.engine = Untrained()
        self.rank = service._worker = TrainRank(self.engine, made)
        self.engine.version_of = lambda: self.rank.version
        super().__init__(service)
        self.machines = {self.name: self.machine}


class Stage:
    """A trainer, two rollouts, and what publishes over them."""

    def __init__(
        self, settings: config.Publication, trainer: TrainerHere | None = None, rollouts: Sequence[Any] | None = None
    ) -> None:
        self.trainer = trainer or TrainerHere(settings)
        self.rollouts = list(rollouts or [RolloutHere("rollout-0", settings), RolloutHere("rollout-1", settings)])
        self.pool = RolloutPool(Register(), {rollout.name: 1 for rollout in self.rollouts}, 20.0)
        for rollout in self.rollouts:
            come(self.pool, rollout)
        self.publisher = WeightPublisher(self.trainer, self.pool, settings, 20.0)  # type: ignore[arg-type]
        self.tasks: list[asyncio.Task[None]] = []

    async def comes(self, rollout: RolloutHere) -> None:
        await rollout.service.start()
        self.rollouts.append(rollout)
        come(self.pool, rollout)

    async def publish(self, step: int) -> Any:
        return await self.publisher.publish(PolicyVersion(0, step))


@asynccontextmanager
async def stage(
    settings: config.Publication, trainer: TrainerHere | None = None, rollouts: Sequence[Any] | None = None
) -> AsyncIterator[Stage]:
    torch.set_num_threads(1)
    here = Stage(settings, trainer, rollouts)
    for port in (here.trainer, *here.rollouts):
        await port.service.start()
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
        await here.comes(late)
        await until(lambda: late in here.pool.serving)  # type: ignore[comparison-overlap]
        assert late.engine.swapped == [2]
        assert staying.engine.swapped == [1, 2]  # what it has is not swapped in again
        assert here.trainer.engine.gathered == [1, 2]  # the buckets were sent once more as they were
        await here.publish(3)
        assert (late.engine.swapped, staying.engine.swapped) == ([2, 3], [1, 2, 3])

    run(test, settings)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("how", ["dies", "is silent"])
def test_a_rollout_that_is_lost_in_a_transfer_is_left_out_and_the_version_counts(how: str) -> None:
    async def test(here: Stage) -> None:
        staying, failing = here.rollouts
        await here.publish(1)
        sync = await here.publisher.begin(PolicyVersion(0, 2))
        if how == "dies":
            failing.cut()
        else:
            failing.silent = True
            failing.service.weights.group.abort = lambda: None  # its sockets stay open
            failing.service.weights.staging.receiver.abort()
        figures = await sync.finish()
        sync.close()
        assert (figures.aborts, figures.epoch) == (1, 2)
        assert staying.engine.swapped == [1, 2]
        assert here.trainer.engine.gathered == [1, 2]
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
        here.trainer.engine.may_apply.clear()
        step = asyncio.ensure_future(here.trainer.call(Apply(1)))
        late = RolloutHere("rollout-1", incarnation=1)
        await here.comes(late)
        await until(lambda: late in here.pool.serving)  # type: ignore[comparison-overlap]
        assert not step.done()
        assert late.engine.swapped == [1]
        here.trainer.engine.may_apply.set()
        await step

    run(test)
