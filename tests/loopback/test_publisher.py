"""Weight publications over members in memory: who is asked what, and when."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from runtime.commands import WeightsReceived
from runtime.coordinator import weight_sync
from runtime.errors import InvariantViolated, ServiceFault, Unreachable
from runtime.telemetry.metrics import PublicationFigures
from runtime.types import PolicyVersion
from tests.loopback.model_fakes import BYTES, GATHERED
from tests.loopback.pipeline_fakes import Cast, FakeRollout
from tests.loopback.publisher_cases import FIRST, SECOND, address_of, fault_of, kept, make, run, until, with_gate


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


def test_the_figures_say_where_the_time_of_the_last_rollout_went() -> None:
    async def test() -> None:
        cast, gate = with_gate()
        gate.took = WeightsReceived(wait_seconds=0.5, copy_seconds=0.25, hash_seconds=0.125, stage_seconds=1.0)
        publishing = asyncio.create_task(make(cast).publish(FIRST))
        gate.may_verify.set()
        found = await publishing
        assert (found.wait_seconds, found.copy_seconds, found.hash_seconds, found.stage_seconds) == (0.5, 0.25, 0.125, 1.0)
        assert found.gather_seconds == GATHERED

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

    async def receive_weights(self, version: PolicyVersion, epoch: int) -> WeightsReceived:
        if self.times:
            self.times -= 1
            raise ServiceFault(self.name, "receive", "the checksum of bucket 0 does not hold")
        return await super().receive_weights(version, epoch)


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
        assert cast.trainer.calls == [("abort", 1)] * weight_sync.TRIES

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
