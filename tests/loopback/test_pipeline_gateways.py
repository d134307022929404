"""The pipeline's real logic over gateways in memory: who has groups played, by which rollouts, and when one is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from runtime import codec, config
from runtime.commands import PeerAddress
from runtime.config import Config, Gateway
from runtime.coordinator.metrics_recorder import COUNTED
from runtime.coordinator.register import Register
from runtime.coordinator.run import TrainingRun
from runtime.ledger.states import Phase
from runtime.status import Status
from runtime.types import GeneratedGroup, GroupPayload, PlayRequest, PolicyVersion, Sample
from tests.loopback.losable import ASKED
from tests.loopback.pipeline_checks import check_books
from tests.loopback.pipeline_fakes import Cast, FakeReplica, LongTail, RunFolder

ASKED[PlayRequest] = "play"
GAUGES = dict.fromkeys(("episodes_total", "calls_total", "forks_total", "overridden_total", "loop_lag_p99"), 0.0)


class FakeGateway(FakeReplica):
    """Has each group played in two turns, the first by the version that the rollouts have as it is begun."""

    def __init__(self, name: str, cast: Cast, seconds: LongTail, incarnation: int = 0):
        super().__init__(incarnation)
        self.name = name
        self.played: list[PlayRequest] = []
        self.told: list[tuple[str, ...]] = []
        self.hurried: list[int] = []
        self.busy = asyncio.Event()  # it has had a few played, and has another
        self.hangs: asyncio.Event | None = None  # until then the next one is not over
        self.played_late: int | None = None  # the group that hangs
        self._cast, self._seconds = cast, seconds

    async def use_peers(self, rollouts: tuple[PeerAddress, ...], environments: tuple[PeerAddress, ...], key: str) -> None:
        self.told.append(tuple(rollout.name for rollout in rollouts))

    async def hurry(self, group_id: int) -> None:
        self.hurried.append(group_id)
        if self.hangs is not None and self.played_late == group_id:
            self.hangs.set()

    async def play(self, request: PlayRequest) -> GeneratedGroup:
        return await self.reached(self._play(request))

    async def _play(self, request: PlayRequest) -> GeneratedGroup:
        self.played.append(request)
        if len(self.played) > 3:
            self.busy.set()
        oldest = self._version()
        await asyncio.sleep(self._seconds())
        if self.hangs is not None and self.played_late is None:
            self.played_late = request.group_id
            await self.hangs.wait()
        newest = self._version()
        tokens, versions = np.arange(5, dtype=np.int32), np.array([oldest.pack()] * 3 + [newest.pack()] * 2, np.int64)
        sample = Sample(
            tokens=tokens,
            loss_mask=np.array([1, 0, 0, 1, 1], np.uint8),
            logprobs=np.array([-1, 0, 0, -1, -1], np.float32),
            versions=versions,
            finish_reason="stop",
        )
        payload = GroupPayload.of(request.group_id, np.zeros(2, np.int32), [sample] * 2 * request.n, [2] * request.n)
        return GeneratedGroup(
            group_id=request.group_id,
            prompt_tokens=2,
            response_tokens=payload.lengths.tolist(),
            truncated=0,
            oldest=oldest,
            newest=newest,
            payload=codec.encode(payload),
        )

    def _version(self) -> PolicyVersion:
        return min(rollout.version for rollout in self._cast.rollouts if not rollout.gone)

    async def status(self) -> Status:
        return Status(role="gateway", name=self.name, gauges=GAUGES)


class AgentCast(Cast):
    """With gateways before the rollouts."""

    gateways: list[FakeGateway]

    @classmethod
    def made(cls) -> AgentCast:
        whole = cls.make()
        assert isinstance(whole, AgentCast)
        whole.gateways = [FakeGateway(f"gateway-{index}", whole, LongTail(40 + index)) for index in range(2)]
        return whole

    def register(self) -> Register:
        register = super().register()
        for gateway in self.gateways:
            register.add("gateway", gateway)
        return register


class AgentRun(RunFolder):
    def config(self, resume: str = "") -> Config:
        base = super().config(resume)
        services = replace(base.services, gateway=config.Gateways(replicas=2), rollout=config.Rollout(replicas=2, slots=2))
        return replace(base, gateway=Gateway(), services=services)


@pytest.mark.parametrize("staleness", [0, 1, 2, 5])
def test_gateways_have_all_groups_played_and_every_bound_on_staleness_holds(tmp_path: Path, staleness: int) -> None:
    cast, folder = AgentCast.made(), AgentRun(tmp_path, staleness=staleness)
    folder.run(cast)
    check_books(folder, folder.steps)
    played = Counter(request.group_id for gateway in cast.gateways for request in gateway.played)
    assert set(played) >= {group.group_id for group in folder.groups(Phase.RETIRED)} and set(played.values()) == {1}
    assert all(gateway.played for gateway in cast.gateways)
    assert not any(rollout.generated_by for rollout in cast.rollouts)  # they are asked by gateways alone, and for probes
    for group in folder.groups(Phase.RETIRED):
        assert group.step is not None and group.oldest is not None
        assert 0 <= group.step - group.oldest.step <= staleness
    assert all(gateway.told[-1] == ("rollout-0", "rollout-1") for gateway in cast.gateways)
    request = cast.gateways[0].played[0]
    assert (request.n, request.task.label, request.task.messages) == (2, request.task.extra["label"], request.task.messages)


def test_a_group_that_the_trainer_waits_for_alone_is_hurried(tmp_path: Path) -> None:
    cast, folder = AgentCast.made(), AgentRun(tmp_path)

    async def course(run: TrainingRun) -> None:
        await cast.gateways[1].busy.wait()
        cast.gateways[1].hangs = asyncio.Event()  # it would wait for ever

    folder.run(cast, course)
    check_books(folder, folder.steps)
    late = cast.gateways[1].played_late
    assert late is not None and cast.gateways[1].hurried.count(late) == 1
    (group,) = (group for group in folder.groups(Phase.RETIRED) if group.group_id == late)
    assert group.attempt == 1


def test_what_a_lost_gateway_had_is_played_again_and_counted(tmp_path: Path) -> None:
    cast, folder = AgentCast.made(), AgentRun(tmp_path)

    async def course(run: TrainingRun) -> None:
        await cast.gateways[1].busy.wait()
        cast.gateways[1].die()

    folder.run(cast, course)
    check_books(folder, folder.steps)
    repeated = sum(point.get("rollout/repeated_groups", 0) for point in folder.points())
    played = Counter(request.group_id for gateway in cast.gateways for request in gateway.played)
    again = [group for group in folder.groups(Phase.RETIRED) if group.attempt > 1]
    assert len(again) <= repeated and all(played[group.group_id] == group.attempt for group in again)
    assert again and all(group.replica == "gateway-0" for group in again)
    assert [loss.name for loss in folder.losses] == ["gateway-1"]


def test_gateways_are_told_of_rollouts_that_are_lost(tmp_path: Path) -> None:
    cast, folder = AgentCast.made(), AgentRun(tmp_path)

    async def course(run: TrainingRun) -> None:
        await cast.gateways[1].busy.wait()
        cast.rollouts[0].die()

    folder.run(cast, course)
    assert all(gateway.told[-1] == ("rollout-1",) for gateway in cast.gateways)


def test_a_gateway_that_does_not_take_the_news_is_lost(tmp_path: Path) -> None:
    cast, folder = AgentCast.made(), AgentRun(tmp_path)

    async def refuse(*_: Any) -> None:
        cast.gateways[1].die("said nothing")

    cast.gateways[1].use_peers = refuse  # type: ignore[method-assign]
    folder.run(cast)
    assert [loss.name for loss in folder.losses] == ["gateway-1"] and not cast.gateways[1].played


IDLE = {
    **dict.fromkeys((*COUNTED, "preemptions_total"), 0.0),
    "slots": 2,
    "running": 0,
    "waiting": 0,
    "kv_use": 0.0,
    "kv_shared": 1.0,
}
FIRST_LIMIT = 2 * 4 // 2 + 1  # groups of two, for two rollouts of two slots


class Measured:
    """Rollouts and gateways that tell of themselves; `preempted`: sequences of each rollout, from look to look. With `holds` no
    group ends before more are under way than the first limit admits."""

    def __init__(self, cast: AgentCast, preempted: float = 0.0, holds: bool = False):
        self._grow = {"calls_total": 100.0, "preemptions_total": preempted}
        self._looks = Counter[str]()
        self._under_way, self._more = 0, asyncio.Event()
        if not holds:
            self._more.set()
        for rollout in cast.rollouts:
            rollout.status = partial(self._status, rollout.name, IDLE)  # type: ignore[method-assign]
        for gateway in cast.gateways:
            told = {**GAUGES, "episodes": 4, "waiting": 0}
            gateway.status = partial(self._status, gateway.name, told)  # type: ignore[method-assign]
            gateway.play = partial(self._play, gateway.play)  # type: ignore[method-assign]

    async def _status(self, name: str, gauges: dict[str, float]) -> Status:
        self._looks[name] += 1
        counters = {counter: self._looks[name] * more for counter, more in self._grow.items() if counter in gauges}
        return Status(role=name.partition("-")[0], name=name, gauges={**gauges, **counters})

    async def _play(self, play: Any, request: PlayRequest) -> GeneratedGroup:
        self._under_way += 1
        if self._under_way > FIRST_LIMIT:
            self._more.set()
        await self._more.wait()
        try:
            return await play(request)
        finally:
            self._under_way -= 1


def test_more_groups_are_played_at_once_while_rollouts_are_idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cast, folder = AgentCast.made(), AgentRun(tmp_path, staleness=12)
    monkeypatch.setattr("runtime.timeouts.STATUS_INTERVAL", 0.0)
    Measured(cast, holds=True)
    folder.run(cast)  # which no group's end lets go on before
    check_books(folder, folder.steps)
    assert max(point["queue/limit"] for point in folder.points()) >= 2 * FIRST_LIMIT - 1


def test_fewer_groups_are_played_at_once_while_sequences_are_preempted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cast, folder = AgentCast.made(), AgentRun(tmp_path, staleness=12)
    monkeypatch.setattr("runtime.timeouts.STATUS_INTERVAL", 0.0)
    Measured(cast, preempted=1.0)
    folder.run(cast)
    check_books(folder, folder.steps)
    points = folder.points()
    assert points[-1]["queue/limit"] == 1
    assert sum(point["rollout/preemptions"] for point in points) > 0
