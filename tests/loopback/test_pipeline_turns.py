"""Whole runs over roles in memory that share devices, and say who has them; and over gateways."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from msgspec.structs import replace

from runtime import config, types
from runtime.commands import Level, PeerAddress, WeightsCommitted
from runtime.config import Config, Gateway
from runtime.coordinator.metrics_recorder import COUNTED
from runtime.coordinator.register import Register
from runtime.coordinator.run import TrainingRun
from runtime.errors import ServiceFault
from runtime.ledger.states import Phase
from runtime.status import Status
from runtime.types import (
    GeneratedGroup,
    GroupPayload,
    GroupRequest,
    LogprobRequest,
    PolicyVersion,
    RunEpisodesRequest,
    Sample,
    ValueRequest,
)
from tests.loopback.losable import ASKED
from tests.loopback.pipeline_fakes import (
    Cast,
    FakeCritic,
    FakeModel,
    FakeReference,
    FakeReplica,
    FakeRollout,
    FakeTrainer,
    LongTail,
    RunFolder,
    around,
    check_books,
    until,
)
from tests.loopback.test_pipeline import SomeSignal, evaluations

T = TypeVar("T")
ROLLOUTS = "the rollouts"


class Devices:
    """Who has them now; nobody may take them from another."""

    def __init__(self) -> None:
        self.having: Counter[str] = Counter()
        self.changes: list[str] = []  # whoever took them when another had them last

    def take(self, who: str) -> None:
        self.having[who] += 1
        assert set(+self.having) == {who}, self.having
        if not self.changes or self.changes[-1] != who:
            self.changes.append(who)

    def leave(self, who: str) -> None:
        self.having[who] -= 1


class Lent(FakeModel):
    """Is at hand between `onload` and `offload`; what is asked of it otherwise brings it back. But it has a copy of the weights
    that it sent last, to send them again."""

    devices: Devices

    def _post(self, name: str, step: int, work: Callable[[], Awaitable[T]]) -> Coroutine[Any, Any, T]:
        async def at_hand() -> T:
            here = self.devices.having[self.name] > 0
            if name == "offload" and here:
                self.devices.leave(self.name)
            elif name != "offload" and (name, step) not in self.done and not here:
                self.devices.take(self.name)
            return await work()

        return super()._post(name, step, at_hand)


class LentTrainer(Lent, FakeTrainer):
    """The policy."""


class LentCritic(Lent, FakeCritic):
    """Computes values without its optimizer's state."""

    async def values(self, request: ValueRequest) -> bytes:
        self.asked.append(request)
        return b"values of " + request.payload


class LentReference(FakeReference):
    devices: Devices

    async def onload(self) -> None:
        await super().onload()
        self.devices.take(self.name)

    async def offload(self) -> None:
        await super().offload()
        self.devices.leave(self.name)

    async def logprobs(self, request: LogprobRequest) -> bytes:
        assert self.devices.having[self.name]
        return await super().logprobs(request)


class Sleeper(FakeRollout):
    """Starts asleep. Dies as it is told to come to `dies_at`, or asked for a group when that is "generate"."""

    devices: Devices
    level = Level.ASLEEP
    dies_at: Level | str | None = None

    async def set_level(self, level: Level, keeps: bool = False) -> None:
        if level == self.dies_at:
            self.kill()
        await self.reached(asyncio.sleep(self._seconds()))
        if (level == Level.AWAKE) != (self.level == Level.AWAKE):
            (self.devices.take if level == Level.AWAKE else self.devices.leave)(ROLLOUTS)
        self.level = level

    def kill(self) -> None:
        if self.level == Level.AWAKE:
            self.devices.leave(ROLLOUTS)
        self.level = Level.ASLEEP
        self.die("was killed")

    async def generate(self, request: GroupRequest) -> GeneratedGroup:
        assert self.gone or self.level == Level.AWAKE
        if self.dies_at == "generate":
            self.kill()
        return await super().generate(request)

    async def commit_weights(self, version: PolicyVersion, epoch: int) -> WeightsCommitted:
        assert self.level >= Level.WEIGHTS
        return await super().commit_weights(version, epoch)


