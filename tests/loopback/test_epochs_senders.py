"""Epochs of two sending ranks: the trainer's services, and engines that only hold tensors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from threading import Event
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from runtime import config
from runtime.commands import Apply, BeginStep
from runtime.errors import ServiceFault
from runtime.trainer.backend import RankInfo
from runtime.trainer.rank import TrainRank
from runtime.trainer.step import ModelTrainer
from runtime.types import StepResult, TrainGroup
from runtime.weights.plan import TensorSpec
from services.rpc.contract import Ranks, method_of
from services.trainer import TrainerService
from tests.loopback.test_epochs import DEADLINE, PUBLICATION, RolloutHere, Stage, TrainerHere, stage, until
from tests.loopback.weight_cases import MANIFEST, expected

ALL = replace(PUBLICATION, senders="all", bucket_bytes=MANIFEST.bucket_bytes)
RANKS = 2


class Stages(ModelTrainer):
    """Two pipeline stages, each of which has every second tensor; the weights of a version are made from its number."""

    def __init__(self, rank: int) -> None:
        self.backend: Any = self
        self.rank_info = RankInfo(rank, RANKS, torch.device("cpu"))
        self.step = 0
        self.gathered: list[int] = []
        self.may_apply = Event()
        self.may_apply.set()

    def tensor_specs(self) -> list[TensorSpec]:
        return list(MANIFEST.tensors)

    def holders(self) -> list[tuple[int, ...]]:
        return [(index % RANKS,) for index in range(len(MANIFEST.tensors))]

    def gather(self, targets: Sequence[int] = ()) -> Iterator[torch.Tensor]:
        self.gathered.append(self.step)
        for target, tensor in zip(targets, expected(self.step).values(), strict=True):
            if target == self.rank_info.rank:
                yield tensor

    def begin_step(self, step: int) -> None:
        """Nothing is computed."""

    def apply(self) -> StepResult:
        assert self.may_apply.wait(DEADLINE)
        self.step += 1
        return StepResult(metrics={}, seconds=0.0)

    def compare(self, probes: Sequence[bytes]) -> list[float]:
        raise AssertionError("there are no probes")

    def accumulate(self, groups: Sequence[TrainGroup], last: bool = False) -> None:
        raise AssertionError("there is no data")

    def onload(self) -> None:
        raise AssertionError("the device is nobody else's")

    offload = onload

    def begin_save(self, folder: str) -> Callable[[], None]:
        raise AssertionError("nothing is saved")

    def load(self, folder: str) -> None:
        raise AssertionError("there is nothing to resume")

    def export(self, folder: str) -> None:
        raise AssertionError("nothing is exported")


class TwoSenders(TrainerHere):
    """Both ranks' services, each of which is given every command, as `services.rpc.client` does it."""

    def __init__(self, settings: config.Publication) -> None:
        self.engines = [Stages(rank) for rank in range(RANKS)]

        def make_rank(made: config.Config, rank: int, world_size: int) -> TrainRank:
            return TrainRank(self.engines[rank], made)

        made = config.Config(run=config.Run(name="test", resume=""), publication=settings)
        self.services = [TrainerService(made, "trainer-0", rank) for rank in range(RANKS)]
        for service in self.services:
            service._make_rank = make_rank
        super(TrainerHere, self).__init__(self.services[0])
        self.machines = {service.name: self.machine for service in self.services}

    async def start(self) -> None:
        await asyncio.gather(*(asyncio.to_thread(service.load) for service in self.services))

    def begin(self, command: Any) -> Awaitable[Any]:
        method = method_of("Trainer", command)
        first, last = {Ranks.FIRST: (0, 1), Ranks.OTHERS: (1, None), Ranks.ALL: (0, None)}[method.ranks]
        begun = [asyncio.ensure_future(service.handler(method)(command)) for service in self.services[first:last]]

        async def answer() -> Any:
            return (await asyncio.gather(*begun))[0]

        return asyncio.ensure_future(answer())


