"""Weight weight syncs over members in memory. Losses in any order: `tests/swarm`, `tests/unit/test_weight_sync_bench.py`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from runtime import config, timeouts
from runtime.commands import WeightGroupReady, WeightsCommitted, WeightsReceived, WeightsSent
from runtime.coordinator import weight_sync
from runtime.coordinator.pools import RolloutPool
from runtime.coordinator.register import Register
from runtime.coordinator.weight_sync import WeightPublisher
from runtime.errors import InvariantViolated, ServiceFault, Unanswered, UserError
from runtime.telemetry.metrics import WeightSyncFigures
from runtime.types import PolicyVersion
from runtime.weights.plan import GroupAddress, Manifest
from tests.loopback.pipeline_fakes import BYTES, GATHERED, Cast, FakeRollout, FakeTrainer
from tests.loopback.weight_cases import come, on_a_loop, until

FIRST, SECOND = PolicyVersion(0, 1), PolicyVersion(0, 2)


def address_of(rollout: FakeRollout) -> tuple[int, int, int]:
    assert rollout.address is not None
    return rollout.address.epoch, rollout.address.rank, rollout.address.world_size


@pytest.fixture(autouse=True)
def soon_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "SYNC_ABORT", 0.2)


def make(cast: Cast, transfer: float = 20.0, commit: float = 20.0, patience: float = 20.0, **options: Any) -> WeightPublisher:
    settings = config.WeightSyncConfig(transfer_timeout=transfer, commit_timeout=commit, **options)
    pool = RolloutPool(Register(), dict.fromkeys(("rollout-0", "rollout-1", "rollout-2"), 1), patience)
    for rollout in cast.rollouts:
        come(pool, rollout)
    return WeightPublisher(cast.trainer, pool, settings, 20.0)


@asynccontextmanager
async def kept(publisher: WeightPublisher) -> AsyncIterator[None]:
    """While the publisher keeps the epoch that of the living."""
    keeping = asyncio.create_task(publisher.run())
    try:
        yield
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


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


@on_a_loop
async def test_a_version_counts_once_every_member_has_it() -> None:
    cast, gate = with_gate()
    gate.took = WeightsReceived(wait_seconds=0.5, copy_seconds=0.25, hash_seconds=0.125, stage_seconds=1.0)
    publishing = make(cast)
    finishing, first = asyncio.create_task(publishing.publish(FIRST)), cast.rollouts[0]
    for _ in range(50):  # until every consequence has had its turn
        await asyncio.sleep(0)
    assert first.calls[-1] == ("verified", 1)
    assert publishing.committed is None
    gate.may_verify.set()
    figures = await finishing
    assert isinstance(figures, WeightSyncFigures)
    assert (figures.bytes, figures.pause_seconds, figures.gather_seconds) == (BYTES, 0.001, GATHERED)
    assert (figures.wait_seconds, figures.copy_seconds, figures.hash_seconds, figures.stage_seconds) == (0.5, 0.25, 0.125, 1.0)
    assert publishing.committed == FIRST
    assert [*map(address_of, cast.rollouts)] == [(1, 1, 3), (1, 2, 3)]
    for rollout in cast.rollouts:
        assert rollout.calls == [("receive", 1), ("verified", 1), ("commit", 1)]
        assert rollout.version == FIRST
    with pytest.raises(InvariantViolated, match=r"0\.1"):
        await publishing.begin(FIRST)
    await publishing.publish(SECOND)


@on_a_loop
async def test_a_member_that_does_not_verify_in_time_is_left_out_and_the_version_counts_without_it() -> None:
    cast, gate = with_gate()
    gate.may_leave.clear()
    publishing = make(cast, transfer=0.5)
    figures = await publishing.publish(FIRST)
    assert (figures.aborts, figures.epoch) == (1, 2)
    assert "verify: rollout-1: no answer within 0.5 s" in publishing.abort
    assert gate.gone == publishing.abort
    assert gate.withdrawn.is_set()
    assert cast.trainer.calls == [("abort", 1)]
    once = [("receive", 1), ("verified", 1)]
    assert cast.rollouts[0].calls == [*once, ("abort", 1), *once, ("commit", 1)]
    assert address_of(cast.rollouts[0]) == (2, 1, 2)
    assert publishing.committed == FIRST


class Torn(FakeRollout):
    """Its checksums do not hold."""

    async def receive_weights(self, version: PolicyVersion, epoch: int) -> WeightsReceived:
        raise ServiceFault(self.name, "receive", "the checksum of bucket 0 does not hold")


@on_a_loop
async def test_a_failure_that_does_not_end_fails_the_weight_sync_and_names_it() -> None:
    cast = Cast.prompt()
    cast.rollouts[0] = Torn("rollout-0", cast.weights)
    publishing = make(cast)
    fault = await fault_of(publishing)
    assert "rollout-0" in fault.reason
    assert "the checksum of bucket 0 does not hold" in fault.reason
    assert publishing.committed is None
    assert not any(call[0] == "commit" for rollout in cast.rollouts for call in rollout.calls)
    assert cast.trainer.calls == [("abort", 1)] * weight_sync.TRIES


@pytest.mark.parametrize("how", ["keep", "drain", "dies"])
@on_a_loop
async def test_a_member_that_does_not_commit_is_lost(how: str) -> None:
    cast, gate = with_gate()
    gate.may_verify.set()
    gate.may_commit.clear()
    publishing = make(cast) if how == "dies" else make(cast, commit=0.5, in_flight=how)
    async with kept(publishing):
        finishing = asyncio.create_task(publishing.publish(FIRST))
        await gate.asked.wait()
        if how == "dies":
            gate.die()
        assert (await finishing).aborts == 0
        assert cast.rollouts[0].version == publishing.committed == FIRST  # what counts is not undone
        if how != "dies":
            assert "commit: rollout-1: no answer within 0.5 s" in gate.gone
            assert ("weight_sync.commit_timeout" in gate.gone) == (how == "drain")
        figures = await publishing.publish(SECOND)
    assert (figures.aborts, figures.epoch) == (0, 2)


class Ahead(FakeTrainer):
    """Has made SECOND, and holds nothing that it sent before."""

    def send_weights(self, version: PolicyVersion, epoch: int) -> Coroutine[Any, Any, WeightsSent]:
        return self._past() if version < SECOND else super().send_weights(version, epoch)

    async def _past(self) -> WeightsSent:
        await asyncio.sleep(0)
        self.calls.append(("past", FIRST))
        raise ServiceFault(self.name, "snapshot", "version 0.1 was not kept: 0.2 is there")


class KeepsNothing(FakeRollout):
    async def init_weight_group(self, epoch: int, names: Sequence[str], machines: Sequence[str]) -> WeightGroupReady:
        raise ServiceFault(self.name, "snapshot", "no version that was received is kept")


@on_a_loop
async def test_a_newcomer_gets_the_next_version_where_the_trainer_is_past_the_one_that_counts() -> None:
    """As a coordinator may find it that takes over: the one before has ordered a step of which it knows nothing."""
    cast = Cast.prompt()
    cast.trainer = Ahead(cast.weights)
    cast.rollouts[0] = KeepsNothing("rollout-0", cast.weights)
    publishing = make(cast)
    pool = publishing._pool
    pool.take_up(FIRST, [pool.register.units("rollout")[0].member])
    publishing.kept = FIRST
    async with kept(publishing):
        await until(lambda: publishing.waits_for_next)
        assert cast.trainer.calls.count(("past", FIRST)) == 2  # once out of the buckets, once gathered anew
        assert [rollout.name for rollout in pool.units()] == ["rollout-0"]
        await publishing.publish(SECOND)
        assert [rollout.version for rollout in cast.rollouts] == [SECOND] * 2
    assert not publishing.waits_for_next


@on_a_loop
async def test_each_epoch_takes_the_transports_by_which_its_members_are_reached() -> None:
    cast = Cast.prompt()
    here, late = cast.rollouts[0], FakeRollout("rollout-1", cast.weights, incarnation=1)
    late.machine = "there"
    publishing = make(cast)
    await publishing.publish(FIRST)
    assert here.address is not None and here.address.machines == ("here",) * len(here.address.machines)
    assert publishing.group.transport == "shared_memory"
    cast.rollouts[1].die()
    come(publishing._pool, late)
    cast.rollouts[1] = late
    await publishing.publish(SECOND)
    assert publishing.group.transport == "collective and shared_memory"
    assert here.address.machines.index("there") == late.address.rank
    with pytest.raises(UserError, match=r"weight_sync\.transport: shared_memory needs .* rollout-1 may"):
        await make(cast, transport="shared_memory").publish(SECOND)


class Waiting(FakeRollout):
    """Waits in its first rendezvous for somebody who does not come, for as long as it may."""

    async def join_weights(self, address: GroupAddress, manifest: Manifest) -> None:
        if address.epoch == 1:
            await asyncio.sleep(0.05)
            raise Unanswered(self.name, "JoinWeights", "did not answer", 0.05)
        await super().join_weights(address, manifest)


class Absent(Waiting):
    """Never comes to a rendezvous, as it is stopped."""

    async def abort_weights(self, version: PolicyVersion, epoch: int) -> None:
        raise Unanswered(self.name, "AbortWeights", "did not answer", 0.05)


@on_a_loop
async def test_who_does_not_come_to_the_rendezvous_is_left_out_and_who_waited_there_is_not() -> None:
    cast = Cast.prompt()
    cast.rollouts[:] = [Absent("rollout-0", cast.weights), Waiting("rollout-1", cast.weights)]
    figures = await make(cast).publish(FIRST)
    assert figures.epoch == 2
    assert cast.rollouts[1].version == FIRST
    assert "did not answer" in cast.rollouts[0].gone
    assert not cast.rollouts[1].gone
    assert len(cast.trainer.calls) == 1  # it gave the first rendezvous up, so that nobody waits for it


@on_a_loop
async def test_without_any_rollout_a_weight_sync_waits_for_one_and_names_who_was_lost_when_none_comes() -> None:
    cast = Cast.prompt()
    publishing = make(cast, patience=0.1)
    await publishing.publish(FIRST)
    for rollout in cast.rollouts:
        rollout.die("was killed")
    fault = await fault_of(publishing, SECOND)
    assert fault.service == "rollout-0, rollout-1"
    assert "was killed" in fault.reason
    late = FakeRollout("rollout-1", cast.weights, incarnation=1)
    come(publishing._pool, late)
    await publishing.publish(SECOND)
    assert late.version == SECOND


@on_a_loop
async def test_the_deadline_counts_from_when_the_version_exists() -> None:
    cast, gate = with_gate()
    gate.may_verify.set()
    sync = await make(cast, transfer=0.5).begin(FIRST)
    await asyncio.sleep(0.6)  # the step that makes the version takes longer than its transfer may
    figures = await sync.finish()
    sync.close()
    assert (gate.version, figures.aborts) == (FIRST, 0)
