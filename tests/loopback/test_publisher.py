"""Weight publications over members in memory: who is asked what, and when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from runtime import config
from runtime.errors import InvariantViolated, ServiceFault, Unanswered, Unreachable, UserError
from runtime.metrics import PublicationFigures
from runtime.pipeline import publisher
from runtime.pipeline.publisher import Publisher
from runtime.pipeline.rollouts import RolloutPool
from runtime.types import PolicyVersion
from runtime.weights.plan import GroupAddress, Manifest
from tests.loopback.model_fakes import BYTES
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
) -> Publisher:
    settings = config.Publication(
        transport=transport,
        transfer_timeout=transfer,
        commit_timeout=commit,
        abort_timeout=min(transfer, commit),
        in_flight=in_flight,
    )
    pool = RolloutPool(cast.rollouts, {rollout.name: 1 for rollout in cast.rollouts}, patience)
    return Publisher(cast.trainer, pool, settings, 20.0)


@asynccontextmanager
async def kept(publisher: Publisher) -> AsyncIterator[None]:
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


async def fault_of(publisher: Publisher, version: PolicyVersion = FIRST) -> ServiceFault:
    """Publish, which is to fail."""
    with pytest.raises(ServiceFault) as raised:
        await publisher.publish(version)
    return raised.value


class Gate(FakeRollout):
    """Verifies, commits and leaves when its events say so; `withdrawn` once a call of it was cancelled, `asked` to commit."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.may_verify, self.may_commit, self.may_leave, self.withdrawn, self.asked = (asyncio.Event() for _ in range(5))
        self.may_commit.set()
        self.may_leave.set()

    async def receive_weights(self, version: PolicyVersion, epoch: int) -> None:
        await super().receive_weights(version, epoch)
        self.calls.pop()
        try:
            await self.may_verify.wait()
        except asyncio.CancelledError:
            self.withdrawn.set()
            raise
        self.calls.append(("verified", version.step))

    async def commit_weights(self, version: PolicyVersion, epoch: int) -> float:
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


def test_an_epoch_gives_every_member_a_rank_of_its_own() -> None:
    async def test() -> None:
        cast = Cast.prompt()
        await make(cast).publish(FIRST)
        assert [*map(address_of, cast.rollouts)] == [(1, 1, 3), (1, 2, 3)]

    run(test)


def test_a_version_counts_once_every_member_has_it() -> None:
    async def test() -> None:
        cast = Cast.prompt()
        publishing = make(cast)
        figures = await publishing.publish(FIRST)
        assert isinstance(figures, PublicationFigures)
        assert (figures.bytes, figures.pause_seconds) == (BYTES, 0.001)
        assert publishing.committed == FIRST
        for rollout in cast.rollouts:
            assert rollout.calls == [("receive", 1), ("verified", 1), ("commit", 1)]
            assert rollout.version == FIRST

    run(test)


def test_nobody_commits_before_everybody_has_verified() -> None:
    async def test() -> None:
        cast, gate = with_gate()
        publishing = make(cast)
        finishing = asyncio.create_task(publishing.publish(FIRST))
        first = cast.rollouts[0]
        for _ in range(50):  # until every consequence has had its turn
            await asyncio.sleep(0)
        assert first.calls[-1] == ("verified", 1)
        assert publishing.committed is None
        gate.may_verify.set()
        await finishing
        assert [rollout.calls[-1] for rollout in cast.rollouts] == [("commit", 1)] * 2

    run(test)


def test_a_version_is_never_published_twice() -> None:
    async def test() -> None:
        publishing = make(Cast.prompt())
        await publishing.publish(FIRST)
        with pytest.raises(InvariantViolated, match=r"0\.1"):
            await publishing.begin(FIRST)
        await publishing.publish(SECOND)

    run(test)


def test_a_member_that_does_not_verify_in_time_is_left_out_and_the_version_counts_without_it() -> None:
    async def test() -> None:
        cast, gate = with_gate()
        gate.may_leave.clear()
        publishing = make(cast, transfer=1.0)
        figures = await publishing.publish(FIRST)
        assert (figures.aborts, figures.epoch) == (1, 2)
        assert "verify: rollout-1: no answer within 1 s" in publishing.abort
        assert gate.gone == publishing.abort
        assert gate.withdrawn.is_set()
        assert cast.trainer.calls == [("abort", 1)]
        once = [("receive", 1), ("verified", 1)]
        assert cast.rollouts[0].calls == [*once, ("abort", 1), *once, ("commit", 1)]
        assert address_of(cast.rollouts[0]) == (2, 1, 2)
        assert publishing.committed == FIRST

    run(test)


