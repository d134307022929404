"""Publications while rollouts come and go: newcomers, transports, and who does not come to the rendezvous."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest

from runtime.commands import WeightsHosted, WeightsSent
from runtime.errors import ServiceFault, Unanswered, UserError
from runtime.types import PolicyVersion
from runtime.weights.plan import GroupAddress, Manifest
from tests.loopback.model_fakes import FakeTrainer
from tests.loopback.pipeline_fakes import Cast, FakeRollout
from tests.loopback.publisher_cases import FIRST, SECOND, address_of, come, fault_of, kept, make, run, until, with_gate


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
            come(pool, late)
            assert late not in pool.serving
            await until(lambda: late in pool.serving)
            assert late.version == publishing.committed == FIRST
            assert cast.trainer.posted.count(("send_weights", 1)) == 1
            assert cast.rollouts[0].calls[-2:] == [("host", 2), ("resend", 1)]
            await until(lambda: address_of(late)[2] == 3)
            members = address_of(cast.rollouts[0]), address_of(late)
            assert [member[1:] for member in members] == [(1, 3), (2, 3)]
            await publishing.publish(SECOND)
        assert [rollout.version for rollout in (cast.rollouts[0], late)] == [SECOND] * 2

    run(test)


class Ahead(FakeTrainer):
    """Has made SECOND, and holds nothing that it sent before."""

    def send_weights(self, version: PolicyVersion, epoch: int) -> Coroutine[Any, Any, WeightsSent]:
        return self._past() if version < SECOND else super().send_weights(version, epoch)

    async def _past(self) -> WeightsSent:
        await asyncio.sleep(0)
        self.calls.append(("past", FIRST))
        raise ServiceFault(self.name, "snapshot", "version 0.1 was not kept: 0.2 is there")


class KeepsNothing(FakeRollout):
    async def host_weights(self, epoch: int, world_size: int, transport: str, names: Sequence[str]) -> WeightsHosted:
        raise ServiceFault(self.name, "snapshot", "no version that was received is kept")


def test_a_newcomer_gets_the_next_version_where_the_trainer_is_past_the_one_that_counts() -> None:
    """As a coordinator may find it that takes over: the one before has ordered a step of which it knows nothing."""

    async def test() -> None:
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
            assert [rollout.name for rollout in pool.serving] == ["rollout-0"]
            await publishing.publish(SECOND)
            assert [rollout.version for rollout in cast.rollouts] == [SECOND] * 2
        assert not publishing.waits_for_next

    run(test)


def test_a_late_member_is_in_the_next_publication_when_one_is_under_way() -> None:
    async def test() -> None:
        cast, gate = with_gate()
        publishing = make(cast)
        async with kept(publishing):
            finishing = asyncio.create_task(publishing.publish(FIRST))
            await until(lambda: bool(gate.calls))
            late = FakeRollout("rollout-2", cast.weights)
            come(publishing._pool, late)
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
        assert here.address is not None and here.address.transport == publishing.group.transport == "shared_memory"
        cast.rollouts[1].die()
        come(publishing._pool, late)
        await publishing.publish(SECOND)
        assert here.address.transport == publishing.group.transport == "collective"

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

        async def hosting(epoch: int, world_size: int, transport: str, names: Sequence[str]) -> WeightsHosted:
            cast.rollouts[0].die()
            return await host(epoch, world_size, transport, names)

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
        come(publishing._pool, late)
        await publishing.publish(SECOND)
        assert late.version == SECOND

    run(test)


def test_the_deadline_counts_from_when_the_version_exists() -> None:
    async def test() -> None:
        cast, gate = with_gate()
        gate.may_verify.set()
        sync = await make(cast, transfer=2.0).begin(FIRST)
        await asyncio.sleep(2.1)  # the step that makes the version takes longer than its transfer may
        figures = await sync.finish()
        sync.close()
        assert (gate.version, figures.aborts) == (FIRST, 0)

    run(test)
