"""Epochs over real gloo or shared memory: services of trainer and rollouts, with engines that only hold tensors."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from runtime import config
from runtime.commands import AbortWeights, Apply, BeginStep, InitWeightGroup, JoinWeights, ResendWeights, SendWeights
from runtime.coordinator.pools import RolloutPool
from runtime.coordinator.register import ROLLOUT, Register, UnitState
from runtime.coordinator.weight_sync import WeightPublisher, nearest
from runtime.errors import Cancelled, ServiceFault, Unreachable
from runtime.process import os_process
from runtime.rollout.engine import EngineStats
from runtime.trainer.backend import RankInfo
from runtime.trainer.rank import TrainRank
from runtime.trainer.step import ModelTrainer
from runtime.types import PolicyVersion, StepResult
from runtime.weights import sender
from runtime.weights.group import Shard
from runtime.weights.plan import Cut, GroupAddress, TensorSpec
from runtime.weights.receiver import _Share
from services.rollout import RolloutService
from services.rpc.contract import Ranks, method_of
from services.trainer import TrainerService
from tests.loopback.losable import Losable
from tests.loopback.weight_cases import DEADLINE, MANIFEST, come, expected, on_a_loop, same, until

# Longer than a test may take: what waits for one of these deadlines fails.
WITHOUT_COPIES = config.Checkpoint(in_memory="off")  # the engines of these tests have no state
WEIGHT_SYNC = config.WeightSyncConfig(join_timeout=600.0, transfer_timeout=600.0, commit_timeout=600.0)
COLLECTIVE = replace(WEIGHT_SYNC, transport="collective")


class BufferedBytes:
    """A rollout's engine: `swapped` are the versions that it took over, each of which has to be whole."""

    adopts = "float32"
    torn = False
    thread = None

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

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        self.backend: Any = self
        self.rank_info = RankInfo(rank, ranks, torch.device("cpu"))
        self.gathered: list[int] = []
        self.version_of: Callable[[], PolicyVersion]
        self.may_apply = threading.Event()
        self.may_apply.set()

    def weights(self, step: int) -> Iterable[torch.Tensor]:
        return expected(step).values()

    def tensor_specs(self) -> list[TensorSpec]:
        return list(MANIFEST.tensors)

    def cuts(self) -> list[Cut]:
        return [Cut()] * len(MANIFEST.tensors)

    def shards(self) -> Iterator[Shard]:
        step = self.version_of().step
        self.gathered.append(step)
        return (Shard(index, (), tensor) for index, tensor in enumerate(self.weights(step)))

    def begin_step(self, step: int) -> None:
        """Nothing is computed."""

    def apply(self) -> StepResult:
        assert self.may_apply.wait(DEADLINE)
        return StepResult(metrics={}, seconds=0.0)


class Port:
    """A service, as the coordinator reaches it. `cut` is the death of a rollout's process."""

    def __init__(self, service: Any, incarnation: int = 0):
        self.service = service
        self.name = service.name
        self.machine = os_process.machine()
        self.incarnation = incarnation
        self.silent = False
        self._gone = asyncio.Event()
        self._tell: Callable[[str], None] = lambda why: None

    def when_lost(self, tell: Callable[[str], None]) -> None:
        self._tell = tell

    @property
    def machines(self) -> dict[str, str]:
        return {service.name: self.machine for service in getattr(self, "services", [self.service])}

    def acknowledge(self, command: Any) -> None:
        """It keeps no answers."""

    def give_up(self, reason: str) -> None:
        self._gone.set()

    def cut(self) -> None:
        for group in self.service.weights.groups:
            group.abort()
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
    def __init__(self, name: str, settings: config.WeightSyncConfig = WEIGHT_SYNC, incarnation: int = 0):
        services = config.Services(rollout=config.Rollout(replicas=3))
        service = RolloutService(config.Config(run=config.Run(name="test"), weight_sync=settings, services=services), name, 0)
        self.engine = BufferedBytes()
        service.use(self.engine)
        super().__init__(service, incarnation)


