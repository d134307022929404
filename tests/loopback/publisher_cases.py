"""What the tests of the publisher share: one over fakes, and a rollout that verifies, commits and leaves when it is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from runtime import config
from runtime.commands import WeightsCommitted, WeightsReceived
from runtime.coordinator.pools import RolloutPool
from runtime.coordinator.register import ROLLOUT, Register
from runtime.coordinator.weight_sync import WeightPublisher
from runtime.errors import ServiceFault
from runtime.types import PolicyVersion
from tests.loopback.pipeline_fakes import Cast, FakeRollout

DEADLINE = 60.0


async def until(holds: Callable[[], bool]) -> None:
    """For what other tasks do; the test's own deadline ends it."""
    while not holds():  # noqa: ASYNC110 - there is nothing to wait for but turns of the loop
        await asyncio.sleep(0)


def address_of(rollout: FakeRollout) -> tuple[int, int, int]:
    assert rollout.address is not None
    return rollout.address.epoch, rollout.address.rank, rollout.address.world_size


FIRST, SECOND = PolicyVersion(0, 1), PolicyVersion(0, 2)


def make(
    cast: Cast,
    transfer: float = 20.0,
    commit: float = 20.0,
    in_flight: Any = "keep",
    patience: float = 20.0,
    transport: Any = "auto",
) -> WeightPublisher:
    settings = config.Publication(
        transport=transport,
        transfer_timeout=transfer,
        commit_timeout=commit,
        abort_timeout=min(transfer, commit),
        in_flight=in_flight,
    )
    pool = RolloutPool(Register(), dict.fromkeys(("rollout-0", "rollout-1", "rollout-2"), 1), patience)
    for rollout in cast.rollouts:
        come(pool, rollout)
    return WeightPublisher(cast.trainer, pool, settings, 20.0)


def come(pool: RolloutPool, rollout: Any) -> None:
    """It is connected, and joins the sync group."""
    pool.register.add(ROLLOUT, rollout)
    pool.register.join(rollout)


@asynccontextmanager
async def kept(publisher: WeightPublisher) -> AsyncIterator[None]:
    """While the publisher keeps the epoch that of the living."""
    keeping = asyncio.create_task(publisher.run())
    try:
        yield
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        await asyncio.wait_for(test(), DEADLINE)

    asyncio.run(within())


async def fault_of(publisher: WeightPublisher, version: PolicyVersion = FIRST) -> ServiceFault:
    """Publish, which is to fail."""
    with pytest.raises(ServiceFault) as raised:
        await publisher.publish(version)
    return raised.value


class Gate(FakeRollout):
    """Verifies, commits and leaves when its events say so; `withdrawn` once a call of it was cancelled, `asked` to commit."""

    took = WeightsReceived()

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.may_verify, self.may_commit, self.may_leave, self.withdrawn, self.asked = (asyncio.Event() for _ in range(5))
        self.may_commit.set()
        self.may_leave.set()

    async def receive_weights(self, version: PolicyVersion, epoch: int) -> WeightsReceived:
        await super().receive_weights(version, epoch)
        self.calls.pop()
        try:
            await self.may_verify.wait()
        except asyncio.CancelledError:
            self.withdrawn.set()
            raise
        self.calls.append(("verified", version.step))
        return self.took

    async def commit_weights(self, version: PolicyVersion, epoch: int) -> WeightsCommitted:
        self.asked.set()
        await self.reached(self.may_commit.wait())
        return await super().commit_weights(version, epoch)

    async def abort_weights(self, version: PolicyVersion, epoch: int) -> None:
        await self.may_leave.wait()
        await super().abort_weights(version, epoch)


def with_gate() -> tuple[Cast, Gate]:
    cast = Cast.prompt()
    gate = Gate("rollout-1", cast.weights)
    cast.rollouts[1] = gate
    return cast, gate