def colocated(path: Path, *others: str, sections: dict[str, Any] | None = None, **settings: Any) -> RunFolder:
    services = config.Services(
        rollout=config.Rollout(replicas=2, max_num_seqs=8, colocate="trainer"),
        reference=config.ReferenceScorer(colocate="trainer" if "reference" in others else ""),
        trainer=config.Trainer(offload=["optimizer"]),
        critic=config.Trainer(colocate="trainer" if "critic" in others else ""),
    )
    return RunFolder(path, sections={"services": services, **(sections or {})}, **settings)


def cast_of(seed: int = 0) -> Cast:
    cast, devices = Cast.make(seed), Devices()
    cast.trainer = LentTrainer(cast.weights, LongTail(seed + 1, 0.001, 0.01))
    cast.rollouts = [Sleeper(f"rollout-{i}", cast.weights, LongTail(seed + 10 + i)) for i in range(2)]
    for one in (cast.trainer, *cast.rollouts):
        one.devices = devices  # type: ignore[attr-defined]
    return cast


def newcomer(cast: Cast, name: str) -> Sleeper:
    rollout = Sleeper(name, cast.weights, incarnation=1)
    rollout.devices = cast.trainer.devices  # type: ignore[attr-defined]
    return rollout


def published(cast: Cast) -> list[int]:
    return [step for name, step in cast.trainer.posted if name == "send_weights"]


@pytest.mark.parametrize(("staleness", "seed"), [(0, 0), (1, 1)])
def test_a_turn_makes_as_many_steps_as_the_bound_admits_batches(tmp_path: Path, staleness: int, seed: int) -> None:
    folder, cast = colocated(tmp_path, steps=12, staleness=staleness), cast_of(seed)
    assert folder.run(cast).groups == {"retired": 48, "dropped": 0}
    check_books(folder, 12)
    assert published(cast) == list(range(0, 13, 1 + staleness))
    born = cast.generated_by()
    ages = {step - born[group.group_id].step for step, batch in cast.trainer.batches.items() for group in batch}
    assert ages == set(range(staleness + 1))
    for rollout in cast.rollouts:
        assert not any(name == "abort" for name, _ in rollout.calls)
    for step, point in enumerate(folder.points()):
        ends = step % (staleness + 1) == staleness
        assert ("timing/weight_sync" in point, "weight_sync/seconds" in point) == (ends, ends)
    assert "timing/onload" in folder.points()[-1 - staleness]
    probed = {step: probes for step, probes in cast.trainer.probed.items() if probes}  # only what the rollouts had
    assert probed == {step: [step, step] for step in published(cast)[:-1]}


def test_checkpoints_are_made_in_the_trainers_turn_and_a_run_goes_on_from_one(tmp_path: Path) -> None:
    folder, cast = colocated(tmp_path, steps=7, staleness=1, sections={"checkpoint": config.Checkpoint(every=3)}), cast_of()
    folder.run(cast)
    again = cast_of(50)
    folder.steps = 9
    folder.run(again, resume=str(folder.checkpoint(6)))
    assert published(again)[0] == 6
    assert folder.trained_problems() == folder.first_prompts(36)


def test_an_evaluation_has_the_rollouts_turn_and_one_version(tmp_path: Path) -> None:
    settings = config.Evaluation(every=3, max_new_tokens=8)
    folder = colocated(tmp_path, steps=7, staleness=1, eval_problems=9, sections={"evaluation": settings})
    cast = cast_of()
    folder.run(cast)
    assert evaluations(folder).keys() == {0, 3, 6, 7}
    for step, point in evaluations(folder).items():
        assert (point["eval/version_oldest"], point["eval/version_newest"]) == (step, step)
        assert point["eval/skipped"] == 0