class TrainerHere(Port):
    def __init__(self, settings: config.WeightSyncConfig) -> None:
        weight_sync = replace(settings, bucket_bytes=MANIFEST.bucket_bytes)
        made = config.Config(run=config.Run(name="test"), weight_sync=weight_sync, checkpoint=WITHOUT_COPIES)
        service = TrainerService(made, "trainer-0", 0)
        self.engine = Untrained()
        self.rank = service._worker = TrainRank(self.engine, made)
        self.engine.version_of = lambda: self.rank.version
        super().__init__(service)


class Stage:
    """A trainer, two rollouts, and what publishes over them."""

    def __init__(
        self, settings: config.WeightSyncConfig, trainer: TrainerHere | None = None, rollouts: Sequence[Any] | None = None
    ) -> None:
        self.trainer = trainer or TrainerHere(settings)
        self.rollouts = list(rollouts or [RolloutHere("rollout-0", settings), RolloutHere("rollout-1", settings)])
        self.pool = RolloutPool(Register(), {rollout.name: 1 for rollout in self.rollouts}, 20.0)
        for rollout in self.rollouts:
            come(self.pool, rollout)
        self.publisher = WeightPublisher(self.trainer, self.pool, settings, 20.0)
        self.tasks: list[asyncio.Task[None]] = []

    async def comes(self, rollout: Any) -> Any:
        """Return once it serves."""
        await rollout.service.start()
        self.rollouts.append(rollout)
        come(self.pool, rollout)
        await until(lambda: rollout in self.pool.units())
        return rollout

    async def newcomer(
        self, name: str = "rollout-2", settings: config.WeightSyncConfig = WEIGHT_SYNC, incarnation: int = 0
    ) -> Any:
        """A rollout that has come, and checked the committed version."""
        late = await self.comes(RolloutHere(name, settings, incarnation))
        assert late.engine.swapped == [self.pool.membership.committed.step]
        return late

    async def loses(self, rollout: Port) -> None:
        """It dies, and the others have met without it."""
        rollout.cut()
        await until(lambda: not self.pool.membership.stale and not self.publisher._lock.locked())

    async def publish(self, step: int) -> Any:
        return await self.publisher.publish(PolicyVersion(0, step))


