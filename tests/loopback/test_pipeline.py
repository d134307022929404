"""Whole runs of the pipeline over roles in memory: order, staleness, ends, resumes, evaluations and dynamic sampling."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime import config
from runtime.coordinator.buffer import NO_SIGNAL
from runtime.coordinator.run import INTERRUPTED, WHY_ENDED, TrainingRun
from runtime.evaluation import results as evaluation
from runtime.ledger import checkpoint
from runtime.ledger.reader import LedgerReader
from runtime.ledger.states import Phase
from runtime.status import Progress
from runtime.types import GeneratedGroup, GroupRequest, ScoreRequest, Scores
from tests.loopback.pipeline_fakes import (
    Cast,
    FakeReference,
    FakeReward,
    FakeRollout,
    FakeTrainer,
    LongTail,
    RunFolder,
    around,
    broken,
    check_books,
    check_order,
    checkpoint_step,
    until,
)


@pytest.mark.parametrize(("staleness", "seed"), [(0, 0), (1, 1), (2, 0), (4, 1)])
def test_a_run_with_long_tails_keeps_its_bound_and_loses_nothing(tmp_path: Path, staleness: int, seed: int) -> None:
    folder, cast = RunFolder(tmp_path, steps=16, staleness=staleness), Cast.make(seed)
    summary = folder.run(cast)
    assert (summary.steps, summary.groups, summary.dropped) == (16, {"retired": 64, "dropped": 0}, {})
    check_books(folder, 16)
    check_order(cast.trainer, 0, 16)
    # What the trainer was given is what the ledger says it trained on, and each group once.
    given = {step: sorted(group.group_id for group in batch) for step, batch in cast.trainer.batches.items()}
    rows = folder.groups(Phase.RETIRED)
    assert given == {step: sorted(group.group_id for group in rows if group.step == step) for step in range(16)}
    born = cast.generated_by()
    ages = Counter(step - born[group].step for step, batch in given.items() for group in batch)
    assert min(ages) >= 0
    assert max(ages) <= staleness
    if staleness >= 2:
        assert max(ages) >= 1
    assert summary.staleness_histogram == {age: 2 * number for age, number in sorted(ages.items())}  # two samples a group
    assert folder.trained_problems() == folder.first_prompts(64)
    assert not any(name.startswith("dynamic_sampling") for point in folder.points() for name in point)
    for group in (group for batch in cast.trainer.batches.values() for group in batch):
        assert group.payload == b"payload %d" % group.group_id
        assert group.reference == b"reference payload %d" % group.group_id
        assert group.rewards.tolist() == [1.0, 1.0]
        assert group.tokens == 2 * 3 + sum(1 + (group.group_id + i) % 7 for i in range(2))


def gated(cast: Cast, gates: dict[int, asyncio.Event]) -> Cast:
    """Group i waits for `gates[i]`, where there is one."""

    async def wait(result: GeneratedGroup, request: GroupRequest) -> GeneratedGroup:
        if request.group_id in gates:
            await gates[request.group_id].wait()
            result.newest = cast.rollouts[0].version
        return result

    cast.rollouts = [around(FakeRollout(rollout.name, cast.weights), "generate", after=wait) for rollout in cast.rollouts]
    return cast


def test_the_trainer_holds_one_batch_ahead_and_no_more(tmp_path: Path) -> None:
    """It applies a step once the groups of the next, for some, have come."""

    async def wait(step: int) -> None:
        if ("accumulate", step + 1) in events:
            await events["accumulate", step + 1].wait()  # the run's own deadline ends it

    cast = Cast.prompt()
    cast.trainer = around(FakeTrainer(cast.weights, lambda: 0.02), "applied", wait)
    cast.trainer.events = events = {("accumulate", step): asyncio.Event() for step in (3, 4, 5, 6)}
    RunFolder(tmp_path, steps=8, staleness=2).run(cast)
    posts = list(zip(cast.trainer.posted, cast.trainer.done_when_posted, strict=True))
    ahead = [step for (name, step), done in posts if name == "accumulate" and ("apply", step - 1) not in done]
    assert {3, 4, 5, 6} <= set(ahead)
    for (name, step), done in posts:
        if step >= 2 and name in ("begin", "accumulate", "apply"):
            assert ("apply", step - 2) in done


# ---------------------------------------------------------------------------------------------- stopping and resuming
def stopping(cast: Cast, at: int) -> tuple[Cast, Any]:
    """The run is stopped while the trainer applies step `at`."""

    async def course(run: TrainingRun) -> None:
        async def stop(step: int) -> None:
            if step == at:
                run.stop("interrupted")

        around(cast.trainer, "applied", stop)

    return cast, course


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_stopped_run_drops_what_is_left_with_a_reason_and_goes_on_with_its_prompts(tmp_path: Path, staleness: int) -> None:
    folder = RunFolder(tmp_path, steps=20, staleness=staleness)
    cast, course = stopping(Cast.make(), 6)
    summary = folder.run(cast, course)
    steps = summary.steps
    assert summary.stop_reason == "interrupted"
    assert 7 <= steps <= 9  # the step that was under way, and one that was complete behind it
    check_books(folder, steps)
    check_order(cast.trainer, 0, steps)
    dropped = folder.groups(Phase.DROPPED)
    assert folder.dropped() == ({WHY_ENDED: len(dropped)} if dropped else {})
    assert all(group.taken is None for group in dropped)
    # The checkpoint of the end says what was trained, and that the prompts of the others come next.
    position = folder.position(steps)
    assert position.version.step == steps
    assert position.stream.returned == [group.problem for group in dropped]
    trained = {group for low, high in position.trained for group in range(low, high + 1)}
    assert trained == {group.group_id for group in folder.groups(Phase.RETIRED)}
    assert cast.trainer.done[-1][0] == "export"

    again = Cast.make(seed=50)
    assert folder.run(again, resume=str(folder.checkpoint(steps))).steps == 20 - steps
    check_books(folder, 20)
    check_order(again.trainer, steps, 20)
    assert folder.trained_problems() == folder.first_prompts(80)
    assert [point["step"] for point in folder.points()] == list(range(1, 21))
    incarnation = folder.position(20).version.incarnation
    assert incarnation > position.version.incarnation  # a version is never named twice
    assert all(version.incarnation == incarnation for version in again.generated_by().values())


def test_a_stop_gives_up_a_batch_that_is_filled_in_part(tmp_path: Path) -> None:
    """Without staleness a step is accumulated while others of its groups are generated."""
    folder = RunFolder(tmp_path, steps=5, staleness=0)
    sent, gate = asyncio.Event(), asyncio.Event()
    cast = gated(Cast.make(), {11: gate})  # the last group of step 2
    cast.trainer.events = {("accumulate", 2): sent}

    async def course(run: TrainingRun) -> None:
        await sent.wait()
        run.stop("interrupted")

    summary = folder.run(cast, course)
    assert summary.steps == 2
    check_books(folder, 2)
    assert folder.dropped() == {WHY_ENDED: 4}
    assert [(row.group_id, row.taken, row.place) for row in folder.groups(Phase.DROPPED)] == [
        (i, None, None) for i in range(8, 12)
    ]
    again = Cast.make(seed=50)
    folder.run(again, resume=str(folder.checkpoint(2)))
    check_books(folder, 5)
    check_order(again.trainer, 2, 5)
    assert folder.trained_problems() == folder.first_prompts(20)


def test_steps_go_on_while_a_checkpoint_is_written_and_the_next_one_waits_for_it(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, steps=7, sections={"checkpoint": config.Checkpoint(every=2, keep=9)})
    begun, applied, written = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def beside(parts: list[str], partial: str, *_: Any) -> list[str]:
        """A checkpoint is written beside the commands after it."""
        if checkpoint_step(partial) == 2:
            await written.wait()
        return parts

    cast = Cast.make()
    cast.trainer = trainer = around(FakeTrainer(cast.weights), "save", after=beside)
    trainer.events = {("accumulate", 3): begun, ("apply", 3): applied}  # step 3 makes the version that is to be saved next

    async def course(run: TrainingRun) -> None:
        await begun.wait()
        await until(lambda: trainer.done[-1] == ("accumulate", 3))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(applied.wait(), 0.2)
        assert trainer.done[-1] == ("accumulate", 3)
        assert checkpoint.steps(folder.path) == []
        written.set()

    folder.run(cast, course)
    assert checkpoint.steps(folder.path) == [2, 4, 6, 7]
    check_order(trainer, 0, 7)
    check_books(folder, 7)
    assert any(point["timing/checkpoint"] > 0 for point in folder.points() if "timing/checkpoint" in point)


def test_each_rollout_is_given_groups_by_its_own_slots(tmp_path: Path) -> None:
    """Twice 16 slots take 16 groups of two samples, and one more; twice 4 take 4 and one more. All wait until 22 groups are
    generating."""
    cast, asked, full = Cast.make(), list[int](), asyncio.Event()

    async def hold(request: GroupRequest) -> None:
        if not full.is_set() and sum(len(rollout.requests) for rollout in cast.rollouts) == 22:
            asked.extend(len(rollout.requests) for rollout in cast.rollouts)
            full.set()
        await full.wait()

    for rollout in cast.rollouts:
        around(rollout, "_generate", hold)
    fleets = config.Services(rollout=[config.Rollout(max_num_seqs=4), config.Rollout(max_num_seqs=16)])
    training = config.Training(steps=20, staleness=20, groups_per_step=4, depth="bound")
    RunFolder(tmp_path, sections={"services": fleets, "training": training}).run(cast)
    assert asked == [5, 17]


# ------------------------------------------------------------------------------------------------------------------ evaluations
def evaluations(folder: RunFolder) -> dict[int, dict[str, Any]]:
    return {point["step"]: point for point in folder.points() if "eval/accuracy" in point}


def test_evaluations_before_and_after_are_pinned_to_one_version(tmp_path: Path) -> None:
    settings = config.Evaluation(max_new_tokens=8, samples=6, k=[1, 4], temperature=1.0)
    folder = RunFolder(tmp_path, steps=5, eval_problems=9, sections={"evaluation": settings})
    cast = Cast.make()

    async def grade(scores: Scores, request: ScoreRequest) -> Scores:
        """The samples of a problem in turn: right, wrong, and no verdict; answers are the verdicts."""
        if request.group_id < 0:
            turns = np.arange(len(scores.valid)) % 3
            scores.rules = {"gsm8k": np.where(turns == 2, np.nan, 1 - turns).astype(np.float32)}
            scores.valid = (turns < 2).astype(np.uint8)
            scores.errors = {"timeout": int((turns == 2).sum())}
            scores.answers = ["right" if turn == 0 else "wrong" for turn in turns]
        return scores

    around(cast.reward, "score", after=grade)
    summary = folder.run(cast)
    assert (summary.accuracy_before, summary.accuracy_after) == (0.5, 0.5)
    assert evaluations(folder).keys() == {0, 5}
    for step, point in evaluations(folder).items():
        assert (point["eval/version_oldest"], point["eval/version_newest"]) == (step, step)
        assert (point["eval/samples"], point["eval/errors"]) == (36, 18)
        assert (point["eval/held_out/pass@4"], point["eval/held_out/maj@4"], point["eval/held_out/errors"]) == (1, 1, 18)
    results = evaluation.read(tmp_path)
    assert [result.step for result in results] == [0, 5]
    for result in results:
        (found,) = result.sets
        assert (found.pass_at, found.maj_at, found.standard_error) == ({1: 0.5, 4: 1.0}, {4: 1.0}, 0.0)
        assert (found.scored, found.errors) == (36, {"timeout": 18})
    for _, path in evaluation.folders(tmp_path):
        replies = list(evaluation.read_replies(path / "held_out.jsonl"))
        assert [(each.problem, each.sample) for each in replies] == [(f"held_out:{i}", j) for i in range(9) for j in range(6)]


def test_checkpoints_come_every_k_steps_and_the_newest_and_the_best_stay(tmp_path: Path) -> None:
    sections = {
        "checkpoint": config.Checkpoint(every=2, keep=2),
        "evaluation": config.Evaluation(before=False, after=False, every=4, max_new_tokens=8),
    }
    folder = RunFolder(tmp_path, steps=14, staleness=0, eval_problems=3, sections=sections)
    cast = Cast.prompt()

    async def evaluated(step: int) -> None:
        """No step beyond one that is evaluated is applied before that is."""
        wanted = {one for one in (4, 8, 12) if one <= step}
        await until(lambda: wanted <= {result.step for result in evaluation.read(tmp_path)})

    def value(request: ScoreRequest) -> float:
        """Evaluation is answered rightly at step 4 only."""
        return float(request.group_id >= 0 or sum(name == "apply" for name, _ in cast.trainer.done) == 4)

    cast.trainer = around(FakeTrainer(cast.weights, lambda: 0.01), "applied", evaluated)
    cast.reward = FakeReward()
    cast.reward.value = value  # type: ignore[method-assign]
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


SETS = [
    config.EvaluationSet(name="one", path="1.jsonl"),
    config.EvaluationSet(name="many", path="2.jsonl", samples=50, k=[1, 8], temperature=1.0),
]


def test_steps_go_on_while_the_replies_of_an_evaluation_hang(tmp_path: Path) -> None:
    settings = config.Evaluation(before=False, after=False, every=4, max_new_tokens=8, sets=SETS)
    folder = RunFolder(tmp_path, steps=12, eval_problems=3, sections={"evaluation": settings})
    begun, applied, gate, cast = asyncio.Event(), asyncio.Event(), asyncio.Event(), Cast.make()
    under_way: list[int] = []  # samples of each request for an evaluation

    async def hang(result: GeneratedGroup, request: GroupRequest) -> GeneratedGroup:
        if request.purpose == "eval":
            begun.set()
            under_way.append(request.n)
            assert sum(under_way) <= 8  # of 32 slots, although a problem has 50 samples
            await gate.wait()
            under_way.remove(request.n)
            result.newest = cast.rollouts[0].version
        return result

    async def wait(step: int) -> None:
        """No step is made of the version that is to be evaluated before that has begun."""
        if step == 4:
            await begun.wait()

    async def course(run: TrainingRun) -> None:
        await applied.wait()
        assert sorted(under_way) == [1, 1, 1, 4]  # 3 of one each, then a request of 4, and no room for another
        gate.set()

    cast.rollouts = [around(FakeRollout(rollout.name, cast.weights), "generate", after=hang) for rollout in cast.rollouts]
    cast.trainer = around(FakeTrainer(cast.weights), "applied", wait)
    cast.trainer.events = {("apply", 11): applied}
    assert folder.run(cast, course).steps == 12
    check_books(folder, 12)
    (point,) = evaluations(folder).values()
    assert (point["step"], point["eval/version_oldest"]) == (4, 4)
    assert point["eval/version_newest"] >= 11
    assert point["eval/skipped"] == 1  # that of step 8 was due meanwhile
    assert (point["eval/samples"], point["eval/errors"]) == (3 + 150, 0)
    (result,) = evaluation.read(tmp_path)
    sizes = [(each.name, each.problems, each.samples, each.scored) for each in result.sets]
    assert sizes == [("one", 3, 1, 3), ("many", 3, 50, 150)]
    assert result.sets[1].maj_at == {8: 1.0}
    replies = list(evaluation.read_replies(evaluation.folder_for(tmp_path, 4) / "many.jsonl"))
    assert [(each.problem, each.sample) for each in replies] == [(f"many:{i}", j) for i in range(3) for j in range(50)]
    assert [each.reply.split()[0] for each in replies[:50]] == list(map(str, range(50)))  # each part began where it was to


def test_an_evaluation_that_is_cut_short_leaves_its_replies_and_no_results(tmp_path: Path) -> None:
    settings = config.Evaluation(after=False, max_new_tokens=8)
    folder = RunFolder(tmp_path, steps=5, eval_problems=4, sections={"evaluation": settings})
    cast = Cast.make()

    async def one_hangs(request: GroupRequest) -> None:
        if request.group_id == -3:
            await asyncio.Event().wait()

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
    cast.rollouts = [around(FakeRollout(rollout.name, cast.weights), "generate", one_hangs) for rollout in cast.rollouts]
    summary = folder.run(cast, course)
    assert (summary.accuracy_before, summary.stop_reason) == (None, INTERRUPTED)
    assert evaluation.read(tmp_path) == []
    (cut_short,) = (path for _, path in evaluation.folders(tmp_path))
    replies = [each.problem for each in evaluation.read_replies(cut_short / "held_out.jsonl")]
    assert replies == [f"held_out:{number}" for number in (0, 1, 3)]
    # Before its first step as it was stopped, it is resumed from step 0.
    folder.run(Cast.make(), resume=str(folder.checkpoint(0)))
    check_books(folder, 5)


def test_a_resumed_run_has_no_evaluations_of_steps_that_it_has_not_made(tmp_path: Path) -> None:
    sections = {"checkpoint": config.Checkpoint(every=2, keep=9), "evaluation": config.Evaluation(max_new_tokens=8)}
    RunFolder(tmp_path, steps=6, eval_problems=3, sections=sections).run(Cast.make())
    again = RunFolder(tmp_path, steps=5, eval_problems=3, sections=sections)
    again.run(Cast.make(), resume=str(again.checkpoint(4)))
    assert {result.step: str(result.newest) for result in evaluation.read(tmp_path)} == {0: "0.0", 4: "1.4", 5: "1.5"}


# ------------------------------------------------------------------------------------------------------------- dynamic sampling
class SomeSignal(FakeReward):
    """Every third group has replies of both kinds; the others are all right, or all wrong."""

    async def score(self, request: ScoreRequest) -> Scores:
        scores = await super().score(request)
        kind = request.group_id % 3
        rewards = np.array([kind % 2, 1 if kind == 2 else kind % 2], np.float32)
        return Scores(group_id=scores.group_id, rewards=rewards, valid=scores.valid, rules={"gsm8k": rewards})


def has_signal(group_id: int) -> bool:
    return group_id % 3 == 2


def folder_of(path: Path, limit: int = 20, **settings: Any) -> RunFolder:
    algorithm = config.Algorithm(kl_coefficient=0.1, dynamic_sampling=True, dynamic_sampling_limit=limit)
    return RunFolder(path, sections={"algorithm": algorithm, **settings.pop("sections", {})}, **settings)


def make(seed: int = 0) -> tuple[Cast, FakeReference]:
    cast = Cast.make(seed)
    cast.reward = SomeSignal(LongTail(seed + 2))
    return cast, cast.reference


def check_prompts(folder: RunFolder) -> None:
    """Each prompt that was drawn was trained on, or dropped for want of signal, or is the next to be drawn: once."""
    with LedgerReader(folder.path / "ledger") as reader:
        assert reader.counts()["admitted"] == 0
    groups = folder.groups(Phase.RETIRED, Phase.DROPPED)
    assert all(has_signal(group.group_id) for group in groups if group.phase == Phase.RETIRED)
    stream = folder.position(max(group.step or 0 for group in groups) + 1).stream
    spent = [group.problem for group in groups if group.why != WHY_ENDED]
    assert sorted(spent + stream.returned) == folder.first_prompts(stream.position)


@pytest.mark.parametrize("staleness", [0, 2])
def test_steps_train_on_groups_with_signal_alone(tmp_path: Path, staleness: int) -> None:
    folder = folder_of(tmp_path, staleness=staleness)
    cast, reference = make()
    summary = folder.run(cast)
    assert (summary.steps, summary.stop_reason) == (12, "all steps done")
    check_books(folder, 12)
    check_order(cast.trainer, 0, 12)
    check_prompts(folder)
    assert not any(has_signal(group.group_id) for group in folder.groups(Phase.DROPPED))
    dropped = [group.group_id for group in folder.groups(Phase.DROPPED)]
    assert len(dropped) >= 2 * 12 * 4 - 2  # of any three groups in a row
    assert folder.dropped() == summary.dropped == {NO_SIGNAL: len(dropped)}
    assert summary.groups == {"retired": 48, "dropped": len(dropped)}
    assert summary.staleness_max <= staleness
    assert {request.group_id for request in reference.asked} == {group.group_id for group in folder.groups(Phase.RETIRED)}
    points = folder.points()
    assert sum(point["dynamic_sampling/dropped"] for point in points) == len(dropped)
    assert all(point["score/mean"] == 0.5 for point in points)
    kept = [point["dynamic_sampling/kept"] for point in points if "dynamic_sampling/kept" in point]
    assert all(0 <= share <= 1 for share in kept)
    # The rewards that it had are there to be looked at.
    assert {group.reward for group in folder.groups(Phase.DROPPED)} == {0.0, 1.0}


def test_a_run_whose_prompts_have_no_signal_ends_in_order(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, limit=3)
    cast = Cast.prompt()

    async def until_twenty(scores: Scores, request: ScoreRequest) -> Scores:
        if request.group_id >= 20:
            scores.rewards[:] = 1.0
        return scores

    cast.reward = around(SomeSignal(), "score", after=until_twenty)
    summary = folder.run(cast)
    assert summary.steps == 1  # six groups of the first twenty have signal
    assert summary.stop_reason == "too little signal: 12 groups with equal rewards dropped for one step"
    check_books(folder, 1)
    assert {WHY_ENDED, NO_SIGNAL} == folder.dropped().keys()
    position = folder.position(1)
    assert position.version.step == 1
    assert cast.trainer.done[-1][0] == "export"
    # With problems that have signal it goes on, and the prompts that were given up come first.
    cast, _ = make(50)
    folder = folder_of(tmp_path, limit=1000)
    folder.run(cast, resume=str(folder.checkpoint(1)))
    check_books(folder, 12)
    check_prompts(folder)


@pytest.mark.parametrize("sampled", [True, False])
def test_after_a_failure_what_was_dropped_stays_dropped_and_nothing_is_trained_twice(tmp_path: Path, sampled: bool) -> None:
    """`sampled`: by the run that failed, too; else what it kept is judged by the next."""
    folder = folder_of(tmp_path, steps=9)
    saved = {"checkpoint": config.Checkpoint(every=2)}
    failing = folder_of(tmp_path, steps=9, sections=saved) if sampled else RunFolder(tmp_path, steps=9, sections=saved)
    cast, _ = make()
    broken(cast.trainer, "applied", 3)
    assert failing.fails(cast).service == "trainer-0"
    before = {group.group_id: group.why for group in folder.groups(Phase.DROPPED)}
    assert set(before.values()) == ({NO_SIGNAL} if sampled else set())
    again, _ = make(50)
    folder.run(again, resume=str(folder.checkpoint(2)))
    check_books(folder, 9)
    check_order(again.trainer, 2, 9)
    if sampled:
        check_prompts(folder)
    after = {group.group_id: group.why for group in folder.groups(Phase.DROPPED)}
    assert before.items() <= after.items()
    assert not before.keys() & again.generated_by().keys()
    later = [group.group_id for group in folder.groups(Phase.RETIRED) if group.step is not None and group.step >= 2]
    assert all(map(has_signal, later))
