"""Gathering and transfer at once, over the services' own epochs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
import pytest
import torch

from runtime.commands import Apply, BeginStep, SendWeights
from runtime.coordinator.register import ROLLOUT, UnitState
from runtime.errors import ServiceFault
from runtime.types import PolicyVersion
from runtime.weights.receiver import Reception
from tests.loopback.test_epochs import DEADLINE, PUBLICATION, Stage, run, until


def yields(here: Stage, weights: Callable[[Iterable[torch.Tensor]], Iterator[torch.Tensor]]) -> None:
    """The trainer's engine gives its tensors by way of `weights`."""
    plain = here.trainer.engine.weights
    here.trainer.engine.weights = lambda step: weights(plain(step))  # type: ignore[method-assign]


def test_the_first_bucket_arrives_before_the_last_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    verified = threading.Semaphore(0)
    faults = Reception._faults

    def seen(reception: Reception, index: int, *bucket: Any) -> list[str]:
        found = faults(reception, index, *bucket)
        verified.release()
        return found

    monkeypatch.setattr(Reception, "_faults", seen)

    def late(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        *most, last = tensors
        yield from most
        for _ in range(2):  # both rollouts have a bucket
            assert verified.acquire(timeout=DEADLINE)
        yield last

    async def test(here: Stage) -> None:
        yields(here, late)
        assert (await here.publish(1)).aborts == 0
        assert [rollout.engine.swapped for rollout in here.rollouts] == [[1], [1]]

    run(test)


def test_gathering_that_fails_in_the_middle_is_told_and_tried_again() -> None:
    healthy = False

    def torn(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        nonlocal healthy
        for index, tensor in enumerate(tensors):
            if index == 8 and not healthy:
                healthy = True
                raise ServiceFault("trainer-0", "gather", "a device was lost")
            yield tensor

    async def test(here: Stage) -> None:
        yields(here, torn)
        assert (await here.publish(1)).aborts == 1  # long before any deadline, of which a failing receiver would be the sign
        assert "trainer-0: gather: a device was lost" in here.publisher.abort
        assert not here.pool.register.units(ROLLOUT, UnitState.LOST)
        await here.publish(2)
        assert [rollout.engine.swapped for rollout in here.rollouts] == [[1, 2], [1, 2]]

    run(test)


def test_what_is_gathered_anew_waits_for_what_the_trainer_has_begun() -> None:
    torn, begun, limit = threading.Event(), threading.Event(), 3.0

    def once(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        if not torn.is_set():
            torn.set()
            raise ServiceFault("trainer-0", "gather", "a device was lost")
        yield from tensors

    async def test(here: Stage) -> None:
        yields(here, once)
        execute = here.trainer.rank.execute

        def slowly(command: object) -> object:
            if isinstance(command, BeginStep):
                begun.set()
                threading.Event().wait(1.5 * limit)  # longer than a transfer may take
            return execute(command)

        here.trainer.rank.execute = slowly  # type: ignore[method-assign]
        publishing = asyncio.create_task(here.publish(1))
        await until(torn.is_set)
        step = asyncio.ensure_future(here.trainer.call(BeginStep(1)))
        assert (await publishing).aborts == 1
        assert begun.is_set()
        await step
        assert [rollout.engine.swapped for rollout in here.rollouts] == [[1], [1]]

    run(test, msgspec.structs.replace(PUBLICATION, transfer_timeout=limit))


def test_a_rollout_that_is_lost_while_the_weights_are_gathered_costs_an_attempt() -> None:
    gathering, lost = threading.Event(), threading.Event()

    def midway(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        for index, tensor in enumerate(tensors):
            if index == 6:
                gathering.set()
                assert lost.wait(DEADLINE)
            yield tensor

    async def test(here: Stage) -> None:
        yields(here, midway)
        publishing = asyncio.create_task(here.publish(1))
        assert await asyncio.to_thread(gathering.wait, DEADLINE)
        here.rollouts[1].cut()
        await until(lambda: bool(here.publisher.abort))
        lost.set()
        assert (await publishing).aborts == 1
        assert here.rollouts[0].engine.swapped == [1]
        assert here.trainer.engine.gathered == [1]

    run(test)


def test_a_version_that_the_engine_has_left_behind_is_refused() -> None:
    async def test(here: Stage) -> None:
        await here.publish(1)
        await here.trainer.call(Apply(1))
        with pytest.raises(ServiceFault, match=r"trainer-0: snapshot: version 0\.1 was not kept: 0\.2 is there"):
            await here.trainer.call(SendWeights(PolicyVersion(0, 1), 1))
        assert here.trainer.engine.gathered == [1]

    run(test)
