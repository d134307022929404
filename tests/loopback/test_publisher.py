"""Weight publications over members in memory: who is asked what, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from runtime import config
from runtime.errors import InvariantViolated, ServiceFault, Unreachable
from runtime.metrics import PublicationFigures
from runtime.pipeline import publisher
from runtime.pipeline.publisher import Publisher
from runtime.types import PolicyVersion
from runtime.weights.plan import GroupAddress, Manifest
from tests.loopback.model_fakes import BYTES
from tests.loopback.pipeline_fakes import Cast, FakeRollout

DEADLINE = 10.0
FIRST, SECOND = PolicyVersion(0, 1), PolicyVersion(0, 2)


def make(cast: Cast, transfer: float = 5.0, commit: float = 5.0, in_flight: Any = "keep") -> Publisher:
    settings = config.Publication(transfer_timeout=transfer, commit_timeout=commit, in_flight=in_flight)
    return Publisher(cast.trainer, cast.rollouts, settings, 5.0)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        await asyncio.wait_for(test(), DEADLINE)

    asyncio.run(within())


async def fault_of(publisher: Publisher, version: PolicyVersion = FIRST) -> ServiceFault:
    """Publish, which is to fail; no call may be under way afterwards."""
    transaction = publisher.begin(version)
    try:
        with pytest.raises(ServiceFault) as raised:
            await transaction.finish()
    finally:
        transaction.cancel()
        await asyncio.sleep(0)
    return raised.value


class Gate(FakeRollout):
    """Verifies, commits and leaves when its events say so; `withdrawn` once a call of it was cancelled."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.may_verify, self.may_commit, self.may_leave, self.withdrawn = (asyncio.Event() for _ in range(4))
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
        await self.may_commit.wait()
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
        await make(cast).open_epoch()
        addresses = [rollout.address for rollout in cast.rollouts]
        assert [address and (address.epoch, address.rank, address.world_size) for address in addresses] == [
            (1, 1, 3),
            (1, 2, 3),
        ]

    run(test)


def test_a_version_counts_once_every_member_has_it() -> None:
    async def test() -> None:
        cast = Cast.prompt()
        publishing = make(cast)
        figures = await publishing.begin(FIRST).finish()
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
        finishing = asyncio.create_task(publishing.begin(FIRST).finish())
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
        await publishing.begin(FIRST).finish()
        with pytest.raises(InvariantViolated, match=r"0\.1"):
            publishing.begin(FIRST)
        await publishing.begin(SECOND).finish()

    run(test)


def test_a_member_that_does_not_verify_in_time_aborts_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "ABORT_SECONDS", 0.1)

    async def test() -> None:
        cast, gate = with_gate()
        gate.may_leave.clear()
        publishing = make(cast, transfer=0.1)
        fault = await fault_of(publishing)
        assert (fault.service, fault.phase) == ("rollout-1", "publish")
        assert "verify: rollout-1: no answer within 0.1 s" in fault.reason
        assert publishing.committed is None
        assert cast.rollouts[0].calls == [("receive", 1), ("verified", 1), ("abort", 1)]
        assert cast.trainer.calls == [("abort", 1)]
        assert gate.withdrawn.is_set()

    run(test)


class Torn(FakeRollout):
    async def receive_weights(self, version: PolicyVersion, epoch: int) -> None:
        raise ServiceFault(self.name, "receive", "the checksum of bucket 0 does not hold")


def test_a_member_that_reports_a_failure_aborts_for_all_and_is_told() -> None:
    async def test() -> None:
        cast = Cast.prompt()
        cast.rollouts[0] = Torn("rollout-0", cast.weights)
        publishing = make(cast)
        fault = await fault_of(publishing)
        assert "rollout-0" in fault.reason
        assert "the checksum of bucket 0 does not hold" in fault.reason
        assert not any(call[0] == "commit" for rollout in cast.rollouts for call in rollout.calls)
        assert all(("abort", 1) in rollout.calls for rollout in cast.rollouts)
        assert cast.trainer.calls == [("abort", 1)]

    run(test)


class Dying(FakeRollout):
    """Its connection breaks at the call named `dies`, and stays broken; `dead` until then says nothing."""

    dies = ""
    dead = False

    def _live(self, call: str) -> None:
        self.dead = self.dead or call == self.dies
        if self.dead:
            raise Unreachable(self.name, call, "connection lost")

    async def join_weights(self, address: GroupAddress, manifest: Manifest) -> None:
        self._live("join")
        await super().join_weights(address, manifest)

    async def receive_weights(self, version: PolicyVersion, epoch: int) -> None:
        self._live("receive")
        await super().receive_weights(version, epoch)

    async def commit_weights(self, version: PolicyVersion, epoch: int) -> float:
        self._live("commit")
        return await super().commit_weights(version, epoch)

    async def abort_weights(self, version: PolicyVersion, epoch: int) -> None:
        self._live("abort")
        await super().abort_weights(version, epoch)


def with_dying(*dies: str) -> Cast:
    cast = Cast.prompt()
    for place, call in enumerate(dies):
        dying = Dying(f"rollout-{place}", cast.weights)
        dying.dies = call
        cast.rollouts[place] = dying
    return cast


@pytest.mark.parametrize("call", ["receive", "commit"])
def test_a_publication_goes_on_without_a_member_whose_connection_breaks(call: str) -> None:
    async def test() -> None:
        cast = with_dying(call)
        publishing = make(cast)
        await publishing.open_epoch()
        living = cast.rollouts[1]
        await publishing.begin(FIRST).finish()
        assert publishing.committed == living.version == FIRST
        assert living.address is not None
        assert (living.address.epoch, living.address.rank, living.address.world_size) == (2, 1, 2)
        again = [("abort", 1), ("receive", 1), ("verified", 1)] if call == "receive" else []
        assert living.calls == [("receive", 1), ("verified", 1), *again, ("commit", 1)]
        sent = [command for command in cast.trainer.posted if command[0] == "send_weights"]
        assert sent == [("send_weights", 1)] * (2 if again else 1)
        await publishing.begin(SECOND).finish()
        assert living.version == SECOND

    run(test)


def test_a_publication_that_loses_its_last_member_fails() -> None:
    async def test() -> None:
        cast = with_dying("receive", "commit")
        publishing = make(cast)
        await publishing.open_epoch()
        fault = await fault_of(publishing)
        assert "rollout-1" in fault.service
        assert publishing.committed is None

    run(test)


@pytest.mark.parametrize("in_flight", ["keep", "drain"])
def test_a_member_that_does_not_commit_in_time_is_lost(in_flight: str) -> None:
    async def test() -> None:
        cast, gate = with_gate()
        gate.may_verify.set()
        gate.may_commit.clear()
        fault = await fault_of(make(cast, commit=0.1, in_flight=in_flight))
        assert fault.service == "rollout-1"
        assert "commit: rollout-1: no answer within 0.1 s" in fault.reason
        assert ("publication.commit_timeout" in fault.reason) == (in_flight == "drain")
        assert cast.rollouts[0].version == FIRST  # what counts is not undone

    run(test)


def test_the_deadline_counts_from_when_the_version_exists() -> None:
    async def test() -> None:
        cast, gate = with_gate()
        gate.may_verify.set()
        transaction = make(cast, transfer=0.2).begin(FIRST)
        await asyncio.sleep(0.3)  # the step that makes the version takes longer than its transfer may
        await transaction.finish()
        assert gate.version == FIRST

    run(test)
