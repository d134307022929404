"""Runs over roles in memory whose trainer or critic is lost: others go on from the newest checkpoint, in the same run."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from runtime import config
from runtime.coordinator.attempt import INTERRUPTED
from runtime.coordinator.run import TrainingRun
from runtime.ledger import checkpoint
from runtime.ledger.position import Position
from runtime.ledger.reader import LedgerReader
from runtime.ledger.states import Phase
from runtime.types import GeneratedGroup, GroupRequest, PolicyVersion
from tests.loopback.model_fakes import FakeCritic, FakeModel, FakeTrainer
from tests.loopback.pipeline_fakes import DEADLINE, Cast, FakeRollout, LongTail, RunFolder

T = TypeVar("T")
Moment = tuple[str, int]

SAVED = {"checkpoint": config.Checkpoint(every=3)}
STEPS = 12


class Mortal(FakeModel):
    """Dies as the command `last` is posted."""

    last: Moment = ("", 0)

    def _post(self, name: str, step: int, work: Callable[[], Awaitable[T]]) -> Any:
        answer = super()._post(name, step, work)
        if (name, step) == self.last:
            self.die("was killed")
        return answer


class MortalTrainer(Mortal, FakeTrainer):
    pass


class MortalCritic(Mortal, FakeCritic):
    pass


class Troupe:
    """Every trainer and critic of a run, in the order of their incarnations; each dies at its moment, if it has one."""

    def __init__(self, cast: Cast, *lasts: Moment, critic: bool = False, critic_dies: bool = False):
        self.cast, self._lasts, self._critic_dies = cast, lasts, critic_dies
        self.trainers: list[MortalTrainer] = []
        self.critics: list[MortalCritic] = []
        self._critic = critic
        cast.trainer, cast.critic = self._next()
        cast.regroup = self.regroup

    def _next(self) -> tuple[FakeTrainer, FakeCritic | None]:
        number = len(self.trainers)
        last = self._lasts[number] if number < len(self._lasts) else ("", 0)
        trainer = MortalTrainer(self.cast.weights, LongTail(number, 0.001, 0.01), number)
        critic = MortalCritic(LongTail(number, 0.001, 0.01), number)
        (critic if self._critic_dies else trainer).last = last
        self.trainers.append(trainer)
        self.critics.append(critic)
        return trainer, critic if self._critic else None

    async def regroup(self) -> list[FakeTrainer | FakeCritic]:
        await asyncio.sleep(0)
        return [model for model in self._next() if model is not None]


def begins(model: Any) -> int:
    """The step at which it went on."""
    return int(model.restored.rpartition("-")[2] or 0)


def check_lineages(folder: RunFolder, models: list[Any], *begun: int) -> None:
    """`begun`: where the lineages after the first began.

    The books are whole, and no group was trained on twice by what came to be the policy, nor one too few.
    """
    assert [begins(model) for model in models] == [0, *begun]
    assert all(model.restored in ("", str(folder.checkpoint(begins(model)))) for model in models)
    lineage: dict[int, list[int]] = {}
    for model in models:
        lineage = {step: groups for step, groups in lineage.items() if step < begins(model)}
        lineage |= {step: [group.group_id for group in batch] for step, batch in model.batches.items()}
    trained = Counter(group for step in range(folder.steps) for group in lineage[step])
    assert set(trained.values()) == {1}
    assert lineage.keys() == set(range(folder.steps))
    final = {group.group_id: group for group in folder.groups()}
    assert {i: final[i].step for i in trained} == {i: step for step, groups in lineage.items() for i in groups}
    with LedgerReader(folder.path / "ledger") as reader:
        assert reader.check_final(folder.groups_per_step)["retired"] == folder.steps * folder.groups_per_step
    points = [point for point in folder.points() if "actor/grad_norm" in point]
    assert [point["step"] for point in points] == list(range(1, folder.steps + 1))


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize(
    ("last", "newest"),
    [
        (("begin", 9), {6, 9}),  # posted ahead: the checkpoint of step 9 may be complete, or be written
        (("accumulate", 9), {6, 9}),
        (("apply", 8), {6}),
        (("send_weights", 9), {6}),
        (("save", 9), {6}),
        (("save", STEPS), {9}),
        (("export", 0), {STEPS}),
    ],
)
def test_another_trainer_goes_on_from_the_newest_checkpoint(
    tmp_path: Path, last: Moment, newest: set[int], staleness: int
) -> None:
    folder, cast = RunFolder(tmp_path, steps=STEPS, staleness=staleness, sections=SAVED), Cast.make()
    troupe = Troupe(cast, last)
    rollouts = list(cast.rollouts)
    summary = folder.run(cast)
    step = begins(troupe.trainers[1])
    assert step in newest
    check_lineages(folder, troupe.trainers, step)
    assert folder.trained_problems() == folder.first_prompts(STEPS * folder.groups_per_step)
    assert (summary.steps, summary.stop_reason) == (STEPS, "all steps done")
    assert summary.staleness_max <= staleness
    assert troupe.trainers[1].posted[0] == ("send_weights", step)
    for rollout in rollouts:  # the same ones
        assert not rollout.gone
        assert rollout.version == PolicyVersion(1, STEPS)


def test_without_a_checkpoint_it_goes_back_to_the_beginning(tmp_path: Path) -> None:
    folder, cast = RunFolder(tmp_path, steps=6), Cast.make()
    troupe = Troupe(cast, ("apply", 3), ("apply", 5))
    summary = folder.run(cast)
    check_lineages(folder, troupe.trainers, 0, 0)
    assert summary.steps == 6
    assert cast.rollouts[0].version == PolicyVersion(2, 6)
    assert folder.trained_problems() == folder.first_prompts(6 * folder.groups_per_step)


@pytest.mark.parametrize("critic_dies", [False, True])
def test_trainer_and_critic_go_back_together(tmp_path: Path, critic_dies: bool) -> None:
    sections = SAVED | {"critic": config.Critic()}
    folder, cast = RunFolder(tmp_path, steps=STEPS, sections=sections), Cast.make()
    troupe = Troupe(cast, ("apply", 5), ("apply", 8), critic=True, critic_dies=critic_dies)
    folder.run(cast)
    for models in (troupe.trainers, troupe.critics):
        check_lineages(folder, models, 3, 6)
        assert all(isinstance(model, FakeModel) and model.gone for model in models[:-1])
    assert "goes back to a checkpoint with" in (troupe.trainers if critic_dies else troupe.critics)[0].gone


class Asked(FakeRollout):
    """Counts how often it was asked for each group."""

    asked: Counter[int]

    async def generate(self, request: GroupRequest) -> GeneratedGroup:
        self.asked[request.group_id] += request.purpose != "probe"
        return await super().generate(request)


def test_generation_goes_on_to_the_bound_while_the_trainer_is_away(tmp_path: Path) -> None:
    folder, cast = RunFolder(tmp_path, steps=STEPS, sections=SAVED), Cast.make()
    cast.rollouts = [Asked(f"rollout-{i}", cast.weights, LongTail(i)) for i in range(2)]
    asked = Counter[int]()
    for rollout in cast.rollouts:
        rollout.asked = asked  # type: ignore[attr-defined]
    troupe = Troupe(cast, ("apply", 5))
    made, runs = list[dict[str, int]](), list[TrainingRun]()

    async def regroup() -> list[FakeTrainer | FakeCritic]:
        (run,) = runs
        while run.buffer.counts()["ready"] < 3 * folder.groups_per_step:  # noqa: ASYNC110 - the run's own deadline ends it
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)  # it might go beyond
        made.append(run.buffer.counts())
        return await troupe.regroup()

    async def course(run: TrainingRun) -> None:
        runs.append(run)

    cast.regroup = regroup
    folder.run(cast, course)
    check_lineages(folder, troupe.trainers, 3)
    assert made[0]["generating"] == made[0]["generated"] == made[0]["admitted"] == 0
    assert max(asked.values()) == 1  # what was made meanwhile was kept
    assert any(progress.phase == "recovering" and "was killed" in progress.detail for progress in folder.progress)


class Slow(FakeRollout):
    """What version 0.5 is to generate is under way for ever."""

    async def _generate(self, request: GroupRequest) -> GeneratedGroup:
        if self.version == PolicyVersion(0, 5):
            await asyncio.Event().wait()
        return await super()._generate(request)


def test_a_group_that_is_being_generated_is_generated_by_the_next_lineage(tmp_path: Path) -> None:
    folder, cast = RunFolder(tmp_path, steps=STEPS, sections=SAVED), Cast.prompt()
    cast.rollouts = [Slow(f"rollout-{i}", cast.weights) for i in range(2)]
    troupe = Troupe(cast, ("apply", 5))
    folder.run(cast)
    check_lineages(folder, troupe.trainers, 3)
    assert any(group.attempt > 1 for group in folder.groups(Phase.RETIRED))
    for group in folder.groups(Phase.RETIRED):  # none has tokens of both
        assert group.oldest is not None and group.newest is not None
        assert group.oldest.incarnation == group.newest.incarnation


def test_one_that_dies_before_it_has_published_is_followed_by_another(tmp_path: Path) -> None:
    folder, cast = RunFolder(tmp_path, steps=STEPS, sections=SAVED), Cast.make()
    troupe = Troupe(cast, ("apply", 8), ("send_weights", 6), ("send_weights", 6))
    folder.run(cast)
    check_lineages(folder, troupe.trainers, 6, 6, 6)


def test_a_run_that_gets_no_further_ends(tmp_path: Path) -> None:
    folder, cast = RunFolder(tmp_path, steps=STEPS, sections=SAVED), Cast.make()
    troupe = Troupe(cast, *[("apply", 8)] * 100)
    fault = folder.fails(cast)
    attempts = config.Restarts().attempts
    assert len(troupe.trainers) == attempts + 2  # the first, and those after which nothing was new
    assert (fault.service, fault.phase) == ("trainer-0", "run")
    assert fault.reason == f"was killed; {attempts + 1} times in a row before any step after 8"


def test_before_the_first_publication_a_loss_ends_the_run(tmp_path: Path) -> None:
    cast = Cast.make()
    troupe = Troupe(cast, ("send_weights", 0))
    fault = RunFolder(tmp_path).fails(cast)
    assert fault.service == "trainer-0"
    assert len(troupe.trainers) == 1


def test_models_that_do_not_come_back_are_named_at_their_deadline(tmp_path: Path) -> None:
    restarts = config.Services(
        rollout=config.Rollout(replicas=2, slots=16), trainer=config.Trainer(restarts=config.Restarts(attempts=1, backoff=0.1))
    )
    folder = RunFolder(tmp_path, steps=STEPS, sections=SAVED | {"services": restarts, "deadlines": config.Deadlines(start=0.2)})
    cast = Cast.make()
    Troupe(cast, ("apply", 8))

    async def regroup() -> list[FakeTrainer | FakeCritic]:
        return []

    cast.regroup = regroup
    assert str(folder.fails(cast)) == "trainer-0: restart: did not register again (deadline 0.3 s)"


def test_an_interruption_while_the_trainer_is_away_ends_the_run(tmp_path: Path) -> None:
    folder, cast = RunFolder(tmp_path, steps=STEPS, sections=SAVED), Cast.make()
    Troupe(cast, ("apply", 8))
    away = asyncio.Event()

    async def regroup() -> list[FakeTrainer | FakeCritic]:
        away.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def course(run: TrainingRun) -> None:
        await away.wait()
        run.stop(INTERRUPTED)

    cast.regroup = regroup
    fault = folder.fails(cast, course)
    assert (fault.service, fault.reason) == ("trainer-0", "was killed")


def test_a_resumed_run_goes_back_no_further_than_it_began_and_to_nothing_of_a_dead_branch(tmp_path: Path) -> None:
    first = RunFolder(tmp_path, steps=9, sections=SAVED | {"checkpoint": config.Checkpoint(every=3, keep=9)})
    first.run(Cast.make())
    folder, cast = RunFolder(tmp_path, steps=9), Cast.make(50)
    troupe = Troupe(cast, ("apply", 5))
    folder.run(cast, resume=str(first.checkpoint(3)))
    for trainer in troupe.trainers:
        assert trainer.restored == str(first.checkpoint(3))
        assert trainer.posted[0] == ("send_weights", 3)
    assert cast.rollouts[0].version == PolicyVersion(2, 9)
    with LedgerReader(folder.path / "ledger") as reader:
        reader.check_final(folder.groups_per_step)


@pytest.mark.parametrize("keep", [1, 2])
def test_a_run_that_goes_back_to_an_older_checkpoint_keeps_its_own_new_ones(tmp_path: Path, keep: int) -> None:
    RunFolder(tmp_path, steps=12, sections={"checkpoint": config.Checkpoint(every=1, keep=20)}).run(Cast.make())
    folder, cast = RunFolder(tmp_path, steps=9, sections={"checkpoint": config.Checkpoint(every=1, keep=keep)}), Cast.make(50)
    troupe = Troupe(cast, ("apply", 7))
    folder.run(cast, resume=str(folder.checkpoint(3)))
    assert troupe.trainers[1].restored in {str(folder.checkpoint(6)), str(folder.checkpoint(7))}
    assert checkpoint.steps(folder.path) == [8, 9][-keep:]
    assert checkpoint.resolve("auto", folder.path) == str(folder.checkpoint(9))
    assert folder.position(9).version.incarnation == 2
    left = sorted(path.parent.name for path in (folder.path / "checkpoints" / "dead-1").rglob(checkpoint.POSITION))
    assert left == [folder.checkpoint(step).name for step in range(4, 13)]


def test_a_checkpoint_that_is_being_completed_as_the_trainer_is_lost_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, cast = RunFolder(tmp_path, steps=5, sections=SAVED), Cast.make()
    troupe, complete, loops = Troupe(cast), checkpoint.complete, list[asyncio.AbstractEventLoop]()

    async def course(run: TrainingRun) -> None:
        loops.append(asyncio.get_running_loop())

    def lost_meanwhile(partial: Path, at: Path, position: Position) -> None:
        if len(troupe.trainers) == 1:
            loops[0].call_soon_threadsafe(troupe.trainers[0].die, "was killed")
            for _ in range(100):  # it is heeded meanwhile
                asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loops[0]).result(DEADLINE)
        complete(partial, at, position)

    monkeypatch.setattr(checkpoint, "complete", lost_meanwhile)
    folder.run(cast, course)
    assert [trainer.restored for trainer in troupe.trainers] == ["", str(folder.checkpoint(3))]
    assert checkpoint.steps(folder.path) == [3, 5]
    assert not list((folder.path / "checkpoints").glob("dead-*"))


def test_the_end_does_not_save_again_what_is_saved_already(tmp_path: Path) -> None:
    folder, cast = RunFolder(tmp_path, steps=6, sections=SAVED), Cast.make()
    folder.run(cast)
    assert [command for command in cast.trainer.posted if command[0] == "save"] == [("save", 3), ("save", 6)]
    assert folder.position(6).version == PolicyVersion(0, 6)
    again = Cast.make(50)
    folder.run(again, resume=str(folder.checkpoint(6)))  # as a batch system starts a finished run
    assert [command for command in again.trainer.posted if command[0] == "save"] == []
    assert folder.position(6).version == PolicyVersion(1, 6) and not checkpoint.fault(folder.checkpoint(6))


def test_evaluations_after_the_checkpoint_are_made_again_and_those_before_are_not(tmp_path: Path) -> None:
    evaluation = config.Evaluation(every=2, before=True, after=True, max_new_tokens=8)
    folder = RunFolder(tmp_path, steps=9, eval_problems=5, sections=SAVED | {"evaluation": evaluation})
    cast = Cast.make()
    troupe = Troupe(cast, ("apply", 8))
    summary = folder.run(cast)
    check_lineages(folder, troupe.trainers, 6)
    assert summary.accuracy_before == summary.accuracy_after == 1.0
    assert sum(progress.phase == "evaluating" and progress.step == 0 for progress in folder.progress) == 5
