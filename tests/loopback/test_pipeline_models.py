"""Whole runs with a critic or a reward model, over roles in memory: what they are asked, when, and what their faults do."""

from __future__ import annotations

import asyncio
import errno
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from runtime import config, run_files, timeouts, types
from runtime.algorithms.interfaces import ADVANTAGES, AdvantageEstimator
from runtime.coordinator.buffer import asked_of
from runtime.coordinator.run import TrainingRun
from runtime.errors import ServiceFault, UserError
from runtime.ledger import checkpoint
from runtime.ledger.checkpoint import Position
from runtime.ledger.states import Mark, Phase
from runtime.types import GeneratedGroup, GroupRequest, PolicyVersion, ScoreRequest, Scores
from tests.loopback.pipeline_fakes import (
    STATE,
    Cast,
    FakeCritic,
    FakeReference,
    FakeRewardModel,
    FakeRollout,
    FakeTrainer,
    LongTail,
    RunFolder,
    around,
    broken,
    check_books,
    check_order,
    until,
)

PATIENCE = 60.0  # seconds for something that is to happen
OWN = ("send_weights", "export")  # the trainer's commands that a critic has not


def critic_folder(path: Path, **settings: Any) -> RunFolder:
    sections = {"critic": config.Critic(), **settings.pop("sections", {})}
    return RunFolder(path, sections=sections, **settings)


def with_critic(cast: Cast, critic: FakeCritic | None = None) -> Cast:
    cast.critic = critic or FakeCritic(LongTail(7, 0.001, 0.01))
    return cast


def shared(trainer: FakeTrainer) -> list[tuple[str, int]]:
    """The trainer's commands but those of its own."""
    return [command for command in trainer.posted if command[0] not in OWN]


@pytest.mark.parametrize("staleness", [0, 2])
def test_trainer_and_critic_are_given_the_same_in_the_same_order(tmp_path: Path, staleness: int) -> None:
    folder, cast = critic_folder(tmp_path, steps=8, staleness=staleness), with_critic(Cast.make())
    assert folder.run(cast).groups == {"retired": 32, "dropped": 0}
    assert cast.critic is not None
    assert cast.critic.posted == shared(cast.trainer)
    assert [name for name, _ in cast.critic.posted if name != "accumulate"] == ["begin", "apply"] * 8 + ["save"]
    assert cast.critic.batches == cast.trainer.batches
    groups = [group for batch in cast.trainer.batches.values() for group in batch]
    for group in groups:
        assert group.values == b"values of payload %d" % group.group_id
        assert group.reference == b"reference payload %d" % group.group_id
    assert all(group.marks == Mark.SCORED | Mark.REFERENCED | Mark.VALUED for group in folder.groups(Phase.RETIRED))
    # A request for values says what balances it.
    tokens = {request.group_id: request.tokens for request in cast.critic.asked}
    assert tokens == {group.group_id: group.tokens for group in groups}
    assert all(request.payload == b"payload %d" % request.group_id for request in cast.critic.asked)
    # Its metrics join the trainer's and replace none.
    assert len(folder.points()) == 8
    for point in folder.points():
        assert (point["critic/loss"], point["actor/grad_norm"]) == (0.25, 1.0)
        assert point["timing/update_critic"] > 0
    assert any(point.get("timing/critic_model", 0.0) > 0 for point in folder.points())


def test_both_update_at_the_same_time(tmp_path: Path) -> None:
    cast, there = with_critic(Cast.make(), FakeCritic()), [asyncio.Event(), asyncio.Event()]

    async def meet(own: int) -> None:
        there[own].set()
        await asyncio.wait_for(there[1 - own].wait(), PATIENCE)

    around(cast.trainer, "applied", lambda step: meet(0))
    around(cast.critic, "applied", lambda step: meet(1))
    assert critic_folder(tmp_path, steps=1).run(cast).steps == 1


def test_a_step_is_consumed_once_the_critic_has_applied_it_and_published_before(tmp_path: Path) -> None:
    published, gate = asyncio.Event(), asyncio.Event()

    async def publish(version: PolicyVersion, epoch: int) -> None:
        if version.step == 2:
            published.set()

    async def wait(step: int) -> None:
        if step == 1:
            await gate.wait()

    async def course(run: TrainingRun) -> None:
        await asyncio.wait_for(published.wait(), PATIENCE)
        for _ in range(20):  # whatever could follow from it would have
            await asyncio.sleep(0)
        assert {group.state.phase for group in run.buffer if group.taken == 1} == {Phase.READY}
        assert ("apply", 2) not in cast.trainer.posted
        gate.set()

    cast = with_critic(Cast.prompt(), around(FakeCritic(), "applied", wait))
    for rollout in cast.rollouts:
        around(rollout, "commit_weights", publish)
    assert critic_folder(tmp_path, steps=4).run(cast, course).steps == 4


