"""Whole runs with dynamic sampling: groups without signal make room for others, and are neither lost, trained nor repeated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime import config
from runtime.coordinator.attempt import WHY_ENDED
from runtime.coordinator.group_pipeline import NO_SIGNAL
from runtime.ledger.reader import LedgerReader
from runtime.ledger.states import Phase
from runtime.types import LogprobRequest, ScoreRequest, Scores
from tests.loopback.pipeline_checks import check_books, check_order
from tests.loopback.pipeline_fakes import Cast, FakeReference, FakeReward, LongTail, RunFolder
from tests.loopback.test_pipeline import stopping
from tests.loopback.test_pipeline_faults import BrokenTrainer


class SomeSignal(FakeReward):
    """Every third group has replies of both kinds; the others are all right, or all wrong."""

    async def score(self, request: ScoreRequest) -> Scores:
        scores = await super().score(request)
        kind = request.group_id % 3
        rewards = np.array([kind % 2, 1 if kind == 2 else kind % 2], np.float32)
        return Scores(group_id=scores.group_id, rewards=rewards, valid=scores.valid, rules={"gsm8k": rewards})


class SignalUntilTwenty(SomeSignal):
    async def score(self, request: ScoreRequest) -> Scores:
        scores = await super().score(request)
        if request.group_id >= 20:
            scores.rewards[:] = 1.0
        return scores


def has_signal(group_id: int) -> bool:
    return group_id % 3 == 2


class NotedReference(FakeReference):
    def __init__(self, *args: Any):
        super().__init__(*args)
        self.asked: set[int] = set()

    async def logprobs(self, request: LogprobRequest) -> bytes:
        self.asked.add(request.group_id)
        return await super().logprobs(request)


def folder_of(path: Path, limit: int = 20, **settings: Any) -> RunFolder:
    algorithm = config.Algorithm(kl_coefficient=0.1, dynamic_sampling=True, dynamic_sampling_limit=limit)
    return RunFolder(path, sections={"algorithm": algorithm, **settings.pop("sections", {})}, **settings)


def make(seed: int = 0) -> tuple[Cast, NotedReference]:
    cast = Cast.make(seed)
    cast.reward = SomeSignal(LongTail(seed + 2))
    cast.reference = reference = NotedReference(LongTail(seed + 3))
    return cast, reference


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
    assert reference.asked == {group.group_id for group in folder.groups(Phase.RETIRED)}
    points = folder.points()
    assert sum(point["dynamic_sampling/dropped"] for point in points) == len(dropped)
    assert all(point["score/mean"] == 0.5 for point in points)
    kept = [point["dynamic_sampling/kept"] for point in points if "dynamic_sampling/kept" in point]
    assert all(0 <= share <= 1 for share in kept)
    # The rewards that it had are there to be looked at.
    assert {group.reward for group in folder.groups(Phase.DROPPED)} == {0.0, 1.0}


def test_without_it_the_same_groups_are_trained_on_and_the_reference_overlaps_the_reward(tmp_path: Path) -> None:
    cast, reference = make()
    folder = RunFolder(tmp_path, steps=3)
    summary = folder.run(cast)
    assert summary.dropped == {}
    assert folder.trained_problems() == folder.first_prompts(12)
    assert reference.asked == set(range(12))
    assert not any(name.startswith("dynamic_sampling") for point in folder.points() for name in point)


def test_a_run_whose_prompts_have_no_signal_ends_in_order(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, limit=3)
    cast = Cast.prompt()
    cast.reward = SignalUntilTwenty()
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


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_run_that_was_stopped_goes_on_with_the_prompts_that_follow(tmp_path: Path, staleness: int) -> None:
    folder = folder_of(tmp_path, steps=20, staleness=staleness)
    cast, course = stopping(make()[0], 6)
    steps = folder.run(cast, course).steps
    before = {group.group_id for group in folder.groups(Phase.DROPPED)}
    folder.run(make(50)[0], resume=str(folder.checkpoint(steps)))
    check_books(folder, 20)
    check_prompts(folder)
    assert before <= {group.group_id for group in folder.groups(Phase.DROPPED)}


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_after_a_failure_what_was_dropped_stays_dropped_and_nothing_is_trained_twice(tmp_path: Path, seed: int) -> None:
    folder = folder_of(tmp_path, steps=9, sections={"checkpoint": config.Checkpoint(every=2)})
    cast, _ = make(seed)
    cast.trainer = BrokenTrainer(cast.weights)
    assert folder.fails(cast).service == "trainer-0"
    before = {group.group_id: group.why for group in folder.groups(Phase.DROPPED)}
    assert set(before.values()) == {NO_SIGNAL}
    again, _ = make(seed + 50)
    folder.run(again, resume=str(folder.checkpoint(2)))
    check_books(folder, 9)
    check_order(again.trainer, 2, 9)
    check_prompts(folder)
    after = {group.group_id: group.why for group in folder.groups(Phase.DROPPED)}
    assert before.items() <= after.items()
    assert not before.keys() & again.generated_by().keys()


def test_what_a_run_kept_without_it_is_judged_when_it_is_resumed_with_it(tmp_path: Path) -> None:
    plain = RunFolder(tmp_path, steps=9, sections={"checkpoint": config.Checkpoint(every=2)})
    cast, _ = make()
    cast.trainer = BrokenTrainer(cast.weights)
    assert plain.fails(cast).service == "trainer-0"
    folder = folder_of(tmp_path, steps=9)
    folder.run(make(50)[0], resume=str(folder.checkpoint(2)))
    check_books(folder, 9)
    assert all(
        has_signal(group.group_id) for group in folder.groups(Phase.RETIRED) if group.step is not None and group.step >= 2
    )
