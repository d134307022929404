"""Whole runs of the pipeline over roles in memory: evaluations, checkpoints, and conditions to stop."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime import config
from runtime.coordinator.attempt import INTERRUPTED
from runtime.coordinator.run import TrainingRun
from runtime.evaluation import generations
from runtime.evaluation import results as evaluation
from runtime.status import Progress
from runtime.types import GeneratedGroup, GroupRequest, ScoreRequest, Scores, StepResult
from tests.loopback.pipeline_checks import check_books
from tests.loopback.pipeline_fakes import (
    Cast,
    FakeReward,
    FakeRollout,
    FakeTrainer,
    RunFolder,
)
from tests.loopback.test_pipeline import NotingTrainer


def evaluations(folder: RunFolder) -> dict[int, dict[str, Any]]:
    return {point["step"]: point for point in folder.points() if "eval/accuracy" in point}


def test_evaluations_before_and_after_are_pinned_to_one_version(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, steps=5, eval_problems=9, sections={"evaluation": config.Evaluation(max_new_tokens=8)})
    summary = folder.run(Cast.make())
    assert (summary.accuracy_before, summary.accuracy_after) == (1.0, 1.0)
    assert evaluations(folder).keys() == {0, 5}
    for step, point in evaluations(folder).items():
        assert (point["eval/version_oldest"], point["eval/version_newest"]) == (step, step)
        assert (point["eval/samples"], point["eval/errors"]) == (9, 0)
    assert [(result.step, result.sets[0].scored) for result in evaluation.read(tmp_path)] == [(0, 9), (5, 9)]
    for _, path in evaluation.folders(tmp_path):
        replies = list(generations.read(path / "held_out.jsonl"))
        assert [reply.problem for reply in replies] == [f"held_out:{i}" for i in range(9)]


class SlowToEvaluate(FakeRollout):
    """An evaluation's groups tell that they have `begun`, and wait for `gate`."""

    begun: asyncio.Event
    gate: asyncio.Event

    async def generate(self, request: GroupRequest) -> GeneratedGroup:
        result = await super().generate(request)
        if request.purpose == "eval":
            self.begun.set()
            await self.gate.wait()
            result.newest = self.version
        return result


class EvaluatedTrainer(NotingTrainer):
    """Makes no step of the version that is to be evaluated before that has `begun`."""

    begun: asyncio.Event

    async def applied(self, step: int) -> StepResult:
        if step == 4:
            await self.begun.wait()
        return await super().applied(step)


def test_an_evaluation_during_training_does_not_hold_up_the_trainer_and_tells_its_versions(tmp_path: Path) -> None:
    settings = config.Evaluation(before=False, after=False, every=4, max_new_tokens=8)
    folder = RunFolder(tmp_path, steps=8, eval_problems=9, sections={"evaluation": settings})
    applied, cast = asyncio.Event(), Cast.make()

    async def course(run: TrainingRun) -> None:
        await applied.wait()  # step 6 is posted although the evaluation of step 4 has not got on
        for rollout in cast.rollouts:
            rollout.gate.set()  # type: ignore[attr-defined]

    cast.trainer = EvaluatedTrainer(cast.weights)
    cast.trainer.begun = asyncio.Event()
    cast.rollouts = [SlowToEvaluate(rollout.name, cast.weights) for rollout in cast.rollouts]
    for rollout in cast.rollouts:
        rollout.begun, rollout.gate = cast.trainer.begun, asyncio.Event()  # type: ignore[attr-defined]
    cast.trainer.events = {("apply", 6): applied}
    folder.run(cast, course)
    assert evaluations(folder).keys() == {4}
    point = evaluations(folder)[4]
    assert point["eval/version_oldest"] == 4
    assert point["eval/version_newest"] >= 6
    check_books(folder, 8)


class LearningReward(FakeReward):
    """Evaluation is answered rightly at the steps `good` only."""

    good: set[int]
    trainer: FakeTrainer

    def value(self, request: ScoreRequest) -> float:
        applied = sum(name == "apply" for name, _ in self.trainer.done)
        return float(request.group_id >= 0 or applied in self.good)


class WaitingTrainer(FakeTrainer):
    """Applies no step beyond one of `due` before the evaluation of that is in `folder`."""

    folder: Path
    due: tuple[int, ...]

    async def applied(self, step: int) -> StepResult:
        wanted = {one for one in self.due if one <= step}
        while not wanted <= {result.step for result in evaluation.read(self.folder)}:  # noqa: ASYNC110 - the run has a deadline
            await asyncio.sleep(0.001)  # the run's own deadline ends it
        return await super().applied(step)


