"""Runs over roles in memory whose replicas are lost: what was theirs is done by others, and nothing is done twice."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from runtime import config
from runtime.coordinator.run import TrainingRun
from runtime.errors import Unanswered
from runtime.ledger.states import Phase
from runtime.status import Status
from runtime.types import GeneratedGroup, GroupRequest, LogprobRequest, ScoreRequest, Scores
from tests.loopback.pipeline_fakes import Cast, FakeReference, FakeReward, FakeRollout, LongTail, RunFolder


class Mortal(FakeRollout):
    """Dies as it is asked for its `last`th group. `asked` are the requests."""

    last = 0

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.asked: list[GroupRequest] = []
        self.died = asyncio.Event()

    async def generate(self, request: GroupRequest) -> GeneratedGroup:
        if request.purpose == "probe":
            return await super().generate(request)
        self.asked.append(request)
        if len(self.asked) == self.last:
            self.die("was killed")
            self.died.set()
        return await super().generate(request)


# Few slots, so that every rollout is given groups from the start.
SERVICES = config.Services(rollout=config.Rollout(replicas=2, slots=4))


def cast_of(*names: str) -> tuple[Cast, list[Mortal]]:
    """The last of the rollouts dies at its sixth group."""
    cast = Cast.make()
    seconds = LongTail(7, 0.002)
    rollouts = [Mortal(name, cast.weights, seconds) for name in names]
    rollouts[-1].last = 6
    cast.rollouts = [*rollouts]
    return cast, rollouts


def check_books(folder: RunFolder) -> None:
    """Each admitted group reached one final state; each step trained its groups, and no group is in two."""
    final = folder.groups()
    assert {group.phase for group in final} <= {Phase.RETIRED, Phase.DROPPED}
    steps = Counter(group.step for group in folder.groups(Phase.RETIRED))
    assert steps == dict.fromkeys(range(folder.steps), folder.groups_per_step)
    for group in folder.groups(Phase.RETIRED):
        assert group.oldest is not None and group.step is not None
        assert group.step - group.oldest.step <= folder.staleness


def total(folder: RunFolder, name: str) -> float:
    return sum(point[name] for point in folder.points() if name in point)


@pytest.mark.parametrize("staleness", [0, 2])
def test_the_groups_of_a_rollout_that_dies_are_made_by_another_from_the_same_seed(tmp_path: Path, staleness: int) -> None:
    cast, (other, mortal) = cast_of("rollout-0", "rollout-1")
    folder = RunFolder(tmp_path, staleness=staleness, sections={"services": SERVICES})
    folder.run(cast)
    check_books(folder)
    seeds = {request.group_id: request.seed for request in mortal.asked}
    repeated = [request for request in other.asked if request.group_id in seeds]
    assert repeated
    assert all(request.seed == seeds[request.group_id] for request in repeated)
    assert total(folder, "rollout/lost") == 1
    assert total(folder, "rollout/repeated_groups") == len(repeated)
    assert folder.points()[-1]["rollout/serving"] == 1


def test_what_comes_in_the_place_of_a_dead_rollout_serves_with_the_committed_version(tmp_path: Path) -> None:
    cast, (_, mortal) = cast_of("rollout-0", "rollout-1")
    late = Mortal("rollout-1", cast.weights, incarnation=1)
    committed = []

    async def course(run: TrainingRun) -> None:
        await mortal.died.wait()
        run.pool.register.add("rollout", late)
        while late not in run.pool.serving:  # noqa: ASYNC110 - the run's own deadline ends it
            await asyncio.sleep(0)
        committed.append(run.pool.membership.committed)
        assert late.version == committed[0]

    folder = RunFolder(tmp_path)
    folder.run(cast, course)
    check_books(folder)
    assert committed
    assert late.asked
    assert min(late.generated_by.values()) >= committed[0]
    assert folder.points()[-1]["publication/epoch"] >= 2


def test_a_run_whose_only_rollout_dies_goes_on_with_the_one_that_comes(tmp_path: Path) -> None:
    cast, (mortal,) = cast_of("rollout-0")

    async def course(run: TrainingRun) -> None:
        await mortal.died.wait()
        await asyncio.sleep(0.05)
        run.pool.register.add("rollout", FakeRollout("rollout-0", cast.weights, incarnation=1))

    folder = RunFolder(tmp_path)
    folder.run(cast, course)
    check_books(folder)


def test_without_any_rollout_the_run_ends_at_its_deadline_and_names_it(tmp_path: Path) -> None:
    cast, _ = cast_of("rollout-0")
    fault = RunFolder(tmp_path, sections={"deadlines": config.Deadlines(start=0.2)}).fails(cast)
    assert (fault.service, fault.phase, fault.deadline) == ("rollout-0", "run", 0.2)
    assert "was killed" in fault.reason


class Stopped(Mortal):
    """Answers nothing any more from its `last`th group on, as under SIGSTOP; its connection stays."""

    async def generate(self, request: GroupRequest) -> GeneratedGroup:
        if request.purpose != "probe":
            self.asked.append(request)
        if len(self.asked) < self.last:
            return await FakeRollout.generate(self, request)
        self.died.set()
        return await self.reached(asyncio.Event().wait())  # type: ignore[arg-type,return-value]

    async def status(self) -> Status:
        if self.died.is_set():
            raise Unanswered(self.name, "Status", "did not answer", 0.0)
        return await super().status()


def test_a_rollout_that_tells_nothing_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.timeouts.STATUS_INTERVAL", 0.02)
    cast, _ = cast_of("rollout-0")
    stopped = Stopped("rollout-1", cast.weights)
    stopped.last = 2
    cast.rollouts = [FakeRollout("rollout-0", cast.weights), stopped]

    # Nobody publishes while the step waits for the group that it holds: only its silence tells.
    folder = RunFolder(tmp_path, staleness=0, sections={"services": SERVICES, "deadlines": config.Deadlines(silence=1.0)})
    folder.run(cast)
    check_books(folder)
    assert [(loss.name, loss.incarnation) for loss in folder.losses] == [("rollout-1", 0)]
    assert "deadlines.silence" in folder.losses[0].reason


def test_an_evaluation_beside_training_survives_the_loss_of_a_rollout(tmp_path: Path) -> None:
    cast, _ = cast_of("rollout-0", "rollout-1")
    evaluation = config.Evaluation(every=2, before=True, after=True, max_new_tokens=8)
    folder = RunFolder(tmp_path, eval_problems=5, sections={"evaluation": evaluation})
    summary = folder.run(cast)
    check_books(folder)
    assert summary.accuracy_before == summary.accuracy_after == 1.0


class MortalReward(FakeReward):
    """Dies as it is asked for the third time."""

    asked = 0

    async def score(self, request: ScoreRequest) -> Scores:
        self.asked += 1
        if self.asked == 3:
            self.die("was killed")
        return await super().score(request)


class MortalReference(FakeReference):
    asked = 0

    async def logprobs(self, request: LogprobRequest) -> bytes:
        self.asked += 1
        if self.asked == 3:
            self.die("was killed")
        return await super().logprobs(request)


def dead(replica: FakeReward | FakeReference, then: Callable[[TrainingRun], None]) -> Callable[[TrainingRun], Awaitable[None]]:
    async def course(run: TrainingRun) -> None:
        while not replica.gone:  # noqa: ASYNC110 - the run's own deadline ends it
            await asyncio.sleep(0.001)
        then(run)

    return course


def test_requests_of_a_reward_and_a_reference_that_die_wait_for_those_that_come(tmp_path: Path) -> None:
    cast = Cast.make()
    reward = cast.reward = MortalReward()
    reference = cast.reference = MortalReference()

    async def course(run: TrainingRun) -> None:
        await dead(reward, lambda run: run.pool.register.add("reward", FakeReward(incarnation=1)))(run)
        await dead(reference, lambda run: run.pool.register.add("reference", FakeReference(incarnation=1)))(run)

    folder = RunFolder(tmp_path)
    folder.run(cast, course)
    check_books(folder)


def test_a_reward_that_dies_and_is_not_replaced_ends_the_run_by_name(tmp_path: Path) -> None:
    cast = Cast.make()
    cast.reward = MortalReward()
    fault = RunFolder(tmp_path, sections={"deadlines": config.Deadlines(start=0.2)}).fails(cast)
    assert fault.service == "reward"
    assert "reward-0: was killed" in fault.reason
