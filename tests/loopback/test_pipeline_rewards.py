"""Whole runs over roles in memory in which a reward model scores too: beside the rules, or alone."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from runtime import config
from runtime.coordinator.run import TrainingRun
from runtime.errors import ServiceFault
from runtime.ledger.reader import LedgerReader
from runtime.ledger.states import Phase
from runtime.types import GeneratedGroup, GroupRequest, ScoreRequest, Scores, StepResult
from tests.loopback.pipeline_fakes import Cast, FakeReward, FakeRewardModel, FakeRollout, FakeTrainer, LongTail, RunFolder

PATIENCE = 60.0  # seconds for something that is to happen
ALONE = {"rewards": config.Rewards(model=config.RewardModel(path="model"))}


def with_model(model: FakeRewardModel | None = None) -> Cast:
    cast = Cast.make()
    cast.reward_model = model or FakeRewardModel(LongTail(9))
    return cast


def test_rules_and_model_are_summed(tmp_path: Path) -> None:
    folder, cast = RunFolder(tmp_path, steps=4), with_model()
    folder.run(cast)
    for batch in cast.trainer.batches.values():
        for group in batch:
            assert group.rewards.tolist() == [1.25, 1.25]
    points = folder.points()
    assert len(points) == 4
    for point in points:
        assert (point["score/mean"], point["gsm8k_rewards/mean"], point["reward_model_rewards/mean"]) == (1.25, 1.0, 0.25)
    for phase in ("rule_reward", "reward_model"):
        assert any(point.get(f"timing/{phase}", 0.0) > 0 for point in points)
        assert any(f"timing/non_overlap_{phase}" in point for point in points)


def test_both_are_asked_at_the_same_time(tmp_path: Path) -> None:
    """Neither answers before the other was asked about the same group."""
    there: dict[tuple[str, int], asyncio.Event] = {}

    async def meet(own: str, other: str, group: int) -> None:
        there.setdefault((own, group), asyncio.Event()).set()
        await asyncio.wait_for(there.setdefault((other, group), asyncio.Event()).wait(), PATIENCE)

    class Reward(FakeReward):
        async def score(self, request: ScoreRequest) -> Scores:
            await meet("rules", "model", request.group_id)
            return await super().score(request)

    class Model(FakeRewardModel):
        async def score(self, request: ScoreRequest) -> Scores:
            await meet("model", "rules", request.group_id)
            return await super().score(request)

    cast = with_model(Model())
    cast.reward = Reward()
    assert RunFolder(tmp_path, steps=3).run(cast).steps == 3


def test_a_reward_model_alone_is_enough(tmp_path: Path) -> None:
    """There is no reward service then; nor an evaluation, whose accuracy a rule would have to tell."""
    folder, cast = RunFolder(tmp_path, steps=3, eval_problems=5, sections=ALONE), with_model()
    cast.reward = None
    folder.run(cast)
    for point in folder.points():
        assert point["score/mean"] == 0.25
        assert "timing/rule_reward" not in point
        assert "eval/accuracy" not in point


def test_what_the_model_cannot_score_is_masked(tmp_path: Path) -> None:
    class Model(FakeRewardModel):
        async def score(self, request: ScoreRequest) -> Scores:
            scores = await super().score(request)
            return replace(scores, valid=np.array([1, 0], np.uint8), errors={"model:not finite": 1})

    folder, cast = RunFolder(tmp_path, steps=2), with_model(Model())
    folder.run(cast)
    for batch in cast.trainer.batches.values():
        assert all(group.valid.tolist() == [1, 0] and group.rewards.tolist() == [1.25, 0.0] for group in batch)
    for point in folder.points():
        assert (point["score/masked"], point["score/errors/model:not finite"]) == (4, 4)
    with LedgerReader(tmp_path / "ledger") as reader:
        assert all(row.scores.errors == {"model:not finite": 1} for row in reader.groups() if row.scores)


def test_both_are_told_the_problem(tmp_path: Path) -> None:
    asked: list[ScoreRequest] = []

    class Model(FakeRewardModel):
        async def score(self, request: ScoreRequest) -> Scores:
            asked.append(request)
            return await super().score(request)

    settings = config.Evaluation(before=True, after=False, max_new_tokens=8)
    RunFolder(tmp_path, steps=2, eval_problems=5, sections={"evaluation": settings}).run(with_model(Model()))
    assert {request.group_id < 0 for request in asked} == {True, False}
    assert all(request.messages == [{"role": "user", "content": request.label}] for request in asked)


def test_what_a_former_life_left_without_scores_is_scored_with_its_own_problem(tmp_path: Path) -> None:
    folder, asked = RunFolder(tmp_path, steps=6, sections={"checkpoint": config.Checkpoint(every=2)}), list[ScoreRequest]()
    held = asyncio.Event()

    class Never(FakeReward):
        async def score(self, request: ScoreRequest) -> Scores:
            if request.group_id == 17:
                held.set()
                await asyncio.wait_for(asyncio.Event().wait(), PATIENCE)
            return await super().score(request)

    class Asked(FakeReward):
        async def score(self, request: ScoreRequest) -> Scores:
            asked.append(request)
            return await super().score(request)

    class Trainer(FakeTrainer):
        async def applied(self, step: int) -> StepResult:
            if step == 3:
                await asyncio.wait_for(held.wait(), PATIENCE)
                raise ServiceFault(self.name, "Apply", "connection lost")
            return await super().applied(step)

    cast = Cast.make()
    cast.reward, cast.trainer = Never(), Trainer(cast.weights)
    assert folder.fails(cast).service == "trainer-0"
    with LedgerReader(tmp_path / "ledger") as reader:
        left = {row.group_id: row.label for row in reader.groups() if row.scores is None and row.phase == Phase.GENERATED}
    assert 17 in left
    again = Cast.make(50)
    again.reward = Asked()
    folder.run(again, resume=str(folder.checkpoint(2)))
    scored = {request.group_id: request for request in asked}
    assert scored[17].label == left[17]
    assert scored[17].messages == [{"role": "user", "content": left[17]}]
    assert scored[17].extra == {"label": left[17]}


def test_the_status_names_the_one_that_has_not_answered(tmp_path: Path) -> None:
    asked, gate = asyncio.Event(), asyncio.Event()

    class Model(FakeRewardModel):
        async def score(self, request: ScoreRequest) -> Scores:
            asked.set()
            await gate.wait()
            return await super().score(request)

    async def course(run: TrainingRun) -> None:
        await asyncio.wait_for(asked.wait(), PATIENCE)
        for _ in range(20):  # the rules have answered by now
            await asyncio.sleep(0)
        wait = run.buffer.oldest_wait()
        assert wait is not None
        assert (wait.phase, wait.service) == ("generated", "reward_model-0")
        gate.set()

    cast = Cast.prompt()
    cast.reward_model = Model()
    assert RunFolder(tmp_path, steps=2).run(cast, course).steps == 2


def test_a_reward_model_that_fails_ends_the_run(tmp_path: Path) -> None:
    class Model(FakeRewardModel):
        async def score(self, request: ScoreRequest) -> Scores:
            if request.group_id == 5:
                raise ServiceFault(self.name, "Score", "connection lost")
            return await super().score(request)

    assert RunFolder(tmp_path).fails(with_model(Model())).service == "reward_model-0"


@pytest.mark.parametrize("staleness", [0, 2])
def test_scores_of_both_decide_what_dynamic_sampling_keeps(tmp_path: Path, staleness: int) -> None:
    """The rules find all replies of a group alike; only the model tells those of even groups apart."""

    class Model(FakeRewardModel):
        async def score(self, request: ScoreRequest) -> Scores:
            scores = await super().score(request)
            return replace(scores, rewards=np.array([0.0, 1.0 - request.group_id % 2], np.float32))

    algorithm = config.Algorithm(kl_coefficient=0.1, dynamic_sampling=True)
    folder = RunFolder(tmp_path, steps=3, staleness=staleness, sections={"algorithm": algorithm})
    cast = with_model(Model())
    folder.run(cast)
    assert {group.group_id % 2 for batch in cast.trainer.batches.values() for group in batch} == {0}
    assert folder.dropped()["no signal"] >= 6


class Played(FakeRollout):
    """Whoever plays gives the first of two episodes 1 or 0 by turns, and the second 1 or, every third time, nothing."""

    async def _generate(self, request: GroupRequest) -> GeneratedGroup:
        second = 1.0 if request.group_id % 3 else math.nan
        return replace(await super()._generate(request), rewards=[request.group_id % 2, second])


@pytest.mark.parametrize("rules", [True, False])
def test_what_who_plays_gives_is_a_reward_beside_the_rules_or_alone(tmp_path: Path, rules: bool) -> None:
    """No reward service is asked where there is no rule."""
    rewards = config.Rewards(rules=[config.Rule(name="gsm8k")] * rules, environment=0.5)
    folder, cast = RunFolder(tmp_path, steps=3, sections={"rewards": rewards}), Cast.make()
    cast.rollouts = [Played(f"rollout-{index}", cast.weights) for index in range(2)]
    cast.reward = cast.reward if rules else None
    folder.run(cast)
    batches = [group for batch in cast.trainer.batches.values() for group in batch]
    assert len(batches) == 12
    for group in batches:
        first = 0.5 * (group.group_id % 2) + rules
        second = 0.5 + rules if group.group_id % 3 else 0.0
        assert (group.rewards.tolist(), group.valid.tolist()) == ([first, second], [1, bool(group.group_id % 3)])
    point = folder.points()[-1]
    nothing = sum(not group.group_id % 3 for group in cast.trainer.batches[2])
    assert (point["score/masked"], point.get("score/errors/environment:no reward", 0.0)) == (nothing, nothing)
    (row,) = (row for row in folder.groups(Phase.RETIRED) if row.group_id == 3)
    assert row.rewards is not None
    np.testing.assert_array_equal(row.rewards, [1.0, math.nan])