def test_checkpoints_come_every_k_steps_and_the_newest_and_the_best_stay(tmp_path: Path) -> None:
    sections = {
        "checkpoint": config.Checkpoint(every=2, keep=2),
        "evaluation": config.Evaluation(before=False, after=False, every=4, max_new_tokens=8),
    }
    folder = RunFolder(tmp_path, steps=14, staleness=0, eval_problems=3, sections=sections)
    cast = Cast.prompt()
    cast.trainer = WaitingTrainer(cast.weights, lambda: 0.03)
    cast.trainer.folder, cast.trainer.due = tmp_path, (4, 8, 12)
    cast.reward = LearningReward()
    cast.reward.good, cast.reward.trainer = {4}, cast.trainer
    folder.run(cast)
    saves = [step for name, step in cast.trainer.posted if name == "save"]
    assert saves[:7] == [2, 4, 6, 8, 10, 12, 14]
    assert sorted(int(path.name.removeprefix("step-")) for path in (tmp_path / "checkpoints").iterdir()) == [4, 12, 14]
    assert folder.position(14).best_step == 4
    for step in (4, 12, 14):
        position = folder.position(step)
        assert position.version.step == step
        assert sum(high - low + 1 for low, high in position.trained) == step * folder.groups_per_step
    # A checkpoint holds its version: it is ordered after the step that makes it, and before the next is applied.
    posted = cast.trainer.posted
    for step in saves[:6]:
        assert posted.index(("apply", step - 1)) < posted.index(("save", step)) < posted.index(("apply", step))


@pytest.mark.parametrize(
    ("stop", "reason"),
    [
        (config.StopConditions(hours=1e-9), "hours are over"),
        (config.StopConditions(accuracy=0.9), "accuracy 100.0% reached 90.0%"),
    ],
)
def test_a_run_ends_when_its_condition_to_stop_holds(tmp_path: Path, stop: config.StopConditions, reason: str) -> None:
    sections = {"stop": stop, "evaluation": config.Evaluation(before=False, after=False, every=2, max_new_tokens=8)}
    folder = RunFolder(tmp_path, steps=100, eval_problems=3, sections=sections)
    summary = folder.run(Cast.make())
    assert reason in summary.stop_reason
    assert 1 <= summary.steps < 50
    check_books(folder, summary.steps)
    assert folder.position(summary.steps).version.step == summary.steps


class Hanging(FakeRollout):
    """Replies of evaluations hang, from the first on until `gate`. `most` is how many of them were under way at once, and
    `largest` the most that were asked for in one request."""

    gate: asyncio.Event
    under_way = most = largest = 0

    async def generate(self, request: GroupRequest) -> GeneratedGroup:
        if request.purpose == "eval":
            Hanging.under_way += request.n
            Hanging.most = max(Hanging.most, Hanging.under_way)
            Hanging.largest = max(Hanging.largest, request.n)
            await self.gate.wait()
            Hanging.under_way -= request.n
        return await super().generate(request)

    @classmethod
    def cast(cls) -> Cast:
        cls.under_way = cls.most = cls.largest = 0
        cls.gate = asyncio.Event()
        cast = Cast.make()
        cast.rollouts = [cls(rollout.name, cast.weights) for rollout in cast.rollouts]
        cast.trainer = NotingTrainer(cast.weights)
        return cast


SETS = [
    config.EvaluationSet(name="one", path="1.jsonl"),
    config.EvaluationSet(name="many", path="2.jsonl", samples=50, k=[1, 8], temperature=1.0),
]


def test_steps_go_on_while_the_replies_of_an_evaluation_hang(tmp_path: Path) -> None:
    settings = config.Evaluation(before=False, after=False, every=4, max_new_tokens=8, sets=SETS)
    folder = RunFolder(tmp_path, steps=12, eval_problems=3, sections={"evaluation": settings})
    applied, cast = asyncio.Event(), Hanging.cast()

    async def course(run: TrainingRun) -> None:
        await applied.wait()  # of 32 slots at most 8 are the evaluation's, although a problem has 50 samples
        assert (Hanging.most, Hanging.largest) == (7, 4)  # 3 of one each, then a request of 4, and no room for another
        Hanging.gate.set()

    cast.trainer.events = {("apply", 11): applied}  # type: ignore[attr-defined]
    summary = folder.run(cast, course)
    assert summary.steps == 12
    assert Hanging.most <= 8
    check_books(folder, 12)
    point = evaluations(folder)[4]
    assert point["eval/skipped"] == 1  # that of step 8 was due meanwhile
    assert (point["eval/samples"], point["eval/errors"]) == (3 + 150, 0)
    (result,) = evaluation.read(tmp_path)
    assert [(each.name, each.problems, each.samples, each.scored) for each in result.sets] == [
        ("one", 3, 1, 3),
        ("many", 3, 50, 150),
    ]
    assert result.sets[1].maj_at == {8: 1.0}
    replies = list(generations.read(evaluation.folder_for(tmp_path, 4) / "many.jsonl"))
    assert [(each.problem, each.sample) for each in replies] == [(f"many:{i}", j) for i in range(3) for j in range(50)]
    assert [each.reply.split()[0] for each in replies[:50]] == list(map(str, range(50)))  # each part began where it was to