@pytest.mark.parametrize("refers", [False, True])
def test_groups_without_signal_are_replaced_in_the_same_turn(tmp_path: Path, refers: bool) -> None:
    """A reference on the same devices waits for no more than the scores that may drop groups."""
    sections = {"algorithm": config.Algorithm(kl_coefficient=0.1, dynamic_sampling=True)}
    folder = colocated(tmp_path, *["reference"] * refers, steps=4, staleness=1, sections=sections)
    cast = cast_of()
    cast.reward = SomeSignal(LongTail(2))
    if refers:
        cast.reference = LentReference(LongTail(3))
        cast.reference.devices = cast.trainer.devices  # type: ignore[attr-defined]
    assert folder.run(cast).groups["retired"] == 16
    assert published(cast) == [0, 2, 4]


def test_the_reference_has_a_turn_between_generation_and_training(tmp_path: Path) -> None:
    folder, cast = colocated(tmp_path, "reference", steps=3, staleness=0), cast_of()
    cast.reference = LentReference(LongTail(3))
    devices = cast.reference.devices = cast.trainer.devices  # type: ignore[attr-defined]
    folder.run(cast)
    one_turn = [ROLLOUTS, "reference-0", "trainer-0"]
    assert devices.changes == ["trainer-0", *one_turn * 3, ROLLOUTS, "trainer-0"]  # first and last: to publish, and to save
    assert all({"timing/ref_onload", "timing/ref_offload"} <= point.keys() for point in folder.points())


@pytest.mark.parametrize("staleness", [0, 1])
def test_the_critic_updates_while_the_trainer_is_off_the_devices(tmp_path: Path, staleness: int) -> None:
    sections = {"critic": config.Critic(), "checkpoint": config.Checkpoint(every=2)}
    folder, cast = colocated(tmp_path, "critic", steps=4, staleness=staleness, sections=sections), cast_of()
    cast.critic = LentCritic(LongTail(7, 0.001, 0.01))
    devices = cast.critic.devices = cast.trainer.devices  # type: ignore[attr-defined]
    folder.run(cast)
    check_books(folder, 4)
    assert cast.critic.batches == cast.trainer.batches
    alternating = [who for who in devices.changes if who != ROLLOUTS]
    assert alternating.count("critic-0") >= 4
    assert {point["critic/loss"] for point in folder.points()} == {0.25}


def test_trainer_and_critic_alternate_beside_rollouts_of_their_own(tmp_path: Path) -> None:
    folder = colocated(tmp_path, "critic", steps=6, sections={"critic": config.Critic()})
    services = config.Services(
        rollout=config.Rollout(replicas=2, max_num_seqs=16),
        trainer=config.Trainer(offload=["optimizer"]),
        critic=config.Trainer(colocate="trainer"),
    )
    folder.sections["services"] = services
    cast = cast_of()
    cast.rollouts = [FakeRollout(f"rollout-{i}", cast.weights, LongTail(10 + i)) for i in range(2)]
    cast.critic = LentCritic(LongTail(7, 0.001, 0.01))
    cast.critic.devices = cast.trainer.devices  # type: ignore[attr-defined]
    folder.run(cast)
    check_books(folder, 6)
    assert published(cast) == list(range(7))


# ---------------------------------------------------------------------------------------------- losses
@pytest.mark.parametrize(
    ("when", "staleness", "comes"),
    [
        ("generate", 0, True),
        (Level.ASLEEP, 1, False),
        (Level.WEIGHTS, 0, False),
        (Level.AWAKE, 1, True),
        ("generate", 1, False),
    ],
)
def test_a_rollout_lost_in_any_phase_holds_up_nobody(tmp_path: Path, when: Level | str, staleness: int, comes: bool) -> None:
    folder, cast = colocated(tmp_path, steps=8, staleness=staleness), cast_of()
    mortal, late = cast.rollouts[0], newcomer(cast, "rollout-0")
    assert isinstance(mortal, Sleeper)

    async def course(run: TrainingRun) -> None:
        await until(lambda: bool(run.buffer.committed))
        mortal.dies_at = when
        await until(lambda: bool(mortal.gone))
        if comes:
            run.pool.register.add("rollout", late)

    folder.run(cast, course)
    check_books(folder, 8)
    assert sum(point["rollout/lost"] for point in folder.points()) == 1
    assert bool(late.calls) == comes
    if comes:
        assert folder.points()[-1]["rollout/serving"] == 2