# ---------------------------------------------------------------------------------------------- several updates a step
@pytest.mark.parametrize(("training", "expected"), [({"mini_batch_size": 2}, [0, 0, 1, 1]), ({"epochs": 2}, [0] * 4)])
def test_a_step_of_several_updates_is_given_whole_with_each(
    tmp_path: Path, training: dict[str, int], expected: list[int]
) -> None:
    """The last group of the step waits until the others have been there for a while."""
    gate = asyncio.Event()

    async def wait(request: GroupRequest) -> None:
        if request.group_id == 3:
            await gate.wait()

    async def course(run: TrainingRun) -> None:
        await until(lambda: sum(group.state.phase == Phase.READY for group in run.buffer) >= 3)
        gate.set()

    settings = config.Training(steps=1, staleness=0, groups_per_step=4, **training)
    cast = with_critic(Cast.prompt(), FakeCritic())
    for rollout in cast.rollouts:
        around(rollout, "generate", wait)
    critic_folder(tmp_path, steps=1, sections={"training": settings}).run(cast, course)
    assert cast.trainer.posted.count(("accumulate", 0)) == 1
    assert [group.mini_batch for group in cast.trainer.batches[0]] == expected


# ---------------------------------------------------------------------------------------------- failures and resumes
def test_a_run_that_failed_goes_on_from_its_newest_checkpoint_with_what_it_has(tmp_path: Path) -> None:
    folder = critic_folder(tmp_path, steps=9, sections={"checkpoint": config.Checkpoint(every=2)})
    cast = with_critic(Cast.make(), broken(FakeCritic(LongTail(3, 0.001, 0.01)), "applied", 3))
    cast.reference = FakeReference(LongTail(1, 0.005))  # leaves groups that have values but are not ready
    assert folder.fails(cast).service == "critic-0"
    valued = {group.group_id for group in folder.groups() if group.marks & Mark.VALUED and "values" in group.handles}
    left = {group.group_id: group for group in folder.groups() if group.step is None or group.step >= 2}
    kept = {number for number, group in left.items() if group.phase in (Phase.GENERATED, Phase.READY, Phase.CONSUMED)}
    assert valued & left.keys() and kept
    again = with_critic(Cast.make(seed=50))
    folder.run(again, resume=str(folder.checkpoint(2)))
    assert again.critic is not None
    assert not {request.group_id for request in again.critic.asked} & valued
    assert again.critic.posted[0] == ("begin", 2)
    check_books(folder, 9)
    check_order(again.trainer, 2, 9)
    assert folder.trained_problems() == folder.first_prompts(36)
    # What was generated is not generated again, and what was not keeps its prompt and seed.
    assert not kept & again.generated_by().keys()
    after = {group.group_id: group for group in folder.groups()}
    assert all((after[i].problem, after[i].seed) == (group.problem, group.seed) for i, group in left.items())
    for batch in again.critic.batches.values():
        assert all(group.values == b"values of payload %d" % group.group_id for group in batch)


def test_an_advantage_that_needs_values_needs_a_critic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    estimator = AdvantageEstimator(lambda inputs, options: inputs.rewards, True, needs_values=True)
    monkeypatch.setitem(ADVANTAGES._entries, "of_values", estimator)
    sections = {"algorithm": config.Algorithm(advantage="of_values")}
    with pytest.raises(UserError, match=r"^critic: missing; algorithm.advantage of_values needs one$"):
        RunFolder(tmp_path, sections=sections).run(Cast.prompt())
    assert critic_folder(tmp_path, steps=1, sections=sections).run(with_critic(Cast.prompt())).steps == 1


def test_no_reference_is_asked_where_the_trainer_computes_it(tmp_path: Path) -> None:
    cast = Cast.prompt()
    sections = {"reference": config.Reference(source="adapter_off"), "lora": config.Lora()}
    RunFolder(tmp_path, steps=2, sections=sections).run(cast)
    assert cast.reference.asked == []
    assert all(group.reference is None for batch in cast.trainer.batches.values() for group in batch)


# ---------------------------------------------------------------------------------------------- checkpoints
EVERY_TWO = {"checkpoint": config.Checkpoint(every=2, keep=9)}


def left(folder: RunFolder) -> set[str]:
    root = folder.path / run_files.CHECKPOINTS
    return {path.name for path in root.iterdir()} if root.exists() else set()