class Torn(FakeRollout):
    """Its checksums do not hold, the first `times` times."""

    times = 1

    async def receive_weights(self, version: PolicyVersion, epoch: int) -> None:
        if self.times:
            self.times -= 1
            raise ServiceFault(self.name, "receive", "the checksum of bucket 0 does not hold")
        await super().receive_weights(version, epoch)


def test_a_failure_that_loses_nobody_is_tried_again_with_everybody() -> None:
    async def test() -> None:
        cast = Cast.prompt()
        cast.rollouts[0] = Torn("rollout-0", cast.weights)
        publishing = make(cast)
        figures = await publishing.publish(FIRST)
        assert (figures.aborts, figures.epoch) == (1, 2)
        assert "the checksum of bucket 0 does not hold" in publishing.abort
        assert all(("abort", 1) in rollout.calls and rollout.calls[-1] == ("commit", 1) for rollout in cast.rollouts)

    run(test)


def test_a_failure_that_does_not_end_fails_the_publication_and_names_it() -> None:
    async def test() -> None:
        cast = Cast.prompt()
        torn = cast.rollouts[0] = Torn("rollout-0", cast.weights)
        torn.times = 100
        publishing = make(cast)
        fault = await fault_of(publishing)
        assert "rollout-0" in fault.reason
        assert "the checksum of bucket 0 does not hold" in fault.reason
        assert publishing.committed is None
        assert not any(call[0] == "commit" for rollout in cast.rollouts for call in rollout.calls)
        assert cast.trainer.calls == [("abort", 1)] * publisher.TRIES

    run(test)


@pytest.mark.parametrize("in_flight", ["keep", "drain"])
def test_a_member_that_does_not_commit_in_time_is_lost(in_flight: str) -> None:
    async def test() -> None:
        cast, gate = with_gate()
        gate.may_verify.set()
        gate.may_commit.clear()
        publishing = make(cast, commit=1.0, in_flight=in_flight)
        async with kept(publishing):
            await publishing.publish(FIRST)
            assert cast.rollouts[0].version == publishing.committed == FIRST  # what counts is not undone
            assert "commit: rollout-1: no answer within 1 s" in gate.gone
            assert ("publication.commit_timeout" in gate.gone) == (in_flight == "drain")
            figures = await publishing.publish(SECOND)
        assert (figures.aborts, figures.epoch) == (0, 2)

    run(test)


@pytest.mark.parametrize("when", ["receive", "verified"])
def test_a_member_that_dies_is_left_out(when: str) -> None:
    async def test() -> None:
        cast, gate = with_gate()
        publishing = make(cast)
        finishing = asyncio.create_task(publishing.publish(FIRST))
        await until(lambda: bool(gate.calls))
        if when == "verified":
            gate.may_verify.set()
            gate.may_commit.clear()
            await gate.asked.wait()
        gate.die()
        figures = await finishing
        assert publishing.committed == cast.rollouts[0].version == FIRST
        assert figures.aborts == (when == "receive")

    run(test)


def test_a_trainer_that_is_lost_ends_the_publication() -> None:
    async def test() -> None:
        cast = Cast.prompt()

        async def lost(version: PolicyVersion) -> Any:
            raise Unreachable("trainer-0", "SendWeights", "connection lost")

        cast.trainer.send = lost  # type: ignore[method-assign]
        fault = await fault_of(make(cast))
        assert fault.service == "trainer-0"

    run(test)


def test_a_newcomer_gets_the_committed_version_before_it_serves_and_the_others_keep_it() -> None:
    async def test() -> None:
        cast = Cast.prompt()
        publishing = make(cast)
        pool = publishing._pool
        async with kept(publishing):
            await publishing.publish(FIRST)
            cast.rollouts[1].die()
            assert [rollout.name for rollout in pool.serving] == ["rollout-0"]
            late = FakeRollout("rollout-1", cast.weights, incarnation=1)
            pool.arrive(late)
            assert late not in pool.serving
            await until(lambda: late in pool.serving)
            assert late.version == publishing.committed == FIRST
            members = address_of(cast.rollouts[0]), address_of(late)
            assert [member[1:] for member in members] == [(1, 3), (2, 3)]
            assert cast.trainer.posted.count(("send_weights", 1)) == 2
            await publishing.publish(SECOND)
        assert [rollout.version for rollout in (cast.rollouts[0], late)] == [SECOND] * 2

    run(test)


