"""Whole runs with a critic, over roles in memory: what it is asked, when, and what its failures lead to."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import Any

import pytest

from runtime import codec, config, run_files, timeouts
from runtime.algorithms.interfaces import ADVANTAGES, AdvantageEstimator
from runtime.commands import WeightsCommitted
from runtime.coordinator.run import TrainingRun
from runtime.errors import ServiceFault, UserError
from runtime.ledger import checkpoint
from runtime.ledger.position import Position
from runtime.ledger.states import Mark, Phase
from runtime.types import GeneratedGroup, GroupRequest, LogprobRequest, PolicyVersion, StepResult, ValueRequest
from tests.loopback.model_fakes import STATE, FakeCritic, FakeModel, FakeTrainer
from tests.loopback.pipeline_fakes import Cast, FakeReference, FakeRollout, LongTail, RunFolder

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
    for batch in cast.trainer.batches.values():
        for group in batch:
            assert group.values == b"values of payload %d" % group.group_id
            assert group.reference == b"reference payload %d" % group.group_id
    assert all(group.marks == Mark.SCORED | Mark.REFERENCED | Mark.VALUED for group in folder.groups(Phase.RETIRED))


def test_a_request_for_values_says_what_balances_it(tmp_path: Path) -> None:
    cast = with_critic(Cast.make())
    critic_folder(tmp_path, steps=3).run(cast)
    assert cast.critic is not None
    tokens = {group.group_id: group.tokens for batch in cast.trainer.batches.values() for group in batch}
    assert {request.group_id: request.tokens for request in cast.critic.asked} == tokens
    assert all(request.payload == b"payload %d" % request.group_id for request in cast.critic.asked)


def test_the_critics_metrics_join_the_trainers_and_replace_none(tmp_path: Path) -> None:
    folder = critic_folder(tmp_path, steps=3)
    folder.run(with_critic(Cast.make()))
    assert len(folder.points()) == 3
    for point in folder.points():
        assert (point["critic/loss"], point["actor/grad_norm"]) == (0.25, 1.0)
        assert point["timing/update_critic"] > 0
    assert any(point.get("timing/critic_model", 0.0) > 0 for point in folder.points())


def test_both_update_at_the_same_time(tmp_path: Path) -> None:
    meeting = [asyncio.Event(), asyncio.Event()]

    async def meet(own: int) -> None:
        meeting[own].set()
        await asyncio.wait_for(meeting[1 - own].wait(), PATIENCE)

    class Trainer(FakeTrainer):
        async def applied(self, step: int) -> StepResult:
            await meet(0)
            return await super().applied(step)

    class Critic(FakeCritic):
        async def applied(self, step: int) -> StepResult:
            await meet(1)
            return await super().applied(step)

    cast = with_critic(Cast.make(), Critic())
    cast.trainer = Trainer(cast.weights)
    assert critic_folder(tmp_path, steps=1).run(cast).steps == 1


def test_a_step_is_consumed_once_the_critic_has_applied_it_and_published_before(tmp_path: Path) -> None:
    published, gate = asyncio.Event(), asyncio.Event()

    class Rollout(FakeRollout):
        async def commit_weights(self, version: PolicyVersion, epoch: int) -> WeightsCommitted:
            if version.step == 2:
                published.set()
            return await super().commit_weights(version, epoch)

    class Critic(FakeCritic):
        async def applied(self, step: int) -> StepResult:
            if step == 1:
                await gate.wait()
            return await super().applied(step)

    async def course(run: TrainingRun) -> None:
        await asyncio.wait_for(published.wait(), PATIENCE)
        for _ in range(20):  # whatever could follow from it would have
            await asyncio.sleep(0)
        assert {group.state.phase for group in run.buffer if group.taken == 1} == {Phase.READY}
        assert ("apply", 2) not in cast.trainer.posted
        gate.set()

    cast = with_critic(Cast.prompt(), Critic())
    cast.rollouts = [Rollout(rollout.name, cast.weights) for rollout in cast.rollouts]
    assert critic_folder(tmp_path, steps=4).run(cast, course).steps == 4


# ---------------------------------------------------------------------------------------------- several updates a step


@pytest.mark.parametrize(("training", "expected"), [({"mini_batch_size": 2}, [0, 0, 1, 1]), ({"epochs": 2}, [0] * 4)])
def test_a_step_of_several_updates_is_given_whole_each_group_with_its_update(
    tmp_path: Path, training: dict[str, int], expected: list[int]
) -> None:
    gate = asyncio.Event()

    class Rollout(FakeRollout):
        """The last group of the step waits until the others have been there for a while."""

        async def generate(self, request: GroupRequest) -> GeneratedGroup:
            if request.group_id == 3:
                await gate.wait()
            return await super().generate(request)

    async def course(run: TrainingRun) -> None:
        while sum(group.state.phase == Phase.READY for group in run.buffer) < 3:  # noqa: ASYNC110 - the loop is turning
            await asyncio.sleep(0)
        gate.set()

    settings = config.Training(steps=1, staleness=0, groups_per_step=4, **training)
    cast = with_critic(Cast.prompt(), FakeCritic())
    cast.rollouts = [Rollout(rollout.name, cast.weights) for rollout in cast.rollouts]
    critic_folder(tmp_path, steps=1, sections={"training": settings}).run(cast, course)
    assert cast.trainer.posted.count(("accumulate", 0)) == 1
    assert [group.mini_batch for group in cast.trainer.batches[0]] == expected


# ---------------------------------------------------------------------------------------------- failures and resumes


class BrokenCritic(FakeCritic):
    """Fails in `phase`, of values for group 9 or of step 3."""

    def __init__(self, phase: str):
        super().__init__(LongTail(3, 0.001, 0.01))
        self._phase = phase

    def _fault(self) -> ServiceFault:
        return ServiceFault(self.name, self._phase, "connection lost")

    async def values(self, request: ValueRequest) -> bytes:
        if self._phase == "Values" and request.group_id == 9:
            raise self._fault()
        return await super().values(request)

    async def applied(self, step: int) -> StepResult:
        if self._phase == "Apply" and step == 3:
            raise self._fault()
        return await super().applied(step)


@pytest.mark.parametrize("phase", ["Values", "Apply"])
def test_a_critic_that_fails_ends_the_run_with_its_fault(tmp_path: Path, phase: str) -> None:
    folder = critic_folder(tmp_path)
    fault = folder.fails(with_critic(Cast.make(), BrokenCritic(phase)))
    assert (fault.service, fault.phase) == ("critic-0", phase)
    assert not any(group.step is not None and group.step >= 3 for group in folder.groups())


def test_a_resumed_run_keeps_the_values_that_it_has(tmp_path: Path) -> None:
    folder = critic_folder(tmp_path, steps=9, sections={"checkpoint": config.Checkpoint(every=2)})
    cast = with_critic(Cast.make(), BrokenCritic("Apply"))
    cast.reference = FakeReference(LongTail(1, 0.005))  # leaves groups that have values but are not ready
    assert folder.fails(cast).service == "critic-0"
    valued = {group.group_id for group in folder.groups() if group.marks & Mark.VALUED and "values" in group.handles}
    open_ = {group.group_id for group in folder.groups() if group.step is None or group.step >= 2}
    assert valued & open_
    again = with_critic(Cast.make(seed=50))
    folder.run(again, resume=str(folder.checkpoint(2)))
    assert again.critic is not None
    assert not {request.group_id for request in again.critic.asked} & valued
    assert again.critic.posted[0] == ("begin", 2)
    assert folder.trained_problems() == folder.first_prompts(36)
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
    class Reference(FakeReference):
        async def logprobs(self, request: LogprobRequest) -> bytes:
            raise AssertionError("nobody needs it")

    cast = Cast.prompt()
    cast.reference = Reference()
    sections = {"reference": config.Reference(mode="adapter_off"), "lora": config.Lora()}
    RunFolder(tmp_path, steps=2, sections=sections).run(cast)
    assert all(group.reference is None for batch in cast.trainer.batches.values() for group in batch)


# ---------------------------------------------------------------------------------------------- checkpoints

EVERY_TWO = {"checkpoint": config.Checkpoint(every=2, keep=9)}


def left(folder: RunFolder) -> set[str]:
    root = folder.path / run_files.CHECKPOINTS
    return {path.name for path in root.iterdir()} if root.exists() else set()


def test_a_checkpoint_is_what_trainer_and_critic_wrote_and_the_position(tmp_path: Path) -> None:
    folder = critic_folder(tmp_path, steps=4, sections=EVERY_TWO)
    folder.run(with_critic(Cast.make()))
    assert left(folder) == {"step-00000002", "step-00000004"}
    for step in (2, 4):
        saved = folder.checkpoint(step)
        assert (saved / STATE).read_text() == "trainer-0"
        assert (checkpoint.critic_state(saved) / STATE).read_text() == "critic-0"
        assert folder.position(step).version.step == step


def test_a_checkpoint_names_the_parts_of_which_ranks_speak_and_goes_by_the_runs_first_start(tmp_path: Path) -> None:
    folder, cast = critic_folder(tmp_path, steps=4, sections=EVERY_TWO), with_critic(Cast.make())
    (tmp_path / ".lock").write_bytes(b"\x12")
    assert cast.critic is not None
    cast.trainer.parts, cast.critic.parts = ["trainer/b", "trainer/c"], ["critic/b"]
    folder.run(cast)
    assert [folder.position(step).parts for step in (2, 4)] == [["trainer/b", "trainer/c", "critic/b"]] * 2
    for model in (cast.trainer, cast.critic):
        told = [(codec.decode(Position, place), keep) for place, keep in model.places]
        assert [(place.run, place.version.step, keep) for place, keep in told] == [("12", 2, ()), ("12", 4, (2,))]

    (tmp_path / ".lock").write_bytes(b"\x34")  # which each start writes anew
    cast = with_critic(Cast.make(seed=50))
    folder.run(cast, resume=str(folder.checkpoint(2)))
    (place, (incarnation,)), *saved = cast.trainer.places
    assert (codec.decode(Position, place).parts, incarnation) == (["trainer/b", "trainer/c", "critic/b"], 1)
    assert {codec.decode(Position, place).run for place, _ in saved} == {"12"}


def test_a_checkpoint_without_a_critic_cannot_be_resumed_with_one(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, steps=1)
    folder.run(Cast.prompt())
    with pytest.raises(UserError, match=r"run\.resume: .*step-00000001 has no folder critic: it was saved by a run without"):
        checkpoint.critic_state(folder.checkpoint(1))


def broken_writer(model: FakeModel, error: Exception) -> None:
    """`model` writes the checkpoint of step 2, and fails in that of step 4."""
    write = model.write

    async def fails(folder: Path) -> list[str]:
        parts = await write(folder)
        if "step-00000004" in str(folder):
            raise error
        return parts

    model.write = fails  # type: ignore[method-assign]


@pytest.mark.parametrize("who", ["trainer", "critic"])
@pytest.mark.parametrize(
    "error", [ServiceFault("the-one", "Save", "connection lost"), UserError("/run: no space left on device")], ids=str
)
def test_a_checkpoint_that_one_fails_to_write_is_not_there(tmp_path: Path, who: str, error: Exception) -> None:
    folder, cast = critic_folder(tmp_path, steps=9, sections=EVERY_TWO), with_critic(Cast.make())
    broken_writer(getattr(cast, who), error)
    with pytest.raises(type(error)) as caught:
        folder.run(cast)
    assert caught.value is error
    assert left(folder) == {"step-00000002"}
    again = with_critic(Cast.make(seed=50))
    folder.run(again, resume=str(folder.checkpoint(2)))
    assert left(folder) == {"step-00000002", "step-00000004", "step-00000006", "step-00000008", "step-00000009"}


def test_a_disk_that_is_full_when_the_checkpoint_is_completed(
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
    assert caplog.text.count("waits for room in") == 2


def test_a_run_that_fails_while_it_saves_leaves_no_part_of_the_checkpoint(tmp_path: Path) -> None:
    writing = asyncio.Event()

    class Critic(FakeCritic):
        async def write(self, folder: Path) -> list[str]:
            await super().write(folder)
            writing.set()
            await asyncio.Event().wait()
            return []

    class Rollout(FakeRollout):
        async def generate(self, request: GroupRequest) -> GeneratedGroup:
            if request.group_id >= 10:
                await writing.wait()
                raise ServiceFault(self.name, "Generate", "connection lost")
            return await super().generate(request)

    folder, cast = critic_folder(tmp_path, sections=EVERY_TWO), with_critic(Cast.make(), Critic())
    cast.rollouts = [Rollout(rollout.name, cast.weights) for rollout in cast.rollouts]
    assert folder.fails(cast).phase == "Generate"
    assert left(folder) == set()


def test_what_a_killed_coordinator_left_of_a_checkpoint_is_no_checkpoint_and_goes(tmp_path: Path) -> None:
    folder = critic_folder(tmp_path, steps=2, sections=EVERY_TWO)
    folder.run(with_critic(Cast.prompt()))
    torn = checkpoint.begin(folder.checkpoint(7))
    (torn / STATE).write_text("trainer-0")
    assert checkpoint.steps(tmp_path) == [2]
    longer = critic_folder(tmp_path, steps=3, sections=EVERY_TWO)
    longer.run(with_critic(Cast.prompt()), resume=str(folder.checkpoint(2)))
    assert left(folder) == {"step-00000002", "step-00000003"}