def test_a_checkpoint_is_what_both_models_wrote_and_the_position_with_their_parts(tmp_path: Path) -> None:
    """It goes by the run's first start."""
    folder, cast = critic_folder(tmp_path, steps=4, sections=EVERY_TWO), with_critic(Cast.make())
    (tmp_path / ".lock").write_bytes(b"\x12")
    assert cast.critic is not None
    cast.trainer.parts, cast.critic.parts = ["trainer/b", "trainer/c"], ["critic/b"]
    folder.run(cast)
    assert left(folder) == {"step-00000002", "step-00000004"}
    for step in (2, 4):
        saved, position = folder.checkpoint(step), folder.position(step)
        assert (saved / STATE).read_text() == "trainer-0"
        assert (checkpoint.critic_state(saved) / STATE).read_text() == "critic-0"
        assert (position.version.step, position.parts) == (step, ["trainer/b", "trainer/c", "critic/b"])
    for model in (cast.trainer, cast.critic):
        told = [(types.decode(Position, place), keep) for place, keep in model.places]
        assert [(place.run, place.version.step, keep) for place, keep in told] == [("12", 2, ()), ("12", 4, (2,))]

    (tmp_path / ".lock").write_bytes(b"\x34")  # which each start writes anew
    torn = checkpoint.begin(folder.checkpoint(7))  # what a killed coordinator left is no checkpoint, and goes
    (torn / STATE).write_text("trainer-0")
    assert checkpoint.steps(tmp_path) == [2, 4]
    cast = with_critic(Cast.make(seed=50))
    folder.run(cast, resume=str(folder.checkpoint(2)))
    (place, (incarnation,)), *saved = cast.trainer.places  # type: ignore[assignment]
    assert (types.decode(Position, place).parts, incarnation) == (["trainer/b", "trainer/c", "critic/b"], 1)
    assert {types.decode(Position, place).run for place, _ in saved} == {"12"}
    assert not list((tmp_path / run_files.CHECKPOINTS).glob(".*"))


def test_a_checkpoint_without_a_critic_cannot_be_resumed_with_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"run\.resume: .*step-00000001 has no folder critic: it was saved by a run without"):
        checkpoint.critic_state(checkpoint.folder_for(tmp_path, 1))


@pytest.mark.parametrize(
    ("who", "error"),
    [("trainer", ServiceFault("the-one", "Save", "connection lost")), ("critic", UserError("/run: no space left on device"))],
    ids=str,
)
def test_a_checkpoint_that_one_fails_to_write_is_not_there(tmp_path: Path, who: str, error: Exception) -> None:
    """It writes that of step 2, and fails in that of step 4."""
    folder, cast = critic_folder(tmp_path, steps=9, sections=EVERY_TWO), with_critic(Cast.make())

    async def fails(parts: list[str], folder: Path) -> list[str]:
        if "step-00000004" in str(folder):
            raise error
        return parts

    around(getattr(cast, who), "write", after=fails)
    with pytest.raises(type(error)) as caught:
        folder.run(cast)
    assert caught.value is error
    assert left(folder) == {"step-00000002"}
    again = with_critic(Cast.make(seed=50))
    folder.run(again, resume=str(folder.checkpoint(2)))
    assert left(folder) == {"step-00000002", "step-00000004", "step-00000006", "step-00000008", "step-00000009"}


def test_a_full_disk_as_it_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sync_tree, met = checkpoint.sync_tree, 0

    def full(folder: Path) -> dict[str, int]:
        nonlocal met
        met += 1
        if met in (1, 3, 4):  # at step 2, and twice at the end
            raise OSError(errno.ENOSPC, "No space left on device")
        return sync_tree(folder)

    monkeypatch.setattr(checkpoint, "sync_tree", full)
    monkeypatch.setattr(timeouts, "SAVE_RETRY", 0.01)
    folder = critic_folder(tmp_path, steps=5, sections=EVERY_TWO)
    folder.run(with_critic(Cast.make()))
    assert left(folder) == {"step-00000004", "step-00000005"}
    assert "no checkpoint of step 2: no room in" in caplog.text
    assert caplog.text.count("waiting for room in") == 2


def test_a_run_that_fails_while_it_saves_leaves_no_part_of_the_checkpoint(tmp_path: Path) -> None:
    writing = asyncio.Event()

    async def hang(*_: Any) -> list[str]:
        writing.set()
        await asyncio.Event().wait()
        return []

    async def fail(request: GroupRequest) -> None:
        if request.group_id >= 10:
            await writing.wait()
            raise ServiceFault("rollout-0", "Generate", "connection lost")

    cast = with_critic(Cast.make(), around(FakeCritic(), "write", after=hang))
    folder = critic_folder(tmp_path, sections=EVERY_TWO)
    for rollout in cast.rollouts:
        around(rollout, "generate", fail)
    assert folder.fails(cast).phase == "Generate"
    assert left(folder) == set()