def test_a_late_member_is_in_the_next_publication_when_one_is_under_way() -> None:
    async def test() -> None:
        cast, gate = with_gate()
        publishing = make(cast)
        async with kept(publishing):
            finishing = asyncio.create_task(publishing.publish(FIRST))
            await until(lambda: bool(gate.calls))
            late = FakeRollout("rollout-2", cast.weights)
            publishing._pool.arrive(late)
            for _ in range(50):
                await asyncio.sleep(0)
            assert late.calls == []
            gate.may_verify.set()
            await finishing
            await until(lambda: late in publishing._pool.serving)
            assert late.version == FIRST

    run(test)


def test_each_epoch_takes_the_transport_that_all_its_members_reach() -> None:
    async def test() -> None:
        cast = Cast.prompt()
        here, late = cast.rollouts[0], FakeRollout("rollout-1", cast.weights, incarnation=1)
        late.machine = "there"
        publishing = make(cast)
        await publishing.publish(FIRST)
        assert here.address is not None and here.address.transport == publishing.transport == "shared_memory"
        cast.rollouts[1].die()
        publishing._pool.arrive(late)
        await publishing.publish(SECOND)
        assert here.address.transport == publishing.transport == "collective"

    run(test)


def test_shared_memory_is_not_exchanged_for_another_transport() -> None:
    async def test() -> None:
        cast = Cast.prompt()
        cast.rollouts[1].machine = "there"
        publishing = make(cast, transport="shared_memory")
        with pytest.raises(UserError, match=r"publication\.transport: shared_memory needs .* rollout-1 cannot"):
            await publishing.publish(FIRST)

    run(test)


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


def test_who_does_not_come_to_the_rendezvous_is_left_out_and_who_waited_there_is_not() -> None:
    async def test() -> None:
        cast = Cast.prompt()
        cast.rollouts[:] = [Absent("rollout-0", cast.weights), Waiting("rollout-1", cast.weights)]
        figures = await make(cast).publish(FIRST)
        assert figures.epoch == 2
        assert cast.rollouts[1].version == FIRST
        assert "did not answer" in cast.rollouts[0].gone
        assert not cast.rollouts[1].gone
        assert len(cast.trainer.calls) == 1  # it gave the first rendezvous up, so that nobody waits for it

    run(test)


def test_who_dies_while_the_trainer_opens_the_rendezvous_is_left_out() -> None:
    async def test() -> None:
        cast = Cast.prompt()
        host = cast.trainer.host_weights

        async def hosting(epoch: int, names: Sequence[str], transport: str) -> tuple[GroupAddress, Manifest]:
            cast.rollouts[0].die()
            return await host(epoch, names, transport)

        cast.trainer.host_weights = hosting  # type: ignore[method-assign]
        assert (await make(cast).publish(FIRST)).epoch == 2
        assert address_of(cast.rollouts[1]) == (2, 1, 2)

    run(test)


def test_without_any_rollout_a_publication_waits_for_one_and_names_who_was_lost_when_none_comes() -> None:
    async def test() -> None:
        cast = Cast.prompt()
        publishing = make(cast, patience=0.1)
        await publishing.publish(FIRST)
        for rollout in cast.rollouts:
            rollout.die("was killed")
        fault = await fault_of(publishing, SECOND)
        assert fault.service == "rollout-0, rollout-1"
        assert "was killed" in fault.reason
        late = FakeRollout("rollout-1", cast.weights, incarnation=1)
        publishing._pool.arrive(late)
        await publishing.publish(SECOND)
        assert late.version == SECOND

    run(test)


def test_the_deadline_counts_from_when_the_version_exists() -> None:
    async def test() -> None:
        cast, gate = with_gate()
        gate.may_verify.set()
        transaction = await make(cast, transfer=0.2).begin(FIRST)
        await asyncio.sleep(0.3)  # the step that makes the version takes longer than its transfer may
        figures = await transaction.finish()
        transaction.close()
        assert (gate.version, figures.aborts) == (FIRST, 0)

    run(test)
