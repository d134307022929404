"""Runs of the pipeline's real logic over roles in memory, one of which fails: the run names it, and can go on."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from runtime import config
from runtime.commands import WeightsReceived, WeightsSent
from runtime.errors import DeadlineExceeded, ServiceFault
from runtime.ledger.states import Phase
from runtime.types import GeneratedGroup, GroupRequest, LogprobRequest, PolicyVersion, ScoreRequest, Scores, StepResult
from tests.loopback.pipeline_checks import check_books, check_order
from tests.loopback.pipeline_fakes import (
    Cast,
    FakeReference,
    FakeReward,
    FakeRollout,
    FakeTrainer,
    LongTail,
    RunFolder,
)


class BrokenRollout(FakeRollout):
    async def generate(self, request: GroupRequest) -> GeneratedGroup:
        if request.group_id >= 10:
            raise ServiceFault(self.name, "Generate", "connection lost")
        return await super().generate(request)


class BrokenReward(FakeReward):
    async def score(self, request: ScoreRequest) -> Scores:
        if request.group_id == 9:
            raise ServiceFault(self.name, "Score", "connection lost")
        return await super().score(request)


class BrokenReference(FakeReference):
    async def logprobs(self, request: LogprobRequest) -> bytes:
        if request.group_id == 9:
            raise DeadlineExceeded(self.name, "Logprobs", "did not answer", 1.0)
        return await super().logprobs(request)


class BrokenTrainer(FakeTrainer):
    async def applied(self, step: int) -> StepResult:
        if step == 3:
            raise ServiceFault(self.name, "Apply", "connection lost")
        return await super().applied(step)


def test_a_rollout_that_fails_ends_the_run_with_its_fault(tmp_path: Path) -> None:
    cast = Cast.make()
    cast.rollouts[1] = BrokenRollout("rollout-1", cast.weights)
    fault = RunFolder(tmp_path).fails(cast)
    assert (fault.service, fault.phase) == ("rollout-1", "Generate")


def test_a_reward_that_fails_ends_the_run_with_its_fault(tmp_path: Path) -> None:
    cast = Cast.make()
    cast.reward = BrokenReward()
    fault = RunFolder(tmp_path).fails(cast)
    assert (fault.service, fault.phase) == ("reward-0", "Score")


def test_a_reference_that_does_not_answer_ends_the_run_with_its_fault(tmp_path: Path) -> None:
    cast = Cast.make()
    cast.reference = BrokenReference()
    fault = RunFolder(tmp_path).fails(cast)
    assert (type(fault), fault.service, fault.deadline) == (DeadlineExceeded, "reference-0", 1.0)


def test_a_trainer_that_fails_ends_the_run_with_its_fault(tmp_path: Path) -> None:
    cast = Cast.make()
    cast.trainer = BrokenTrainer(cast.weights)
    fault = RunFolder(tmp_path).fails(cast)
    assert (fault.service, fault.phase) == ("trainer-0", "Apply")
    assert not any(group.step is not None and group.step >= 3 for group in RunFolder(tmp_path).groups())


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_run_that_failed_goes_on_from_its_newest_checkpoint(tmp_path: Path, seed: int) -> None:
    folder = RunFolder(tmp_path, steps=9, sections={"checkpoint": config.Checkpoint(every=2)})
    cast = Cast.make(seed)
    cast.trainer = BrokenTrainer(cast.weights)
    cast.reference = FakeReference(LongTail(seed, 0.005))  # leaves groups that are generated and not ready
    assert folder.fails(cast).service == "trainer-0"
    left = {group.group_id: group for group in folder.groups() if group.step is None or group.step >= 2}
    again = Cast.make(seed + 50)
    folder.run(again, resume=str(folder.checkpoint(2)))
    check_books(folder, 9)
    check_order(again.trainer, 2, 9)
    assert folder.trained_problems() == folder.first_prompts(36)
    # What was generated is not generated again, and what was not keeps its prompt and seed.
    kept = {number for number, group in left.items() if group.phase in (Phase.GENERATED, Phase.READY, Phase.CONSUMED)}
    assert kept
    assert not kept & again.generated_by().keys()
    after = {group.group_id: group for group in folder.groups()}
    assert all((after[i].problem, after[i].seed) == (group.problem, group.seed) for i, group in left.items())


def test_a_resumed_run_may_have_smaller_steps_and_a_smaller_bound(tmp_path: Path) -> None:
    before = RunFolder(tmp_path, steps=9, staleness=4, sections={"checkpoint": config.Checkpoint(every=2)})
    cast = Cast.make()
    cast.trainer = BrokenTrainer(cast.weights)
    assert before.fails(cast).service == "trainer-0"
    after = RunFolder(tmp_path, steps=9, staleness=1, groups_per_step=3)
    summary = after.run(Cast.make(seed=50), resume=str(after.checkpoint(2)))
    assert summary.staleness_max <= 1
    assert Counter(group.step for group in after.groups(Phase.RETIRED)) == {0: 4, 1: 4} | dict.fromkeys(range(2, 9), 3)
    for group in after.groups(Phase.RETIRED):
        if group.step is not None and group.step >= 2:
            assert group.oldest is not None
            assert group.step - group.oldest.step <= 1


class DeafRollout(FakeRollout):
    """From version 2 on, nothing about weights is answered."""

    async def receive_weights(self, version: PolicyVersion, epoch: int) -> WeightsReceived:
        received = await super().receive_weights(version, epoch)
        if version.step >= 2:
            await asyncio.Event().wait()
        return received

    async def abort_weights(self, version: PolicyVersion, epoch: int) -> None:
        await asyncio.Event().wait()


def test_a_receiver_that_never_verifies_is_left_out_and_the_run_goes_on(tmp_path: Path) -> None:
    cast = Cast.make()
    deaf = cast.rollouts[1] = DeafRollout("rollout-1", cast.weights)
    settings = config.Publication(transfer_timeout=4.0, commit_timeout=20.0, abort_timeout=4.0)
    folder = RunFolder(tmp_path, sections={"publication": settings})
    folder.run(cast)
    assert "verify: rollout-1: no answer within 4 s" in deaf.gone
    assert ("commit", 1) in deaf.calls
    assert ("commit", 2) not in deaf.calls
    assert ("abort", 2) in cast.trainer.calls
    aborts = {point["step"]: point["publication/aborts"] for point in folder.points()}
    assert {step: number for step, number in aborts.items() if number} == {2: 1.0}
    assert aborts.keys() == set(range(1, folder.steps + 1))


class SilentSender(FakeTrainer):
    async def send(self, version: PolicyVersion) -> WeightsSent:
        if version.step == 2:
            raise ServiceFault(self.name, "transfer", "the collective was torn")
        return await super().send(version)


def test_a_sender_that_fails_is_named(tmp_path: Path) -> None:
    cast = Cast.make()
    cast.trainer = SilentSender(cast.weights)
    fault = RunFolder(tmp_path).fails(cast)
    assert fault.phase == "publish"
    assert "transfer: trainer-0" in fault.reason
    assert "the collective was torn" in fault.reason