# ---------------------------------------------------------------------------------------------------------------------- rewards
ALONE = {"rewards": config.Rewards(model=config.RewardModel(path="model"))}


def with_model(model: FakeRewardModel | None = None) -> Cast:
    cast = Cast.make()
    cast.reward_model = model or FakeRewardModel(LongTail(9))
    return cast


def test_rules_and_model_are_summed_and_both_are_told_the_problem(tmp_path: Path) -> None:
    settings = config.Evaluation(before=True, after=False, max_new_tokens=8)
    folder = RunFolder(tmp_path, steps=4, eval_problems=5, sections={"evaluation": settings})
    cast = with_model()
    folder.run(cast)
    assert cast.reward_model is not None
    for request in cast.reward_model.asked:
        assert request.messages == [{"role": "user", "content": request.label}]
    assert {request.group_id < 0 for request in cast.reward_model.asked} == {True, False}
    for batch in cast.trainer.batches.values():
        for group in batch:
            assert group.rewards.tolist() == [1.25, 1.25]
    points = [point for point in folder.points() if "score/mean" in point]
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

    cast = with_model()
    around(cast.reward, "score", lambda request: meet("rules", "model", request.group_id))
    around(cast.reward_model, "score", lambda request: meet("model", "rules", request.group_id))
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
    async def mask(scores: Scores, request: ScoreRequest) -> Scores:
        return replace(scores, valid=np.array([1, 0], np.uint8), errors={"model:not finite": 1})

    folder, cast = RunFolder(tmp_path, steps=2), with_model(around(FakeRewardModel(), "score", after=mask))
    folder.run(cast)
    for batch in cast.trainer.batches.values():
        assert all(group.valid.tolist() == [1, 0] and group.rewards.tolist() == [1.25, 0.0] for group in batch)
    for point in folder.points():
        assert (point["score/masked"], point["score/errors/model:not finite"]) == (4, 4)
    assert all(row.scores.errors == {"model:not finite": 1} for row in folder.groups() if row.scores)


def test_what_a_former_life_left_without_scores_is_scored_with_its_own_problem(tmp_path: Path) -> None:
    folder, held = RunFolder(tmp_path, steps=6, sections={"checkpoint": config.Checkpoint(every=2)}), asyncio.Event()

    async def never(request: ScoreRequest) -> None:
        if request.group_id == 17:
            held.set()
            await asyncio.wait_for(asyncio.Event().wait(), PATIENCE)

    async def fail(step: int) -> None:
        if step == 3:
            await asyncio.wait_for(held.wait(), PATIENCE)
            raise ServiceFault("trainer-0", "Apply", "connection lost")

    cast = Cast.make()
    around(cast.reward, "score", never)
    around(cast.trainer, "applied", fail)
    assert folder.fails(cast).service == "trainer-0"
    left = {row.group_id: row.label for row in folder.groups(Phase.GENERATED) if row.scores is None}
    assert 17 in left
    again = Cast.make(50)
    folder.run(again, resume=str(folder.checkpoint(2)))
    assert again.reward is not None
    scored = {request.group_id: request for request in again.reward.asked}[17]
    assert (scored.label, scored.extra) == (left[17], {"label": left[17]})
    assert scored.messages == [{"role": "user", "content": left[17]}]


def test_the_status_names_the_one_that_has_not_answered(tmp_path: Path) -> None:
    asked, gate = asyncio.Event(), asyncio.Event()

    async def wait(_: ScoreRequest) -> None:
        asked.set()
        await gate.wait()

    async def course(run: TrainingRun) -> None:
        await asyncio.wait_for(asked.wait(), PATIENCE)
        for _ in range(20):  # the rules have answered by now
            await asyncio.sleep(0)
        found = run.buffer.oldest_wait()
        assert found is not None
        assert (found.state.phase.value, asked_of(found)) == ("generated", "reward_model-0")
        gate.set()

    cast = Cast.prompt()
    cast.reward_model = around(FakeRewardModel(), "score", wait)
    assert RunFolder(tmp_path, steps=2).run(cast, course).steps == 2


def test_scores_of_both_decide_what_dynamic_sampling_keeps(tmp_path: Path) -> None:
    """The rules find all replies of a group alike; only the model tells those of even groups apart."""

    async def tell(scores: Scores, request: ScoreRequest) -> Scores:
        return replace(scores, rewards=np.array([0.0, 1.0 - request.group_id % 2], np.float32))

    sections = {"algorithm": config.Algorithm(kl_coefficient=0.1, dynamic_sampling=True)}
    folder, cast = RunFolder(tmp_path, steps=3, sections=sections), with_model(around(FakeRewardModel(), "score", after=tell))
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