@asynccontextmanager
async def stage(
    settings: config.WeightSyncConfig = WEIGHT_SYNC, trainer: TrainerHere | None = None, rollouts: Sequence[Any] | None = None
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


# ------------------------------------------------------------------------------------------------ losses and arrivals
@pytest.mark.parametrize(("transport", "encoding"), [("auto", "delta"), ("collective", "whole")])
@on_a_loop
async def test_one_that_dies_is_left_out_and_one_that_comes_gets_the_version(transport: str, encoding: str) -> None:
    settings = replace(WEIGHT_SYNC, transport=transport, encoding=encoding)
    async with stage(settings) as here:
        staying, dying = here.rollouts
        await here.publish(1)
        await here.loses(dying)
        assert (await here.publish(2)).epoch == here.publisher.group.epoch.number == 2
        late = await here.newcomer("rollout-1", settings, incarnation=1)
        assert staying.engine.swapped == [1, 2]  # what it has is not swapped in again
        assert here.trainer.engine.gathered == [1, 2]  # the buckets were sent once more as they were
        await here.publish(3)
        assert (late.engine.swapped, staying.engine.swapped) == ([2, 3], [1, 2, 3])


@pytest.mark.parametrize("settings", [WEIGHT_SYNC, COLLECTIVE], ids=["shared_memory", "collective"])
@on_a_loop
async def test_a_rollout_that_dies_on_its_way_to_the_rendezvous_keeps_nobody_waiting(settings: config.WeightSyncConfig) -> None:
    async with stage(settings) as here:
        staying, dying = here.rollouts
        dying.silent = True
        publishing = asyncio.create_task(here.publish(1))
        await until(lambda: staying.service.weights.epoch == 1)
        dying.cut()
        assert (await publishing).epoch == 2
        assert staying.engine.swapped == [1]


@on_a_loop
async def test_the_group_is_left_and_met_anew_while_the_engine_computes() -> None:
    async with stage() as here:
        await here.publish(1)
        here.rollouts[1].cut()
        here.trainer.engine.may_apply.clear()
        step = asyncio.ensure_future(here.trainer.call(Apply(1)))
        await here.newcomer("rollout-1", incarnation=1)
        assert not step.done()
        here.trainer.engine.may_apply.set()
        await step


# ------------------------------------------------------------------------------------------------ the trainer
@on_a_loop
async def test_who_does_not_come_to_the_rendezvous_is_named_to_those_who_do() -> None:
    async with stage(replace(WEIGHT_SYNC, join_timeout=1.5)) as here:
        hosted = await here.trainer.call(InitWeightGroup(1, ("rollout-0", "rollout-1"), ("", "", "")))
        with pytest.raises(ServiceFault, match=r"rollout-0: rendezvous: rank 2 \(rollout-1\) did not join|trainer-0\) is gone"):
            await here.rollouts[0].call(JoinWeights(replace(hosted.address, rank=1), hosted.manifest))
        with pytest.raises(ServiceFault, match=r"trainer-0: rendezvous: rank 2 \(rollout-1\) did not join"):
            await here.trainer.call(SendWeights(PolicyVersion(0, 1), 1))


@on_a_loop
async def test_an_epoch_that_is_given_up_while_its_rendezvous_is_opened_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    opening, may_open, host, opened = threading.Event(), threading.Event(), sender.open_rendezvous, []

    def slow(address: GroupAddress, *arguments: Any) -> sender.WeightGroup:
        opening.set()
        assert may_open.wait(DEADLINE / 2)
        opened.append(host(address, *arguments))
        return opened[-1]

    monkeypatch.setattr(sender, "open_rendezvous", slow)
    async with stage() as here:
        hosting = asyncio.ensure_future(here.trainer.call(InitWeightGroup(1, ("rollout-0",), ("", ""))))
        await until(opening.is_set)
        await here.trainer.call(AbortWeights(PolicyVersion(), 1))  # it is answered meanwhile
        publishing = asyncio.ensure_future(here.publisher.group.open())  # of the number 1 again: it waits for its turn
        await asyncio.sleep(0)
        may_open.set()
        with pytest.raises(Cancelled, match="trainer-0: epoch 1 was given up"):
            await hosting
        await publishing
        assert (await here.publish(1)).epoch == 1
        assert len(opened) == 2


@on_a_loop
async def test_weights_that_changed_in_the_senders_memory_are_gathered_anew_before_they_are_sent_again() -> None:
    async with stage(COLLECTIVE) as here:
        await here.publish(1)
        here.trainer.rank.sender.buffers.buffers[1][0] ^= 1
        await here.loses(here.rollouts[1])
        here.rollouts[0].service.weights.held.version = None  # so that it is not the other one who sends it
        await here.newcomer("rollout-1", incarnation=1)
        assert here.trainer.engine.gathered == [1, 1]


@on_a_loop
async def test_another_version_than_the_one_that_is_there_is_refused() -> None:
    async with stage() as here:
        await here.publish(1)
        peer = here.rollouts[0]
        await peer.call(InitWeightGroup(9, ("rollout-2",), ("", "")))
        with pytest.raises(ServiceFault, match=r"rollout-0: snapshot: version 0\.0 was not kept: 0\.1 is there"):
            await peer.call(ResendWeights(PolicyVersion(0, 0), 9))
        await here.trainer.call(Apply(1))
        with pytest.raises(ServiceFault, match=r"trainer-0: snapshot: version 0\.1 was not kept: 0\.2 is there"):
            await here.trainer.call(SendWeights(PolicyVersion(0, 1), 1))
        assert here.trainer.engine.gathered == [1]


# -------------------------------------------------------------------------------------------- gathering and transfer at once
def yields(here: Stage, weights: Callable[[Iterable[torch.Tensor]], Iterator[torch.Tensor]]) -> None:
    """The trainer's engine gives its tensors by way of `weights`."""
    plain = here.trainer.engine.weights
    here.trainer.engine.weights = lambda step: weights(plain(step))


@on_a_loop
async def test_the_first_bucket_arrives_before_the_last_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    verified = threading.Semaphore(0)
    post = _Share._post

    def seen(share: _Share, group: sender.WeightGroup, index: int, give_up: float) -> Any:
        target, transfer = post(share, group, index, give_up)

        def wait(until: float) -> Any:
            receipt = transfer(until)
            verified.release()
            return receipt

        return target, wait

    monkeypatch.setattr(_Share, "_post", seen)

    def late(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        *most, last = tensors
        yield from most
        for _ in range(2):  # both rollouts have a bucket
            assert verified.acquire(timeout=DEADLINE)
        yield last

    async with stage() as here:
        yields(here, late)
        assert (await here.publish(1)).aborts == 0
        assert [rollout.engine.swapped for rollout in here.rollouts] == [[1], [1]]


@on_a_loop
async def test_gathering_that_fails_is_told_and_gathered_anew_after_what_the_trainer_has_begun() -> None:
    torn, begun, limit = threading.Event(), threading.Event(), 1.5

    def once(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        for index, tensor in enumerate(tensors):
            if index == 8 and not torn.is_set():
                torn.set()
                raise ServiceFault("trainer-0", "gather", "a device was lost")
            yield tensor

    async with stage(replace(WEIGHT_SYNC, transfer_timeout=limit)) as here:
        yields(here, once)
        execute = here.trainer.rank.execute

        def slowly(command: object) -> object:
            if isinstance(command, BeginStep):
                begun.set()
                threading.Event().wait(1.5 * limit)  # longer than a transfer may take
            return execute(command)

        here.trainer.rank.execute = slowly
        publishing = asyncio.create_task(here.publish(1))
        await until(torn.is_set)
        step = asyncio.ensure_future(here.trainer.call(BeginStep(1)))
        assert (await publishing).aborts == 1
        assert "trainer-0: gather: a device was lost" in here.publisher.abort  # not a receiver that has waited in vain
        assert not here.pool.register.units(ROLLOUT, UnitState.LOST)
        assert begun.is_set()
        await step
        await here.publish(2)
        assert [rollout.engine.swapped for rollout in here.rollouts] == [[1, 2], [1, 2]]


@pytest.mark.parametrize("settings", [WEIGHT_SYNC, COLLECTIVE], ids=["shared_memory", "collective"])
@on_a_loop
async def test_a_rollout_that_is_lost_while_the_weights_are_gathered_costs_an_attempt(
    settings: config.WeightSyncConfig,
) -> None:
    gathering, lost = threading.Event(), threading.Event()

    def midway(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        for index, tensor in enumerate(tensors):
            if index == 6:
                gathering.set()
                assert lost.wait(DEADLINE)
            yield tensor

    async with stage(settings) as here:
        yields(here, midway)
        publishing = asyncio.create_task(here.publish(1))
        assert await asyncio.to_thread(gathering.wait, DEADLINE)
        here.rollouts[1].cut()
        await until(lambda: bool(here.publisher.abort))
        lost.set()
        figures = await publishing
        assert (figures.aborts, figures.epoch) == (1, 2)
        assert [unit.name for unit in here.pool.register.units(ROLLOUT, UnitState.LOST)] == ["rollout-1"]
        assert here.rollouts[0].engine.swapped == [1]
        assert here.trainer.engine.gathered == [1]


# ------------------------------------------------------------------------------------------------ who sends to a newcomer
def counted(here: Stage) -> list[Any]:
    """The trainer's commands to send, from now on."""
    sends, begin = [], here.trainer.begin

    def noted(command: Any) -> Any:
        if isinstance(command, SendWeights | ResendWeights):
            sends.append(command)
        return begin(command)

    here.trainer.begin = noted
    return sends


@pytest.mark.parametrize(
    ("adopts", "settings"), [("float32", WEIGHT_SYNC), ("", COLLECTIVE)], ids=["uses the buckets", "copies them"]
)
@on_a_loop
async def test_who_serves_sends_it_to_each_who_comes(
    adopts: str, settings: config.WeightSyncConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stage(settings) as here:
        for rollout in here.rollouts:
            monkeypatch.setattr(rollout.engine, "adopts", adopts)
        await here.publish(1)
        sends = counted(here)
        await here.loses(await here.newcomer())
        await here.newcomer(incarnation=1)
        assert sends == []
        assert [rollout.engine.swapped for rollout in here.rollouts[:2]] == [[1], [1]]
        await here.publish(2)
        assert [rollout.engine.swapped[-1] for rollout in (*here.rollouts[:2], here.rollouts[3])] == [2, 2, 2]
        await until(lambda: not here.publisher._lock.locked())
        assert len(sends) == 1


@pytest.mark.parametrize("why", ["what it has changed in its memory", "it keeps nothing", "it dies"])
@on_a_loop
async def test_the_trainer_brings_it_where_the_peer_cannot(why: str) -> None:
    async with stage() as here:
        await here.publish(1)
        peer, lost = here.rollouts[0], why == "it dies"
        held, begin = peer.service.weights.held, peer.begin

        def dies(command: Any) -> Any:
            if isinstance(command, ResendWeights):
                peer.cut()
            return begin(command)

        if lost:
            peer.begin = dies
        elif why == "it keeps nothing":
            held.version = None
        else:
            held._arenas[0][64 << 10] ^= 1
        sends = counted(here)
        await here.newcomer()
        assert sends == [ResendWeights(PolicyVersion(0, 1), here.publisher.group.epoch.number)]
        assert len(here.pool.units()) == 3 - lost  # whoever refuses is not lost


@pytest.mark.parametrize("raises", [False, True], ids=["a byte changes", "it raises"])
@on_a_loop
async def test_a_reception_that_goes_wrong_costs_an_attempt_and_no_member(raises: bool) -> None:
    async with stage(COLLECTIVE) as here:
        await here.publish(1)
        link = here.rollouts[1].service.weights.groups[0].way(0, 0)
        receive, left = link.receive, [1]

        def spoiled(index: int, target: Any) -> Any:
            transfer = receive(index, target)

            def wait(give_up: float) -> None:
                transfer(give_up)
                if left and raises:
                    raise RuntimeError(f"bucket {left.pop()} is lost")
                if left:
                    target.run[left.pop()] ^= 1

            return wait

        link.receive = spoiled
        assert (await here.publish(2)).aborts == 1
        assert not here.pool.register.units(ROLLOUT, UnitState.LOST)
        assert [rollout.engine.swapped for rollout in here.rollouts] == [[1, 2], [1, 2]]


class At(Losable):
    def __init__(self, name: str, machine: str):
        super().__init__()
        self.name, self.machine = name, machine


@pytest.mark.parametrize(
    ("late", "serving", "trainer", "peer"),
    [
        ("a", "ba", "c", 1),  # on its machine
        ("a", "bc", "d", 0),  # nobody near
        ("a", "bc", "a", None),  # the trainer is near, and alone so
        ("a", "ba", "a", 1),
        ("ab", "cb", "a", 1),
        ("a", "", "b", None),
    ],
)
def test_the_nearest_one_sends(late: str, serving: str, trainer: str, peer: int | None) -> None:
    newcomers = [At(f"late-{machine}", machine) for machine in late]
    there: list[Any] = [At(f"rollout-{machine}", machine) for machine in serving]
    assert nearest(newcomers, there, list(trainer)) is (None if peer is None else there[peer])


# ------------------------------------------------------------------------------------------------ two sending ranks
SMALL = replace(WEIGHT_SYNC, bucket_bytes=MANIFEST.bucket_bytes)
RANKS = 2


class PipelineStage(Untrained):
    """One of two, each of which has every second tensor."""

    step = 0

    def cuts(self) -> list[Cut]:
        return [Cut(((index % RANKS,),)) for index in range(len(MANIFEST.tensors))]

    def shards(self) -> Iterator[Shard]:
        self.gathered.append(self.step)
        for index, tensor in enumerate(self.weights(self.step)):
            if index % RANKS == self.rank_info.rank:
                yield Shard(index, (), tensor)

    def apply(self) -> StepResult:
        result = super().apply()
        self.step += 1
        return result


class TwoSenders(TrainerHere):
    """Both ranks' services, each of which is given every command, as `services.rpc.client` does it."""

    def __init__(self, settings: config.WeightSyncConfig) -> None:
        self.engines = [PipelineStage(rank, RANKS) for rank in range(RANKS)]

        def make_rank(made: config.Config, rank: int, world_size: int) -> TrainRank:
            return TrainRank(self.engines[rank], made)

        made = config.Config(run=config.Run(name="test", resume=""), weight_sync=settings, checkpoint=WITHOUT_COPIES)
        self.services = [TrainerService(made, "trainer-0", rank) for rank in range(RANKS)]
        for service in self.services:
            service._make_rank = make_rank
        super(TrainerHere, self).__init__(self.services[0])

    async def start(self) -> None:
        await asyncio.gather(*(asyncio.to_thread(service.load) for service in self.services))

    def begin(self, command: Any) -> Awaitable[Any]:
        method = method_of("Trainer", command)
        first, last = {Ranks.FIRST: (0, 1), Ranks.OTHERS: (1, None), Ranks.ALL: (0, None)}[method.ranks]
        begun = [asyncio.ensure_future(service.handler(method)(command)) for service in self.services[first:last]]

        async def answer() -> Any:
            return (await asyncio.gather(*begun))[0]

        return asyncio.ensure_future(answer())

    def senders(self) -> list[Any]:
        return [service._worker.sender.buffers for service in self.services]

    async def step(self, here: Stage, number: int) -> Any:
        """Train one step, and publish what it made."""
        await self.call(BeginStep(number - 1))
        await self.call(Apply(number - 1))
        return await here.publish(number)


@asynccontextmanager
async def two_senders(settings: config.WeightSyncConfig = SMALL) -> AsyncIterator[tuple[Stage, TwoSenders]]:
    trainer = TwoSenders(settings)
    await trainer.start()
    try:
        async with stage(settings, trainer) as here:
            yield here, trainer
    finally:
        await trainer.services[1].close()


@pytest.mark.parametrize("transport", ["collective", "shared_memory"])
@on_a_loop
async def test_a_newcomer_gets_the_committed_version_of_both(transport: str) -> None:
    settings = replace(SMALL, transport=transport)
    async with two_senders(settings) as (here, trainer):
        staying, dying = here.rollouts
        figures = await trainer.step(here, 1)
        sizes = [sum(bucket.nbytes for _, bucket in sender.own) for sender in trainer.senders()]
        assert all(sizes) and figures.bytes >= sum(sizes)
        await here.loses(dying)
        assert (await trainer.step(here, 2)).epoch == 2
        late = await here.newcomer("rollout-1", settings, incarnation=1)
        await trainer.step(here, 3)
        assert (late.engine.swapped, staying.engine.swapped) == ([2, 3], [1, 2, 3])
        assert [engine.gathered for engine in trainer.engines] == [[1, 2, 3]] * RANKS


@on_a_loop
async def test_the_other_sender_joins_while_its_engine_computes_and_is_sent_again_from_its_copy() -> None:
    async with two_senders() as (here, trainer):
        await trainer.step(here, 1)
        trainer.engines[1].may_apply.clear()
        try:
            await trainer.call(BeginStep(1))
            applying = asyncio.ensure_future(trainer.call(Apply(1)))  # rank 1 is not that far
            await here.newcomer(settings=SMALL)
        finally:
            trainer.engines[1].may_apply.set()
        await applying
        await here.publish(2)
        assert [rollout.engine.swapped for rollout in here.rollouts] == [[1, 2], [1, 2], [1, 2]]


@on_a_loop
async def test_a_part_that_breaks_off_aborts_for_all_and_the_next_epoch_brings_it() -> None:
    async with two_senders() as (here, trainer):
        await trainer.step(here, 1)
        sender, shards = trainer.senders()[1], trainer.engines[1].shards

        def breaks() -> Iterator[Shard]:
            for number, shard in enumerate(shards()):
                if number == 3:
                    sender.abort()
                yield shard

        trainer.engines[1].shards = breaks
        figures = await trainer.step(here, 2)
        assert (figures.aborts, figures.epoch) == (1, 2)
        assert [rollout.engine.swapped for rollout in here.rollouts] == [[1, 2], [1, 2]]
