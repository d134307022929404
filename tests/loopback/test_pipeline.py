"""Whole runs of the pipeline's real logic over roles in memory: order, staleness, ends, resumes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from runtime import config
from runtime.coordinator.attempt import WHY_ENDED
from runtime.coordinator.run import TrainingRun
from runtime.ledger import checkpoint
from runtime.ledger.states import Phase
from runtime.types import GeneratedGroup, GroupRequest, StepResult
from tests.loopback.model_fakes import checkpoint_step
from tests.loopback.pipeline_checks import check_books, check_order
from tests.loopback.pipeline_fakes import (
    Cast,
    FakeRollout,
    FakeTrainer,
    LongTail,
    RunFolder,
)


@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_run_with_long_tails_keeps_its_bound_and_loses_nothing(tmp_path: Path, staleness: int, seed: int) -> None:
    folder, cast = RunFolder(tmp_path, steps=25, staleness=staleness), Cast.make(seed)
    summary = folder.run(cast)
    assert summary.steps == 25
    assert summary.groups == {"retired": 100, "dropped": 0}
    check_books(folder, 25)
    check_order(cast.trainer, 0, 25)
    # What the trainer was given is what the ledger says it trained on, and each group once.
    given = {step: sorted(group.group_id for group in batch) for step, batch in cast.trainer.batches.items()}
    rows = folder.groups(Phase.RETIRED)
    assert given == {step: sorted(group.group_id for group in rows if group.step == step) for step in range(25)}
    born = cast.generated_by()
    ages = Counter(step - born[group].step for step, batch in given.items() for group in batch)
    assert min(ages) >= 0
    assert max(ages) <= staleness
    if staleness >= 2:
        assert max(ages) >= 1
    assert summary.staleness_histogram == {age: 2 * number for age, number in sorted(ages.items())}  # two samples a group
    assert folder.trained_problems() == folder.first_prompts(100)


def test_rewards_and_reference_of_a_group_reach_the_trainer_with_it(tmp_path: Path) -> None:
    cast = Cast.make()
    RunFolder(tmp_path, steps=3).run(cast)
    for batch in cast.trainer.batches.values():
        for group in batch:
            assert group.payload == b"payload %d" % group.group_id
            assert group.reference == b"reference payload %d" % group.group_id
            assert group.rewards.tolist() == [1.0, 1.0]
            assert group.tokens == 2 * 3 + sum(1 + (group.group_id + i) % 7 for i in range(2))


class GatedRollout(FakeRollout):
    """Group i waits for `gates[i]`, where there is one."""

    gates: dict[int, asyncio.Event]

    async def generate(self, request: GroupRequest) -> GeneratedGroup:
        result = await super().generate(request)
        if request.group_id in self.gates:
            await self.gates[request.group_id].wait()
            result.newest = self.version
        return result


def gated(cast: Cast, gates: dict[int, asyncio.Event]) -> Cast:
    cast.rollouts = [GatedRollout(rollout.name, cast.weights) for rollout in cast.rollouts]
    for rollout in cast.rollouts:
        rollout.gates = gates  # type: ignore[attr-defined]
    return cast


class NotingTrainer(FakeTrainer):
    """Sets `events[command]` once a command is posted."""

    events: dict[tuple[str, int], asyncio.Event]

    def _post(self, name: str, step: int, work: Any) -> Any:
        answer = super()._post(name, step, work)
        if (name, step) in self.events:
            self.events[name, step].set()
        return answer


def test_without_staleness_a_step_is_accumulated_while_its_other_groups_are_generated(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, steps=2, staleness=0)

    async def course(run: TrainingRun) -> None:
        await begun.wait()  # a part of step 0 was sent although group 3 is still being generated
        gate.set()

    begun, gate = asyncio.Event(), asyncio.Event()
    cast = gated(Cast.make(), {3: gate})
    cast.trainer = NotingTrainer(cast.weights)
    cast.trainer.events = {("accumulate", 0): begun}
    folder.run(cast, course)
    assert cast.trainer.posted.count(("accumulate", 0)) >= 2
    check_order(cast.trainer, 0, 2)
    check_books(folder, 2)


class PatientTrainer(NotingTrainer):
    """Applies a step once the groups of the next, if there is such an event, have come."""

    async def applied(self, step: int) -> StepResult:
        if ("accumulate", step + 1) in self.events:
            await self.events["accumulate", step + 1].wait()  # the run's own deadline ends it
        return await super().applied(step)


def test_the_trainer_holds_one_batch_ahead_and_no_more(tmp_path: Path) -> None:
    cast = Cast.prompt()
    cast.trainer = PatientTrainer(cast.weights, lambda: 0.02)
    cast.trainer.events = {("accumulate", step): asyncio.Event() for step in (3, 4, 5, 6)}
    RunFolder(tmp_path, steps=8, staleness=2).run(cast)
    posts = list(zip(cast.trainer.posted, cast.trainer.done_when_posted, strict=True))
    ahead = [step for (name, step), done in posts if name == "accumulate" and ("apply", step - 1) not in done]
    assert {3, 4, 5, 6} <= set(ahead)
    for (name, step), done in posts:
        if step >= 2 and name in ("begin", "accumulate", "apply"):
            assert ("apply", step - 2) in done


# ---------------------------------------------------------------------------------------------- stopping and resuming


class StoppingTrainer(FakeTrainer):
    """Stops the run while it applies step `at`."""

    at: int
    run: TrainingRun

    async def applied(self, step: int) -> StepResult:
        if step == self.at:
            self.run.stop("interrupted")
        return await super().applied(step)


def stopping(cast: Cast, at: int) -> tuple[Cast, Any]:
    cast.trainer = StoppingTrainer(cast.weights, LongTail(1, 0.001, 0.01))
    cast.trainer.at = at

    async def course(run: TrainingRun) -> None:
        cast.trainer.run = run  # type: ignore[attr-defined]

    return cast, course


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_stopped_run_drops_what_is_left_with_a_reason(tmp_path: Path, staleness: int) -> None:
    folder = RunFolder(tmp_path, steps=40, staleness=staleness)
    cast, course = stopping(Cast.make(), 6)
    summary = folder.run(cast, course)
    assert summary.stop_reason == "interrupted"
    assert 7 <= summary.steps <= 9  # the step that was under way, and one that was complete behind it
    check_books(folder, summary.steps)
    check_order(cast.trainer, 0, summary.steps)
    dropped = folder.groups(Phase.DROPPED)
    assert folder.dropped() == ({WHY_ENDED: len(dropped)} if dropped else {})
    assert all(group.taken is None for group in dropped)
    # The checkpoint of the end says what was trained, and that the prompts of the others come next.
    position = folder.position(summary.steps)
    assert position.version.step == summary.steps
    assert position.stream.returned == [group.problem for group in dropped]
    trained = {group for low, high in position.trained for group in range(low, high + 1)}
    assert trained == {group.group_id for group in folder.groups(Phase.RETIRED)}
    assert cast.trainer.done[-1][0] == "export"


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_resumed_run_trains_the_prompts_of_one_without_interruption(tmp_path: Path, staleness: int) -> None:
    folder = RunFolder(tmp_path, steps=20, staleness=staleness)
    cast, course = stopping(Cast.make(), 6)
    steps = folder.run(cast, course).steps
    again = Cast.make(seed=50)
    summary = folder.run(again, resume=str(folder.checkpoint(steps)))
    assert summary.steps == 20 - steps
    check_books(folder, 20)
    check_order(again.trainer, steps, 20)
    assert folder.trained_problems() == folder.first_prompts(80)
    assert [point["step"] for point in folder.points()] == list(range(1, 21))
    first, second = folder.position(steps).version, folder.position(20).version
    assert second.incarnation > first.incarnation  # a version is never named twice
    assert all(version.incarnation == second.incarnation for version in again.generated_by().values())


def test_a_stop_gives_up_a_batch_that_is_filled_in_part(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, steps=5, staleness=0)
    sent, gate = asyncio.Event(), asyncio.Event()
    cast = gated(Cast.make(), {11: gate})  # the last group of step 2
    cast.trainer = NotingTrainer(cast.weights)
    cast.trainer.events = {("accumulate", 2): sent}

    async def course(run: TrainingRun) -> None:
        await sent.wait()
        run.stop("interrupted")

    summary = folder.run(cast, course)
    assert summary.steps == 2
    check_books(folder, 2)
    assert folder.dropped() == {WHY_ENDED: 4}
    assert [group.group_id for group in folder.groups(Phase.DROPPED)] == [8, 9, 10, 11]
    assert all(group.taken is None and group.place is None for group in folder.groups(Phase.DROPPED))
    again = Cast.make(seed=50)
    folder.run(again, resume=str(folder.checkpoint(2)))
    check_books(folder, 5)
    check_order(again.trainer, 2, 5)
    assert folder.trained_problems() == folder.first_prompts(20)


class SlowDisk(NotingTrainer):
    """Its checkpoints are written beside the commands after them; that of step i once `written[i]` is set."""

    written: dict[int, asyncio.Event]

    def save(self, folder: str, place: bytes, keep: tuple[int, ...]) -> Coroutine[Any, Any, list[str]]:
        return self._written(super().save(folder, place, keep), checkpoint_step(folder))

    async def _written(self, copied: Awaitable[list[str]], step: int) -> list[str]:
        parts = await copied
        if step in self.written:
            await self.written[step].wait()
        return parts


def test_steps_go_on_while_a_checkpoint_is_written_and_the_next_one_waits_for_it(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, steps=7, sections={"checkpoint": config.Checkpoint(every=2, keep=9)})
    cast, begun, applied, written = Cast.make(), asyncio.Event(), asyncio.Event(), asyncio.Event()
    cast.trainer = trainer = SlowDisk(cast.weights)
    # Step 3 makes the version that is to be saved next.
    trainer.events, trainer.written = {("accumulate", 3): begun, ("apply", 3): applied}, {2: written}

    async def course(run: TrainingRun) -> None:
        await begun.wait()
        while trainer.done[-1] != ("accumulate", 3):  # noqa: ASYNC110 - the run's own deadline ends it
            await asyncio.sleep(0.001)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(applied.wait(), 0.5)
        assert trainer.done[-1] == ("accumulate", 3)
        assert checkpoint.steps(folder.path) == []
        written.set()

    folder.run(cast, course)
    assert checkpoint.steps(folder.path) == [2, 4, 6, 7]
    check_order(trainer, 0, 7)
    check_books(folder, 7)
    assert any(point["timing/checkpoint"] > 0 for point in folder.points() if "timing/checkpoint" in point)


def test_a_run_that_goes_back_to_an_older_checkpoint_trains_the_same_groups_again(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, steps=8, sections={"checkpoint": config.Checkpoint(every=2, keep=9)})
    folder.run(Cast.make())
    before = {group.group_id: group.problem for group in folder.groups(Phase.RETIRED)}
    folder.run(Cast.make(seed=50), resume=str(folder.checkpoint(4)))
    check_books(folder, 8)
    assert {group.group_id: group.problem for group in folder.groups(Phase.RETIRED)} == before


def test_a_run_that_is_stopped_before_its_first_step_can_be_resumed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, steps=3)

    async def course(run: TrainingRun) -> None:
        run.stop("interrupted")

    summary = folder.run(Cast.make(), course)
    assert (summary.steps, summary.stop_reason) == (0, "interrupted")
    folder.run(Cast.make(), resume=str(folder.checkpoint(0)))
    check_books(folder, 3)


class Held(FakeRollout):
    """All wait until 22 groups are generating, by which time `asked` says how many each has."""

    asked: Counter[str]
    full: asyncio.Event

    async def generate(self, request: GroupRequest) -> GeneratedGroup:
        if not self.full.is_set() and request.purpose != "probe":
            self.asked[self.name] += 1
            if self.asked.total() == 22:
                self.full.set()
            await self.full.wait()
        return await super().generate(request)


def test_each_rollout_is_given_groups_by_its_own_slots(tmp_path: Path) -> None:
    """Twice 16 slots take 16 groups of two samples, and one more; twice 4 take 4 and one more."""
    cast = Cast.make()
    cast.rollouts = [Held(f"rollout-{i}", cast.weights) for i in range(2)]
    asked, full = Counter[str](), asyncio.Event()
    for rollout in cast.rollouts:
        rollout.asked, rollout.full = asked, full  # type: ignore[attr-defined]
    fleets = config.Services(rollout=[config.Rollout(slots=4), config.Rollout(slots=16)])
    training = config.Training(steps=20, staleness=20, groups_per_step=4, depth="bound")
    RunFolder(tmp_path, sections={"services": fleets, "training": training}).run(cast)
    assert asked == {"rollout-0": 5, "rollout-1": 17}