def test_a_rollout_that_cannot_take_its_memory_is_lost_and_told(tmp_path: Path) -> None:
    async def crowded(level: Level, keeps: bool = False) -> None:
        if level == Level.AWAKE:
            raise ServiceFault("rollout-0", "wake", "out of memory")

    folder, cast = colocated(tmp_path, steps=2, staleness=0), cast_of()
    around(cast.rollouts[0], "set_level", crowded)
    folder.run(cast)
    assert cast.rollouts[0].gone == "rollout-0: wake: out of memory"
    assert {group.phase for group in folder.groups()} == {Phase.RETIRED}


def test_a_trainer_that_does_not_come_back_to_the_devices_ends_the_run(tmp_path: Path) -> None:
    folder, cast = colocated(tmp_path, steps=4, staleness=0), cast_of()

    async def fail() -> None:
        if cast.trainer.batches:
            raise ServiceFault("trainer-0", "Onload", "out of memory")

    around(cast.trainer, "onload", fail)
    fault = folder.fails(cast)
    assert (fault.service, fault.phase) == ("trainer-0", "Onload")


# ---------------------------------------------------------------------------------------------- partial rollouts
class Napper(Sleeper):
    """What it generates as it goes to sleep goes on once it is awake."""

    def __init__(self, *args: Any, **more: Any):
        super().__init__(*args, **more)
        self.awake = asyncio.Event()
        self.slept_through = 0

    async def set_level(self, level: Level, keeps: bool = False) -> None:
        assert keeps
        await super().set_level(level, keeps)
        (self.awake.set if level == Level.AWAKE else self.awake.clear)()

    async def generate(self, request: GroupRequest) -> GeneratedGroup:
        await self.awake.wait()  # it was sent as the turn ended
        answer = await super().generate(request)
        self.slept_through += not self.awake.is_set()
        await self.awake.wait()
        return answer


def test_replies_that_are_not_done_go_on_in_the_next_turn(tmp_path: Path) -> None:
    staleness = 3
    training = config.Training(steps=16, staleness=staleness, groups_per_step=4, partial_rollouts=True)
    folder, cast = colocated(tmp_path, steps=16, staleness=staleness, sections={"training": training}), cast_of()
    cast.rollouts = [Napper(f"rollout-{i}", cast.weights, LongTail(10 + i)) for i in range(2)]
    for one in cast.rollouts:
        one.devices = cast.trainer.devices  # type: ignore[attr-defined]
    assert folder.run(cast).groups["retired"] == 64
    check_books(folder, 16)
    assert sum(one.slept_through for one in cast.rollouts) > 0  # type: ignore[attr-defined]
    assert len(published(cast)) > 16 / (staleness + 1) + 1, "a turn ends with the batch of a step"
    for rollout in cast.rollouts:
        assert not any(name == "abort" for name, _ in rollout.calls)


# --------------------------------------------------------------------------------------------------------------------- gateways
ASKED[RunEpisodesRequest] = "play"
GAUGES = dict.fromkeys(
    ("episodes_total", "calls_total", "forks_total", "overridden_total", "malformed_calls_total", "loop_lag_p99"), 0.0
)