class Grading(FakeReward):
    """Gives the samples of a problem in turn: right, wrong, and no verdict; answers are the verdicts."""

    async def score(self, request: ScoreRequest) -> Scores:
        scores = await super().score(request)
        if request.group_id < 0:
            turns = np.arange(len(scores.valid)) % 3
            scores.rules = {"gsm8k": np.where(turns == 2, np.nan, 1 - turns).astype(np.float32)}
            scores.valid = (turns < 2).astype(np.uint8)
            scores.errors = {"timeout": int((turns == 2).sum())}
            scores.answers = ["right" if turn == 0 else "wrong" for turn in turns]
        return scores


def test_figures_of_an_evaluation_before_training(tmp_path: Path) -> None:
    settings = config.Evaluation(after=False, max_new_tokens=8, samples=6, k=[1, 4], temperature=1.0, sets=SETS[:1])
    folder = RunFolder(tmp_path, steps=1, eval_problems=5, sections={"evaluation": settings})
    cast = Cast.make()
    cast.reward = Grading()
    assert folder.run(cast).accuracy_before == 0.5
    (result,) = evaluation.read(tmp_path)
    (found,) = result.sets
    assert (found.pass_at, found.maj_at, found.standard_error) == ({1: 0.5, 4: 1.0}, {4: 1.0}, 0.0)
    assert (found.scored, found.errors) == (20, {"timeout": 10})
    point = evaluations(folder)[0]
    assert (point["eval/one/pass@4"], point["eval/one/maj@4"], point["eval/one/errors"], point["eval/errors"]) == (1, 1, 10, 10)


def test_an_evaluation_that_is_cut_short_leaves_its_replies_and_no_results(tmp_path: Path) -> None:
    settings = config.Evaluation(after=False, max_new_tokens=8)
    folder = RunFolder(tmp_path, steps=5, eval_problems=4, sections={"evaluation": settings})
    cast = Cast.make()

    class OneHangs(FakeRollout):
        async def generate(self, request: GroupRequest) -> GeneratedGroup:
            if request.group_id == -3:
                await asyncio.Event().wait()
            return await super().generate(request)

    async def course(run: TrainingRun) -> None:
        await three_done.wait()
        run.stop(INTERRUPTED)

    class Noting(list[Progress]):
        def append(self, progress: Progress) -> None:
            super().append(progress)
            if progress.done == 3:
                three_done.set()

    three_done = asyncio.Event()
    folder.progress = Noting()
    cast.rollouts = [OneHangs(rollout.name, cast.weights) for rollout in cast.rollouts]
    summary = folder.run(cast, course)
    assert (summary.accuracy_before, summary.stop_reason) == (None, INTERRUPTED)
    assert evaluation.read(tmp_path) == []
    (cut_short,) = (path for _, path in evaluation.folders(tmp_path))
    assert [each.problem for each in generations.read(cut_short / "held_out.jsonl")] == [
        "held_out:0",
        "held_out:1",
        "held_out:3",
    ]


def test_a_resumed_run_has_no_evaluations_of_steps_that_it_has_not_made(tmp_path: Path) -> None:
    sections = {"checkpoint": config.Checkpoint(every=2, keep=9), "evaluation": config.Evaluation(max_new_tokens=8)}
    RunFolder(tmp_path, steps=6, eval_problems=3, sections=sections).run(Cast.make())
    again = RunFolder(tmp_path, steps=5, eval_problems=3, sections=sections)
    again.run(Cast.make(), resume=str(again.checkpoint(4)))
    assert {result.step: str(result.newest) for result in evaluation.read(tmp_path)} == {0: "0.0", 4: "1.4", 5: "1.5"}
