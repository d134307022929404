"""Whole runs whose rollouts take turns with the trainer, over roles in memory that share devices, and say who has them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from runtime import config
from runtime.commands import Level, WeightsCommitted
from runtime.coordinator.devices import ColocatedDevices
from runtime.coordinator.run import TrainingRun
from runtime.errors import ServiceFault
from runtime.ledger.states import Phase
from runtime.types import GeneratedGroup, GroupRequest, LogprobRequest, PolicyVersion, ValueRequest
from tests.loopback.model_fakes import FakeCritic, FakeModel, FakeTrainer
from tests.loopback.pipeline_checks import check_books
from tests.loopback.pipeline_fakes import Cast, FakeReference, FakeRollout, LongTail, RunFolder
from tests.loopback.test_pipeline_dynamic_sampling import SomeSignal
from tests.loopback.test_pipeline_evaluation import evaluations

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

    async def move(self, level: Level, keeps: bool = False) -> None:
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
        rollout=config.Rollout(replicas=2, slots=8, colocate="trainer"),
        reference=config.ReferenceScorer(colocate="trainer" if "reference" in others else ""),
        trainer=config.Trainer(offload_train_optimizer=True),
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


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("staleness", [0, 1])
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
        assert ("timing/weight_sync" in point, "publication/seconds" in point) == (ends, ends)
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


@pytest.mark.parametrize("staleness", [0, 1])
def test_an_evaluation_has_the_rollouts_turn_and_one_version(tmp_path: Path, staleness: int) -> None:
    settings = config.Evaluation(every=3, max_new_tokens=8)
    folder = colocated(tmp_path, steps=7, staleness=staleness, eval_problems=9, sections={"evaluation": settings})
    cast = cast_of()
    folder.run(cast)
    assert evaluations(folder).keys() == {0, 3, 6, 7}
    for step, point in evaluations(folder).items():
        assert (point["eval/version_oldest"], point["eval/version_newest"]) == (step, step)
        assert point["eval/skipped"] == 0


def test_groups_without_signal_are_replaced_in_the_same_turn(tmp_path: Path) -> None:
    algorithm = config.Algorithm(kl_coefficient=0.1, dynamic_sampling=True)
    folder, cast = colocated(tmp_path, steps=4, staleness=1, sections={"algorithm": algorithm}), cast_of()
    cast.reward = SomeSignal(LongTail(2))
    assert folder.run(cast).groups["retired"] == 16
    assert published(cast) == [0, 2, 4]


def test_the_reference_waits_for_no_more_than_the_scores_that_may_drop_groups(tmp_path: Path) -> None:
    algorithm = config.Algorithm(kl_coefficient=0.1, dynamic_sampling=True)
    folder, cast = colocated(tmp_path, "reference", steps=4, staleness=1, sections={"algorithm": algorithm}), cast_of()
    cast.reward, cast.reference = SomeSignal(LongTail(2)), LentReference(LongTail(3))
    cast.reference.devices = cast.trainer.devices  # type: ignore[attr-defined]
    assert folder.run(cast).groups["retired"] == 16


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
        rollout=config.Rollout(replicas=2, slots=16),
        trainer=config.Trainer(offload_train_optimizer=True),
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


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("when", ["generate", Level.ASLEEP, Level.WEIGHTS, Level.AWAKE])
@pytest.mark.parametrize("comes", [True, False])
def test_a_rollout_that_is_lost_in_any_phase_holds_up_nobody(
    tmp_path: Path, staleness: int, when: Level | str, comes: bool
) -> None:
    folder, cast = colocated(tmp_path, steps=8, staleness=staleness), cast_of()
    mortal, late = cast.rollouts[0], newcomer(cast, "rollout-0")
    assert isinstance(mortal, Sleeper)

    async def course(run: TrainingRun) -> None:
        while not run.buffer.committed:  # noqa: ASYNC110 - the run's own deadline ends it
            await asyncio.sleep(0)
        mortal.dies_at = when
        while not mortal.gone:  # noqa: ASYNC110
            await asyncio.sleep(0)
        if comes:
            run.pool.register.add("rollout", late)

    folder.run(cast, course)
    check_books(folder, 8)
    assert sum(point["rollout/lost"] for point in folder.points()) == 1
    assert bool(late.calls) == comes
    if comes:
        assert folder.points()[-1]["rollout/serving"] == 2


@pytest.mark.parametrize("phase", ["generate", "train", "publish"])
def test_a_run_that_lost_all_rollouts_goes_on_with_one_that_comes(tmp_path: Path, phase: str) -> None:
    folder, cast = colocated(tmp_path, steps=6, staleness=1), cast_of()
    late = newcomer(cast, "rollout-1")

    async def course(run: TrainingRun) -> None:
        devices = run._attempt._devices
        assert isinstance(devices, ColocatedDevices)
        while not (run.buffer.committed and devices.phase == phase):  # noqa: ASYNC110
            await asyncio.sleep(0)
        for rollout in cast.rollouts:
            assert isinstance(rollout, Sleeper)
            rollout.kill()
        await asyncio.sleep(0)
        run.pool.register.add("rollout", late)

    folder.run(cast, course)
    check_books(folder, 6)
    assert late.generated_by


def test_a_rollout_that_cannot_take_its_memory_is_lost_and_told(tmp_path: Path) -> None:
    class Crowded(Sleeper):
        async def move(self, level: Level, keeps: bool = False) -> None:
            if level == Level.AWAKE:
                raise ServiceFault(self.name, "wake", "out of memory")
            await super().move(level, keeps)

    folder, cast = colocated(tmp_path, steps=2, staleness=0), cast_of()
    crowded = Crowded("rollout-0", cast.weights)
    crowded.devices = cast.trainer.devices  # type: ignore[attr-defined]
    cast.rollouts[0] = crowded
    folder.run(cast)
    assert crowded.gone == "rollout-0: wake: out of memory"
    assert {group.phase for group in folder.groups()} == {Phase.RETIRED}


def test_a_trainer_that_does_not_come_back_to_the_devices_ends_the_run(tmp_path: Path) -> None:
    class Broken(LentTrainer):
        def onload(self) -> Coroutine[Any, Any, None]:
            if self.batches:
                return self._post("onload", 0, self._fail)
            return super().onload()

        async def _fail(self) -> None:
            raise ServiceFault(self.name, "Onload", "out of memory")

    folder, cast = colocated(tmp_path, steps=4, staleness=0), cast_of()
    devices = cast.trainer.devices  # type: ignore[attr-defined]
    cast.trainer = Broken(cast.weights)
    cast.trainer.devices = devices
    fault = folder.fails(cast)
    assert (fault.service, fault.phase) == ("trainer-0", "Onload")


# ---------------------------------------------------------------------------------------------- partial rollouts


class Napper(Sleeper):
    """What it generates as it goes to sleep goes on once it is awake."""

    def __init__(self, *args: Any, **more: Any):
        super().__init__(*args, **more)
        self.awake = asyncio.Event()
        self.slept_through = 0

    async def move(self, level: Level, keeps: bool = False) -> None:
        assert keeps
        await super().move(level, keeps)
        (self.awake.set if level == Level.AWAKE else self.awake.clear)()

    async def generate(self, request: GroupRequest) -> GeneratedGroup:
        await self.awake.wait()  # it was sent as the turn ended
        answer = await super().generate(request)
        self.slept_through += not self.awake.is_set()
        await self.awake.wait()
        return answer


@pytest.mark.parametrize("staleness", [1, 3])
def test_replies_that_are_not_done_go_on_in_the_next_turn(tmp_path: Path, staleness: int) -> None:
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
