"""Runs over roles in memory in which something is lost: others do what was its, once; a trainer goes back; or the run ends."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from msgspec.structs import replace

from runtime import config
from runtime.commands import WeightsCommitted
from runtime.coordinator.run import INTERRUPTED, TrainingRun
from runtime.errors import BlobLost, DeadlineExceeded, ServiceFault, UserError
from runtime.ledger import checkpoint
from runtime.ledger.checkpoint import Position
from runtime.ledger.reader import LedgerReader
from runtime.ledger.states import Phase
from runtime.types import GeneratedGroup, GroupRequest, Holder, LogprobRequest, PolicyVersion, ScoreRequest, Scores
from tests.loopback.pipeline_fakes import (
    DEADLINE,
    Cast,
    FakeCritic,
    FakeModel,
    FakeReward,
    FakeRewardModel,
    FakeRollout,
    FakeTrainer,
    LongTail,
    RunFolder,
    around,
    broken,
    check_books,
    until,
)

# Few slots, so that every rollout is given groups from the start.
SERVICES = config.Services(rollout=config.Rollout(replicas=2, max_num_seqs=4))


def cast_of(*names: str) -> Cast:
    """The last of the rollouts dies at its sixth group."""
    cast = Cast.make()
    seconds = LongTail(7, 0.002)
    cast.rollouts = [FakeRollout(name, cast.weights, seconds) for name in names]
    dies_at(cast.rollouts[-1], "_generate", 6)
    return cast


def dies_at(port: Any, method: str, last: int) -> None:
    """It is lost as its `method` is called for the `last`th time."""
    calls = itertools.count(1)

    async def dies(_: Any) -> None:
        if next(calls) == last:
            port.die("was killed")

    around(port, method, dies)


def total(folder: RunFolder, name: str) -> float:
    return sum(point[name] for point in folder.points() if name in point)


def test_the_groups_of_a_rollout_that_dies_are_made_by_another_from_the_same_seed(tmp_path: Path) -> None:
    """An evaluation beside them survives it too."""
    cast = cast_of("rollout-0", "rollout-1")
    evaluation = config.Evaluation(every=2, before=False, after=True, max_new_tokens=8)
    folder = RunFolder(tmp_path, eval_problems=5, sections={"services": SERVICES, "evaluation": evaluation})
    summary = folder.run(cast)
    assert summary.accuracy_after == 1.0 and summary.staleness_max <= folder.staleness
    check_books(folder, folder.steps)
    other, mortal = ([request for request in rollout.requests if request.purpose != "eval"] for rollout in cast.rollouts)
    seeds = {request.group_id: request.seed for request in mortal}
    repeated = [request for request in other if request.group_id in seeds]
    assert repeated
    assert all(request.seed == seeds[request.group_id] for request in repeated)
    assert total(folder, "rollout/lost") == 1
    assert total(folder, "rollout/repeated_groups") == len(repeated)
    assert folder.points()[-1]["rollout/serving"] == 1


def test_without_any_rollout_or_reward_the_run_ends_at_its_deadline_and_names_it(tmp_path: Path) -> None:
    deadlines = {"deadlines": config.Deadlines(start=0.2)}
    fault = RunFolder(tmp_path / "rollout", sections=deadlines).fails(cast_of("rollout-0"))
    assert (fault.service, fault.phase, fault.deadline) == ("rollout-0", "run", 0.2)
    assert "was killed" in fault.reason
    cast = Cast.make()
    dies_at(cast.reward, "score", 3)
    fault = RunFolder(tmp_path / "reward", sections=deadlines).fails(cast)
    assert fault.service == "reward"
    assert "reward-0: was killed" in fault.reason


# ---------------------------------------------------------------------------------------------------- failures that end the run
@pytest.mark.parametrize(
    ("who", "method", "at"),
    [
        ("rollout-1", "generate", 10),
        ("reward-0", "score", 9),
        ("reward_model-0", "score", 5),
        ("reference-0", "logprobs", 9),
        ("critic-0", "values", 9),
        ("critic-0", "applied", 3),
        ("trainer-0", "applied", 3),
    ],
)
def test_a_service_that_fails_ends_the_run_with_its_fault(tmp_path: Path, who: str, method: str, at: int) -> None:
    cast = Cast.make()
    cast.critic, cast.reward_model = FakeCritic(), FakeRewardModel()
    error = (
        DeadlineExceeded(who, method, "did not answer", 1.0) if method == "logprobs" else ServiceFault(who, method, "closed")
    )
    (port,) = (port for ports in cast._ports().values() for port in ports if port is not None and port.name == who)
    broken(port, method, at, error)
    folder = RunFolder(tmp_path, sections={"critic": config.Critic()})
    assert folder.fails(cast) is error
    assert not any(group.step is not None and group.step >= 3 for group in folder.groups())


def test_a_run_whose_replies_get_no_score_ends_with_the_rule_and_the_cause(tmp_path: Path) -> None:
    async def lost(scores: Scores, request: ScoreRequest) -> Scores:
        scores.valid[:] = 0
        scores.rules["gsm8k"][:] = np.nan
        return replace(scores, errors={"timeout": len(scores.valid)})

    cast = Cast.make()
    cast.reward = around(FakeReward(), "score", after=lost)
    folder = RunFolder(tmp_path)
    assert str(folder.fails(cast)).startswith(
        "reward: gsm8k: no reply of 3 steps in a row has a score; the last cause is timeout"
    )
    assert len(folder.points()) == 3


def test_a_resumed_run_may_have_smaller_steps_and_a_smaller_bound(tmp_path: Path) -> None:
    before = RunFolder(tmp_path, steps=9, staleness=4, sections={"checkpoint": config.Checkpoint(every=2)})
    cast = Cast.make()
    broken(cast.trainer, "applied", 3)
    assert before.fails(cast).service == "trainer-0"
    after = RunFolder(tmp_path, steps=9, staleness=1, groups_per_step=3)
    summary = after.run(Cast.make(seed=50), resume=str(after.checkpoint(2)))
    assert summary.staleness_max <= 1
    assert Counter(group.step for group in after.groups(Phase.RETIRED)) == {0: 4, 1: 4} | dict.fromkeys(range(2, 9), 3)
    for group in after.groups(Phase.RETIRED):
        if group.step is not None and group.step >= 2:
            assert group.oldest is not None
            assert group.step - group.oldest.step <= 1


# --------------------------------------------------------------------------------------------------------------------- lineages
T = TypeVar("T")
Moment = tuple[str, int]

SAVED = {"checkpoint": config.Checkpoint(every=3)}
STEPS = 12


class MortalModel(FakeModel):
    """Dies as the command `last` is posted."""

    last: Moment = ("", 0)

    def _post(self, name: str, step: int, work: Callable[[], Awaitable[T]]) -> Any:
        answer = super()._post(name, step, work)
        if (name, step) == self.last:
            self.die("was killed")
        return answer


class MortalTrainer(MortalModel, FakeTrainer):
    pass


class MortalCritic(MortalModel, FakeCritic):
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


@pytest.mark.parametrize(
    ("last", "newest", "staleness"),
    [
        (("accumulate", 9), {6, 9}, 2),  # posted ahead: the checkpoint of step 9 may be complete, or be written
        (("send_weights", 9), {6}, 0),
        (("save", 9), {6}, 2),
        (("save", STEPS), {9}, 0),
        (("export", 0), {STEPS}, 2),
    ],
)
def test_another_trainer_goes_on_from_a_checkpoint(tmp_path: Path, last: Moment, newest: set[int], staleness: int) -> None:
    """Evaluations after the checkpoint are made again, and those before are not."""
    sections = SAVED | {"evaluation": config.Evaluation(every=2, before=True, after=True, max_new_tokens=8)}
    folder = RunFolder(tmp_path, steps=STEPS, staleness=staleness, eval_problems=5, sections=sections)
    cast = Cast.make()
    troupe = Troupe(cast, last)
    rollouts = list(cast.rollouts)
    summary = folder.run(cast)
    step = begins(troupe.trainers[1])
    assert step in newest
    check_lineages(folder, troupe.trainers, step)
    assert folder.trained_problems() == folder.first_prompts(STEPS * folder.groups_per_step)
    assert (summary.steps, summary.stop_reason) == (STEPS, "all steps done")
    assert summary.staleness_max <= staleness
    assert summary.accuracy_before == summary.accuracy_after == 1.0
    assert sum(progress.phase == "evaluating" and progress.step == 0 for progress in folder.progress) == 5
    assert troupe.trainers[1].posted[0] == ("send_weights", step)
    for rollout in rollouts:  # the same ones
        assert not rollout.gone
        assert rollout.version == PolicyVersion(1, STEPS)


@pytest.mark.parametrize("critic_dies", [False, True])
def test_trainer_and_critic_go_back_together(tmp_path: Path, critic_dies: bool) -> None:
    sections = SAVED | {"critic": config.Critic()}
    folder, cast = RunFolder(tmp_path, steps=STEPS, sections=sections), Cast.make()
    troupe = Troupe(cast, ("apply", 5), ("apply", 8), critic=True, critic_dies=critic_dies)
    folder.run(cast)
    for models in (troupe.trainers, troupe.critics):
        check_lineages(folder, models, 3, 6)
        assert all(isinstance(model, FakeModel) and model.gone for model in models[:-1])
    assert "starts again with" in (troupe.trainers if critic_dies else troupe.critics)[0].gone


def run_to_the_bound(
    folder: RunFolder, cast: Cast, troupe: Troupe, meanwhile: Callable[[TrainingRun], Awaitable[None]]
) -> None:
    """Run, with `meanwhile` before a lost trainer comes back and once as many groups are ready as the bound allows."""
    runs = list[TrainingRun]()

    async def regroup() -> list[FakeTrainer | FakeCritic]:
        (run,) = runs
        await until(lambda: run.buffer.counts()["ready"] >= 3 * folder.groups_per_step)
        await meanwhile(run)
        return await troupe.regroup()

    async def course(run: TrainingRun) -> None:
        runs.append(run)

    cast.regroup = regroup
    folder.run(cast, course)


def test_generation_goes_on_to_the_bound_while_the_trainer_is_away(tmp_path: Path) -> None:
    folder, cast = RunFolder(tmp_path, steps=STEPS, sections=SAVED), Cast.make()
    troupe = Troupe(cast, ("apply", 5))
    made = list[dict[str, int]]()

    async def meanwhile(run: TrainingRun) -> None:
        await asyncio.sleep(0.02)  # it might go beyond
        made.append(run.buffer.counts())

    run_to_the_bound(folder, cast, troupe, meanwhile)
    check_lineages(folder, troupe.trainers, 3)
    assert made[0]["generating"] == made[0]["generated"] == made[0]["admitted"] == 0
    asked = Counter(request.group_id for rollout in cast.rollouts for request in rollout.requests)
    assert max(asked.values()) == 1  # what was made meanwhile was kept
    assert any(progress.phase == "recovering" and "was killed" in progress.detail for progress in folder.progress)


def held_by_nodes(cast: Cast) -> dict[str, Holder]:
    """Have an agent for each rollout hold the blobs of its groups. Returns the agents by rollout."""
    agents = {rollout.name: Holder(f"node of {rollout.name}", "127.0.0.1:1") for rollout in cast.rollouts}
    for rollout in cast.rollouts:

        async def named(group: GeneratedGroup, request: GroupRequest, agent: Holder = agents[rollout.name]) -> GeneratedGroup:
            return replace(group, holders=[agent])

        around(rollout, "_generate", after=named)
    return agents


def test_groups_whose_blobs_are_lost_with_their_nodes_are_generated_again(tmp_path: Path) -> None:
    """As the run goes back to a checkpoint. Others are kept, unless agents have forgotten what no step was to need any more."""
    folder, cast = RunFolder(tmp_path, steps=STEPS, sections=SAVED), Cast.make()
    agents, troupe = held_by_nodes(cast), Troupe(cast, ("apply", 5))
    folder.holders = {*agents.values()}
    waiting = dict[int, tuple[str, int]]()

    async def meanwhile(run: TrainingRun) -> None:
        waiting.update({each.group_id: (each.replica, each.deadline or 0) for each in run.buffer if each.generated is not None})
        folder.holders = {agents["rollout-0"]}

    run_to_the_bound(folder, cast, troupe, meanwhile)
    check_lineages(folder, troupe.trainers, 3)
    asked = Counter(request.group_id for rollout in cast.rollouts for request in rollout.requests)
    again = {group: asked[group] - 1 for group in waiting}
    assert again == {group: int(replica == "rollout-1" or due < 5) for group, (replica, due) in waiting.items()}
    assert {0, 1} == {*again.values()}


def test_a_group_whose_blob_the_reference_cannot_read_is_generated_again(tmp_path: Path) -> None:
    """While its replies are being scored."""
    folder, cast = RunFolder(tmp_path), Cast.prompt()
    failed, scoring = asyncio.Event(), asyncio.Event()

    async def lost(request: LogprobRequest) -> None:
        if request.group_id == 6 and not failed.is_set():
            await scoring.wait()
            failed.set()
            raise BlobLost("reference-0", "read", "no agent holds blob 06 any more")

    async def slow(request: ScoreRequest) -> None:
        if request.group_id == 6 and not failed.is_set():
            scoring.set()
            await failed.wait()

    around(cast.reference, "logprobs", before=lost)
    cast.reward = around(FakeReward(), "score", before=slow)
    folder.run(cast)
    check_books(folder, folder.steps)
    asked = Counter(request.group_id for rollout in cast.rollouts for request in rollout.requests)
    assert asked[6] == 2 and sum(asked.values()) == len(asked) + 1


def test_a_group_that_is_being_generated_is_generated_by_the_next_lineage(tmp_path: Path) -> None:
    """What version 0.5 is to generate is under way for ever."""
    folder, cast = RunFolder(tmp_path, steps=STEPS, sections=SAVED), Cast.prompt()

    async def slow(_: GroupRequest) -> None:
        if cast.rollouts[0].version == PolicyVersion(0, 5):
            await asyncio.Event().wait()

    for rollout in cast.rollouts:
        around(rollout, "_generate", slow)
    troupe = Troupe(cast, ("apply", 5))
    folder.run(cast)
    check_lineages(folder, troupe.trainers, 3)
    assert any(group.attempt > 1 for group in folder.groups(Phase.RETIRED))
    for group in folder.groups(Phase.RETIRED):  # none has tokens of both
        assert group.oldest is not None and group.newest is not None
        assert group.oldest.incarnation == group.newest.incarnation


@pytest.mark.parametrize(
    ("sections", "lasts", "begun"),
    [
        ({}, [("apply", 3), ("apply", 5)], (0, 0)),  # without a checkpoint it goes back to the beginning
        (SAVED, [("apply", 8), ("send_weights", 6), ("send_weights", 6)], (6, 6, 6)),
    ],
)
def test_one_that_dies_is_followed_by_another_also_before_it_has_published(
    tmp_path: Path, sections: dict[str, Any], lasts: list[Moment], begun: tuple[int, ...]
) -> None:
    folder, cast = RunFolder(tmp_path, steps=STEPS, sections=sections), Cast.make()
    troupe = Troupe(cast, *lasts)
    folder.run(cast)
    check_lineages(folder, troupe.trainers, *begun)
    assert cast.rollouts[0].version == PolicyVersion(len(begun), STEPS)
    assert folder.trained_problems() == folder.first_prompts(STEPS * folder.groups_per_step)


def test_a_run_that_gets_no_further_ends(tmp_path: Path) -> None:
    folder, cast = RunFolder(tmp_path, steps=STEPS, sections=SAVED), Cast.make()
    troupe = Troupe(cast, *[("apply", 8)] * 100)
    fault = folder.fails(cast)
    attempts = config.Trainer().restarts
    assert len(troupe.trainers) == attempts + 2  # the first, and those after which nothing was new
    assert (fault.service, fault.phase) == ("trainer-0", "run")
    assert fault.reason == f"was killed; {attempts + 1} times in a row before any step after 8"


def test_before_the_first_weight_sync_a_loss_ends_the_run(tmp_path: Path) -> None:
    cast = Cast.make()
    troupe = Troupe(cast, ("send_weights", 0))
    assert RunFolder(tmp_path).fails(cast).service == "trainer-0"
    assert len(troupe.trainers) == 1


def test_models_that_do_not_come_back_are_named_at_their_deadline(tmp_path: Path) -> None:
    restarts = config.Services(rollout=config.Rollout(replicas=2, max_num_seqs=16), trainer=config.Trainer(restarts=1))
    folder = RunFolder(tmp_path, steps=STEPS, sections=SAVED | {"services": restarts, "deadlines": config.Deadlines(start=0.2)})
    cast = Cast.make()
    Troupe(cast, ("apply", 8))

    async def regroup() -> list[FakeTrainer | FakeCritic]:
        return []

    cast.regroup = regroup
    assert str(folder.fails(cast)) == "trainer-0: restart: did not register again (deadline 0.7 s)"


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


def test_a_run_does_not_go_back_to_a_checkpoint_that_has_changed_since(tmp_path: Path) -> None:
    folder, cast = RunFolder(tmp_path, steps=STEPS, sections=SAVED), Cast.make()
    troupe = Troupe(cast, ("apply", 8))
    regroup = cast.regroup

    async def changed() -> list[FakeTrainer | FakeCritic]:
        (state,) = (path for path in folder.checkpoint(6).iterdir() if path.name != checkpoint.POSITION)
        state.write_bytes(bytes([state.read_bytes()[0] ^ 1]) + state.read_bytes()[1:])
        return await regroup()

    cast.regroup = changed
    with pytest.raises(
        UserError, match=r"^the run cannot go back to .*step-00000006: .* its checksum differs; run.resume=auto"
    ):
        folder.run(cast)
    assert [trainer.restored for trainer in troupe.trainers[1:]] == [""]


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
    """It trains the same groups again."""
    RunFolder(tmp_path, steps=12, sections={"checkpoint": config.Checkpoint(every=1, keep=20)}).run(Cast.make())
    folder, cast = RunFolder(tmp_path, steps=9, sections={"checkpoint": config.Checkpoint(every=1, keep=keep)}), Cast.make(50)
    before = {group.group_id: group.problem for group in folder.groups(Phase.RETIRED)}
    troupe = Troupe(cast, ("apply", 7))
    folder.run(cast, resume=str(folder.checkpoint(3)))
    check_books(folder, 9)
    assert {group.group_id: group.problem for group in folder.groups(Phase.RETIRED)}.items() <= before.items()
    assert troupe.trainers[1].restored in {str(folder.checkpoint(6)), str(folder.checkpoint(7))}
    assert checkpoint.steps(folder.path) == [8, 9][-keep:]
    assert checkpoint.resolve("auto", folder.path) == str(folder.checkpoint(9))
    assert folder.position(9).version.incarnation == 2
    left = sorted(path.parent.name for path in (folder.path / "checkpoints" / "dead-1").rglob(checkpoint.POSITION))
    assert left == [folder.checkpoint(step).name for step in range(4, 13)]


def test_a_checkpoint_being_completed_as_the_trainer_is_lost_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


# ----------------------------------------------------------------------------------------------------------------------- probes
PROBED = 8  # steps


@pytest.mark.parametrize("staleness", [0, 2])
def test_every_update_is_given_what_each_rollout_sampled_with_the_version_before_it(tmp_path: Path, staleness: int) -> None:
    folder, cast = RunFolder(tmp_path, steps=PROBED, staleness=staleness), Cast.make()
    summary = folder.run(cast)
    assert cast.trainer.probed == {step: [step, step] for step in range(PROBED)}
    for point in folder.points():
        assert (point["mismatch/probes"], point["mismatch/unanswered"], point["mismatch/worst_rollout"]) == (2, 0, 0)
    assert (summary.mismatch_alarm, summary.mismatch_alarms, summary.mismatch["probes"]) == ("", 0, 2 * PROBED)
    first, second = (rollout.probes for rollout in cast.rollouts)
    assert [(one.group_id, one.seed, one.prompt.tolist()) for one in first[:PROBED]] == [
        (one.group_id, one.seed, one.prompt.tolist()) for one in second[:PROBED]
    ]
    assert len({one.seed for one in first[:PROBED]}) == PROBED
    assert all(one.n == 1 and one.group_id < 0 and one.sampling.max_new_tokens == 8 for one in first)


class Gated(FakeRollout):
    """Answers the probe of version 0.3 once `gate` is set."""

    def __init__(self, cast: Cast):
        super().__init__("rollout-1", cast.weights)
        self.gate, self.waits = asyncio.Event(), asyncio.Event()
        cast.rollouts[1] = self

    async def probed(self, request: GroupRequest) -> GeneratedGroup:
        if self.version == PolicyVersion(0, 3):
            self.waits.set()
            await self.gate.wait()
        return await super().probed(request)


def test_an_update_waits_for_the_answers(tmp_path: Path) -> None:
    folder, cast = RunFolder(tmp_path, steps=PROBED), Cast.prompt()
    rollout = Gated(cast)

    async def course(run: TrainingRun) -> None:
        await rollout.waits.wait()
        await until(lambda: ("accumulate", 3) in cast.trainer.done)
        for _ in range(100):
            await asyncio.sleep(0)
        assert ("apply", 3) not in cast.trainer.posted
        rollout.gate.set()

    folder.run(cast, course)
    assert cast.trainer.probed == {step: [step, step] for step in range(PROBED)}


def test_who_does_not_answer_in_time_is_counted_and_nothing_else(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, steps=PROBED, sections={"weight_sync": config.WeightSyncConfig(commit_timeout=0.2)})
    cast = Cast.prompt()
    Gated(cast)
    summary = folder.run(cast)
    assert cast.trainer.probed == {step: [step] * (1 if step == 3 else 2) for step in range(PROBED)}
    assert [point["mismatch/unanswered"] for point in folder.points()] == [float(step == 3) for step in range(PROBED)]
    assert (summary.steps, summary.mismatch["unanswered"], summary.mismatch_alarms) == (PROBED, 1, 0)


def test_who_is_lost_meanwhile_is_counted_and_who_comes_instead_is_asked(tmp_path: Path) -> None:
    folder, cast = RunFolder(tmp_path, steps=PROBED), Cast.make()
    dies_at(cast.rollouts[1], "probed", 3)
    newcomer = FakeRollout("rollout-1", cast.weights, incarnation=1)

    async def course(run: TrainingRun) -> None:
        await until(lambda: bool(cast.rollouts[1].gone))
        run.pool.register.add("rollout", newcomer)

    folder.run(cast, course)
    assert sum(point["mismatch/unanswered"] for point in folder.points()) == 1
    assert newcomer.probes
    for step, versions in cast.trainer.probed.items():
        assert set(versions) == {step}


class Pretending(FakeRollout):
    """Says that it takes over new weights, and goes on with those that it had."""

    async def commit_weights(self, version: PolicyVersion, epoch: int) -> WeightsCommitted:
        before = self.has
        pause = await super().commit_weights(version, epoch)
        if version.step > 2:
            self.has = before
        return pause


def test_who_keeps_old_weights_is_named_in_progress_and_summary(tmp_path: Path) -> None:
    folder, cast = RunFolder(tmp_path, steps=PROBED), Cast.make()
    cast.rollouts[1] = Pretending("rollout-1", cast.weights, LongTail(1))
    states = []

    async def course(run: TrainingRun) -> None:
        while run.buffer.committed < PROBED:
            states.append((run.buffer.committed, run.context.history.alarm))
            await asyncio.sleep(0)

    summary = folder.run(cast, course)
    told = summary.mismatch_alarm
    assert told.startswith("rollout-1, version 0.3: ") and " 1 nats " in told and "mismatch.limit 0.2" in told
    assert summary.mismatch_alarms == PROBED - 3  # of the versions 3 to 7
    assert {progress.alarm for progress in folder.progress if progress.step <= 3} == {""}
    assert {progress.alarm for progress in folder.progress if progress.step >= 4} == {told}
    assert {alarm for step, alarm in states if step > 4} == {told}
    assert [point["mismatch/worst_rollout"] for point in folder.points()] == [0.0] * 3 + [1.0] * (PROBED - 3)


def test_an_alarm_ends_the_run_where_it_is_to(tmp_path: Path) -> None:
    folder: Any = RunFolder(tmp_path, steps=PROBED, sections={"mismatch": config.Mismatch(action="stop")})
    cast = Cast.make()
    cast.rollouts[1] = Pretending("rollout-1", cast.weights, LongTail(1))
    summary = folder.run(cast)
    assert summary.stop_reason.startswith("mismatch.action is stop: rollout-1, version 0.3: ")
    assert 3 < summary.steps < PROBED


@pytest.mark.parametrize("limit", [0.0, 1.5])
def test_no_alarm_is_raised_below_the_limit_or_without_one(tmp_path: Path, limit: float) -> None:
    folder: Any = RunFolder(tmp_path, steps=PROBED, sections={"mismatch": config.Mismatch(limit=limit)})
    cast = Cast.make()
    cast.rollouts[1] = Pretending("rollout-1", cast.weights, LongTail(1))
    summary = folder.run(cast)
    assert (summary.mismatch_alarm, summary.mismatch_alarms) == ("", 0)
    assert summary.mismatch["worst_rollout"] == 1.0