class FakeGateway(FakeReplica):
    """Has each group played in two turns, the first by the version that the rollouts have as it is begun."""

    def __init__(self, name: str, cast: Cast, seconds: LongTail, incarnation: int = 0):
        super().__init__(incarnation)
        self.name = name
        self.played: list[RunEpisodesRequest] = []
        self.told: list[tuple[str, ...]] = []
        self.hurried: list[int] = []
        self.busy = asyncio.Event()  # it has had a few played, and has another
        self.hangs: asyncio.Event | None = None  # until then the next one is not over
        self.played_late: int | None = None  # the group that hangs
        self._cast, self._seconds = cast, seconds

    async def update_endpoints(
        self, rollouts: tuple[PeerAddress, ...], environments: tuple[PeerAddress, ...], key: str
    ) -> None:
        self.told.append(tuple(rollout.name for rollout in rollouts))

    async def finish_group(self, group_id: int) -> None:
        self.hurried.append(group_id)
        if self.hangs is not None and self.played_late == group_id:
            self.hangs.set()

    async def play(self, request: RunEpisodesRequest) -> GeneratedGroup:
        return await self.reached(self._play(request))

    async def _play(self, request: RunEpisodesRequest) -> GeneratedGroup:
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
        mask, logprobs = np.array([1, 0, 0, 1, 1], np.uint8), np.array([-1, 0, 0, -1, -1], np.float32)
        sample = Sample(tokens=tokens, loss_mask=mask, logprobs=logprobs, versions=versions, finish_reason="stop")
        payload = GroupPayload.of(request.group_id, np.zeros(2, np.int32), [sample] * 2 * request.n, [2] * request.n)
        told = {"group_id": request.group_id, "oldest": oldest, "newest": newest, "payload": types.encode(payload)}
        return GeneratedGroup(prompt_tokens=2, response_tokens=payload.lengths.tolist(), truncated=0, **told)

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
        services = replace(
            base.services, gateway=config.Gateways(replicas=2), rollout=config.Rollout(replicas=2, max_num_seqs=2)
        )
        return replace(base, gateway=Gateway(), services=services)


@pytest.mark.parametrize("staleness", [0, 2])
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


def test_gateways_are_told_of_rollouts_that_are_lost_and_one_that_does_not_take_the_news_is_lost(tmp_path: Path) -> None:
    cast, folder = AgentCast.made(), AgentRun(tmp_path)

    async def refuse(*_: Any) -> None:
        cast.gateways[1].die("said nothing")

    async def course(run: TrainingRun) -> None:
        await cast.gateways[0].busy.wait()
        cast.rollouts[0].die()

    around(cast.gateways[1], "update_endpoints", refuse)
    folder.run(cast, course)
    assert cast.gateways[0].told[-1] == ("rollout-1",)
    assert [loss.name for loss in folder.losses] == ["gateway-1", "rollout-0"] and not cast.gateways[1].played


IDLE = dict.fromkeys((*COUNTED, "preemptions_total", "running", "waiting", "kv_use"), 0.0) | {"slots": 2, "kv_shared": 1.0}
FIRST_LIMIT = 2 * 4 // 2 + 1  # groups of two, for two rollouts of two slots


class Measured:
    """Rollouts and gateways that tell of themselves. No group ends before more are under way than the first limit admits."""

    def __init__(self, cast: AgentCast):
        self._looks = Counter[str]()
        self._under_way, self._more = 0, asyncio.Event()
        for rollout in cast.rollouts:
            rollout.status = partial(self._status, rollout.name, IDLE)  # type: ignore[method-assign]
        for gateway in cast.gateways:
            told = {**GAUGES, "episodes": 4, "waiting": 0}
            gateway.status = partial(self._status, gateway.name, told)  # type: ignore[method-assign]
            gateway.play = partial(self._play, gateway.play)  # type: ignore[method-assign]

    async def _status(self, name: str, gauges: dict[str, float]) -> Status:
        self._looks[name] += 1
        calls = {"calls_total": 100.0 * self._looks[name]} if "calls_total" in gauges else {}
        return Status(role=name.partition("-")[0], name=name, gauges={**gauges, **calls})

    async def _play(self, play: Any, request: RunEpisodesRequest) -> GeneratedGroup:
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
    Measured(cast)
    folder.run(cast)  # which no group's end lets go on before
    check_books(folder, folder.steps)
    assert max(point["queue/limit"] for point in folder.points()) >= 2 * FIRST_LIMIT - 1
