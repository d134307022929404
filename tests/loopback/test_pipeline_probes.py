"""Runs over roles in memory: every version that rollouts have is probed, and who has other weights is named."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from runtime import config
from runtime.commands import WeightsCommitted
from runtime.coordinator.run import TrainingRun
from runtime.types import GeneratedGroup, GroupRequest, PolicyVersion
from tests.loopback.pipeline_fakes import Cast, FakeRollout, LongTail, RunFolder

STEPS = 8


@pytest.mark.parametrize("staleness", [0, 2])
def test_every_update_is_given_what_each_rollout_sampled_with_the_version_before_it(tmp_path: Path, staleness: int) -> None:
    folder, cast = RunFolder(tmp_path, steps=STEPS, staleness=staleness), Cast.make()
    summary = folder.run(cast)
    assert cast.trainer.probed == {step: [step, step] for step in range(STEPS)}
    for point in folder.points():
        assert (point["mismatch/probes"], point["mismatch/unanswered"], point["mismatch/worst_rollout"]) == (2, 0, 0)
    assert (summary.mismatch_alarm, summary.mismatch_alarms, summary.mismatch["probes"]) == ("", 0, 2 * STEPS)
    first, second = (rollout.probes for rollout in cast.rollouts)
    assert [(one.group_id, one.seed, one.prompt.tolist()) for one in first[:STEPS]] == [
        (one.group_id, one.seed, one.prompt.tolist()) for one in second[:STEPS]
    ]
    assert len({one.seed for one in first[:STEPS]}) == STEPS
    assert all(one.n == 1 and one.group_id < 0 and one.sampling.max_new_tokens == 8 for one in first)


class Gated(FakeRollout):
    """Answers the probe of version 0.3 once `gate` is set."""

    gate: asyncio.Event
    asked: asyncio.Event

    async def probed(self, request: GroupRequest) -> GeneratedGroup:
        if self.version == PolicyVersion(0, 3):
            self.asked.set()
            await self.gate.wait()
        return await super().probed(request)


def gated(cast: Cast) -> Gated:
    rollout = Gated("rollout-1", cast.weights)
    rollout.gate, rollout.asked = asyncio.Event(), asyncio.Event()
    cast.rollouts[1] = rollout
    return rollout


def test_an_update_waits_for_the_answers(tmp_path: Path) -> None:
    folder, cast = RunFolder(tmp_path, steps=STEPS), Cast.prompt()
    rollout = gated(cast)

    async def course(run: TrainingRun) -> None:
        await rollout.asked.wait()
        while ("accumulate", 3) not in cast.trainer.done:  # noqa: ASYNC110 - the run's own deadline ends it
            await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)
        assert ("apply", 3) not in cast.trainer.posted
        rollout.gate.set()

    folder.run(cast, course)
    assert cast.trainer.probed == {step: [step, step] for step in range(STEPS)}


def test_who_does_not_answer_in_time_is_counted_and_nothing_else(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, steps=STEPS, sections={"publication": config.Publication(commit_timeout=0.2)})
    cast = Cast.prompt()
    gated(cast)
    summary = folder.run(cast)
    assert cast.trainer.probed == {step: [step] * (1 if step == 3 else 2) for step in range(STEPS)}
    assert [point["mismatch/unanswered"] for point in folder.points()] == [float(step == 3) for step in range(STEPS)]
    assert (summary.steps, summary.mismatch["unanswered"], summary.mismatch_alarms) == (STEPS, 1, 0)


class Dying(FakeRollout):
    """Is lost as it is asked for its third probe."""

    async def probed(self, request: GroupRequest) -> GeneratedGroup:
        if len(self.probes) == 2:
            self.die("was killed")
        return await super().probed(request)


def test_who_is_lost_meanwhile_is_counted_and_who_comes_instead_is_asked(tmp_path: Path) -> None:
    folder, cast = RunFolder(tmp_path, steps=STEPS), Cast.make()
    cast.rollouts[1] = Dying("rollout-1", cast.weights)
    newcomer = FakeRollout("rollout-1", cast.weights, incarnation=1)

    async def course(run: TrainingRun) -> None:
        while not cast.rollouts[1].gone:  # noqa: ASYNC110 - the run's own deadline ends it
            await asyncio.sleep(0)
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
    folder, cast = RunFolder(tmp_path, steps=STEPS), Cast.make()
    cast.rollouts[1] = Pretending("rollout-1", cast.weights, LongTail(1))
    states = []

    async def course(run: TrainingRun) -> None:
        while run.buffer.committed < STEPS:
            states.append((run.buffer.committed, run._history.alarm))
            await asyncio.sleep(0)

    summary = folder.run(cast, course)
    told = summary.mismatch_alarm
    assert told.startswith("rollout-1, version 0.3: ") and " 1 nats " in told and "mismatch.limit 0.2" in told
    assert summary.mismatch_alarms == STEPS - 3  # of the versions 3 to 7
    assert {progress.alarm for progress in folder.progress if progress.step <= 3} == {""}
    assert {progress.alarm for progress in folder.progress if progress.step >= 4} == {told}
    assert {alarm for step, alarm in states if step > 4} == {told}
    assert [point["mismatch/worst_rollout"] for point in folder.points()] == [0.0] * 3 + [1.0] * (STEPS - 3)


@pytest.mark.parametrize("limit", [0.0, 1.5])
def test_no_alarm_is_raised_below_the_limit_or_without_one(tmp_path: Path, limit: float) -> None:
    folder: Any = RunFolder(tmp_path, steps=STEPS, sections={"mismatch": config.Mismatch(limit=limit)})
    cast = Cast.make()
    cast.rollouts[1] = Pretending("rollout-1", cast.weights, LongTail(1))
    summary = folder.run(cast)
    assert (summary.mismatch_alarm, summary.mismatch_alarms) == ("", 0)
    assert summary.mismatch["worst_rollout"] == 1.0