def run(test: Callable[[Stage, TwoSenders], Coroutine[Any, Any, None]], settings: config.Publication = ALL) -> None:
    async def within() -> None:
        trainer = TwoSenders(settings)
        await trainer.start()
        try:
            async with stage(settings, trainer) as here:
                await asyncio.wait_for(test(here, trainer), DEADLINE)
        finally:
            await trainer.services[1].close()

    asyncio.run(within())


async def step(here: Stage, trainer: TwoSenders, number: int) -> Any:
    """Train one step, and publish what it made."""
    await trainer.call(BeginStep(number - 1))
    await trainer.call(Apply(number - 1))
    return await here.publish(number)


@pytest.mark.parametrize("transport", ["collective", "shared_memory"])
def test_a_newcomer_gets_the_committed_version_of_both(transport: str) -> None:
    settings = replace(ALL, transport=transport)

    async def test(here: Stage, trainer: TwoSenders) -> None:
        staying, dying = here.rollouts
        figures = await step(here, trainer, 1)
        sizes = [sum(bucket.total_bytes for _, bucket in sender._own) for sender in senders(trainer)]
        assert all(sizes) and figures.bytes >= sum(sizes)
        dying.cut()
        await until(lambda: not here.pool.membership.stale and here.publisher.group.epoch.number == 2)
        assert (await step(here, trainer, 2)).epoch == 2
        late = RolloutHere("rollout-1", settings, incarnation=1)
        await here.comes(late)
        await until(lambda: late in here.pool.serving)  # type: ignore[comparison-overlap]
        await step(here, trainer, 3)
        assert (late.engine.swapped, staying.engine.swapped) == ([2, 3], [1, 2, 3])
        assert [engine.gathered for engine in trainer.engines] == [[1, 2, 3]] * RANKS

    run(test, settings)


def senders(trainer: TwoSenders) -> list[Any]:
    return [service._worker.member.sender for service in trainer.services]  # type: ignore[union-attr]


def test_the_other_sender_joins_while_its_engine_computes_and_is_sent_again_from_its_copy() -> None:
    async def test(here: Stage, trainer: TwoSenders) -> None:
        await step(here, trainer, 1)
        trainer.engines[1].may_apply.clear()
        try:
            await trainer.call(BeginStep(1))
            applying = asyncio.ensure_future(trainer.call(Apply(1)))  # rank 1 is not that far
            late = RolloutHere("rollout-2", ALL)
            await here.comes(late)
            await until(lambda: late in here.pool.serving)  # type: ignore[comparison-overlap]
            assert late.engine.swapped == [1]
        finally:
            trainer.engines[1].may_apply.set()
        await applying
        await here.publish(2)
        assert [rollout.engine.swapped for rollout in here.rollouts] == [[1, 2], [1, 2], [1, 2]]

    run(test)


def test_a_part_that_breaks_off_aborts_for_all_and_the_next_epoch_brings_it() -> None:
    async def test(here: Stage, trainer: TwoSenders) -> None:
        await step(here, trainer, 1)
        sender, gather = senders(trainer)[1], trainer.engines[1].gather

        def breaks(targets: Sequence[int] = ()) -> Iterator[torch.Tensor]:
            for number, tensor in enumerate(gather(targets)):
                if number == 3:
                    sender.abort()
                yield tensor

        trainer.engines[1].gather = breaks  # type: ignore[method-assign]
        figures = await step(here, trainer, 2)
        assert (figures.aborts, figures.epoch) == (1, 2)
        assert [rollout.engine.swapped for rollout in here.rollouts] == [[1, 2], [1, 2]]

    run(test)


def test_a_part_that_never_comes_ends_the_run_after_some_tries() -> None:
    async def test(here: Stage, trainer: TwoSenders) -> None:
        trainer.engines[1].may_apply.clear()
        try:
            applying = asyncio.ensure_future(trainer.call(Apply(0)))
            with pytest.raises(ServiceFault, match=r"publish: version 0\.1: transfer: "):
                await here.publish(1)
        finally:
            trainer.engines[1].may_apply.set()
        await applying

    run(test, replace(ALL, transport="collective", transfer_timeout=0.4))
