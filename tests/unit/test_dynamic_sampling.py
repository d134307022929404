"""Dynamic sampling over a real buffer: what is dropped is replaced, the bound holds, and a step without groups is told."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.coordinator.group_pipeline import NO_SIGNAL, DynamicSampling
from runtime.ledger.states import Phase
from runtime.types import Scores
from tests.unit.test_buffer import Harness, generated, ticket


def rewarded(group_id: int, *rewards: float, valid: tuple[int, ...] | None = None) -> Scores:
    mask = np.array(valid or (1,) * len(rewards), np.uint8)
    return Scores(group_id=group_id, rewards=np.array(rewards, np.float32), valid=mask)


class Sieve:
    """A buffer whose groups are judged; the buffer's `stop_reason` is why the run would end."""

    def __init__(self, limit: int = 1000, staleness: int = 1, per_step: int = 2):
        self.harness = Harness(staleness, per_step)
        self.buffer = self.harness.buffer
        self.sampling = DynamicSampling(self.buffer, limit)

    def dispatch(self, count: int) -> list[int]:
        first = max((change.group_id for change in self.harness.journal), default=-1) + 1
        self.harness.dispatch(*range(first, first + count))
        return list(range(first, first + count))

    def score(self, group_id: int, good: bool, oldest: int = 0) -> bool:
        self.buffer.generated(generated(group_id, oldest))
        scores = rewarded(group_id, 0.0, 1.0) if good else rewarded(group_id, 1.0, 1.0)
        self.buffer.scored(scores)
        self.sampling.judge(self.buffer[scores.group_id])
        return group_id in self.buffer


@pytest.mark.parametrize(
    ("scores", "kept"),
    [
        (rewarded(0, 0.0, 1.0), True),
        (rewarded(0, 0.3, 0.3, 0.4), True),
        (rewarded(0, 0.0, 0.0), False),
        (rewarded(0, 1.0, 1.0, 1.0), False),
        (rewarded(0, 0.0, 1.0, 1.0, valid=(0, 1, 1)), False),
        (rewarded(0, 0.0, 1.0, valid=(1, 0)), False),
        (rewarded(0, 0.0, 0.0, valid=(0, 0)), False),
    ],
)
def test_a_group_is_kept_when_its_valid_rewards_differ(scores: Scores, kept: bool) -> None:
    sieve = Sieve()
    sieve.dispatch(1)
    sieve.buffer.generated(generated(0, 0))
    sieve.buffer.scored(scores)
    sieve.sampling.judge(sieve.buffer[scores.group_id])
    assert (0 in sieve.buffer) is kept
    last = sieve.harness.journal[-1]
    assert (last.state.phase, last.state.why) == ((Phase.READY, None) if kept else (Phase.DROPPED, NO_SIGNAL))


def test_the_place_of_a_dropped_group_is_free_again_in_the_last_step_too() -> None:
    sieve = Sieve(staleness=1, per_step=2)
    first, second = sieve.dispatch(2)
    assert sieve.buffer.capacity(100, 1) == 0
    assert not sieve.score(first, good=False)
    assert sieve.buffer.capacity(100, 1) == 1
    assert sieve.buffer.room_changed.is_set()
    assert sieve.score(second, good=True)
    sieve.buffer.take(0)
    assert sieve.buffer.capacity(100, 1) == 1


def test_a_step_that_is_not_filled_is_told_at_the_limit() -> None:
    sieve = Sieve(limit=3)
    groups = sieve.dispatch(4)
    assert sieve.score(groups[0], good=True)  # one of the two that the step needs
    for group in groups[1:3]:
        sieve.score(group, good=False)
    assert sieve.buffer.stop_reason == ""
    sieve.score(groups[3], good=False)
    assert sieve.buffer.stop_reason == "too little signal: 3 groups with equal rewards dropped for one step"


def test_the_count_begins_anew_with_each_step() -> None:
    sieve = Sieve(limit=3, staleness=3)
    for step in range(3):
        groups = sieve.dispatch(4)
        for group, good in zip(groups, (False, False, True, True), strict=True):
            sieve.score(group, good)
        assert len(sieve.buffer.take(step)) == 2
    assert sieve.buffer.stop_reason == ""


def test_a_step_whose_groups_wait_for_the_trainer_is_not_given_up() -> None:
    sieve = Sieve(limit=3, staleness=4)
    groups = sieve.dispatch(10)
    for group in groups[:2]:
        sieve.score(group, good=True)
    for group in groups[2:]:
        sieve.score(group, good=False)
    assert sieve.buffer.stop_reason == ""


def test_the_metrics_are_of_the_groups_scored_since_the_step_before() -> None:
    sieve = Sieve(staleness=9)
    for group, good in zip(sieve.dispatch(4), (True, False, False, False), strict=True):
        sieve.score(group, good)

    def closed() -> tuple[float | None, ...]:
        found = sieve.sampling.close_step()
        return tuple(map(found.get, ("dynamic_sampling/dropped", "dynamic_sampling/kept", "train/num_gen_batches")))

    assert closed() == (3.0, 0.25, 2.0)  # four groups, with two to a step
    assert closed() == (0.0, None, 0.0)
    sieve.score(*sieve.dispatch(1), good=True)
    assert closed() == (0.0, 1.0, 0.5)


@given(
    staleness=st.integers(0, 4),
    per_step=st.integers(1, 4),
    steps=st.integers(1, 6),
    max_in_flight=st.sampled_from([1, 3, 100]),
    signal=st.sampled_from([0.1, 0.5, 0.9]),
    whole=st.booleans(),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60)
def test_every_step_is_filled_within_the_bound_whatever_is_dropped(
    staleness: int, per_step: int, steps: int, max_in_flight: int, signal: float, whole: bool, seed: int
) -> None:
    """Whatever happens next is drawn; nothing but `capacity` and `take` says what may be dispatched and taken."""
    sieve, random = Sieve(staleness=staleness, per_step=per_step), Random(seed)
    buffer, trained, admitted = sieve.buffer, 0, 0
    begun: dict[int, int] = {}  # the version at each running group's first token

    def dispatch() -> None:
        nonlocal admitted
        for _ in range(buffer.capacity(max_in_flight, steps)):
            buffer.admit(ticket(admitted))
            buffer.dispatch(admitted, "rollout-0")
            begun[admitted] = buffer.committed
            admitted += 1

    def finish() -> None:
        if begun:
            group = random.choice(list(begun))
            sieve.score(group, random.random() < signal, begun.pop(group))

    def take() -> None:
        if buffer.step < min(steps, trained + 2):
            buffer.take(buffer.step, whole)

    def train() -> None:
        nonlocal trained
        if trained < buffer.step:
            buffer.consume(trained)
            for group in buffer.taken(trained):
                assert group.generated is not None
                assert trained - group.generated.oldest.step <= staleness
            trained += 1
            buffer.commit(trained)

    for _ in range(100_000):
        if trained == steps:
            break
        random.choice((dispatch, finish, take, train))()
    counts = buffer.counts()
    assert (counts["retired"], len(buffer)) == (steps * per_step, 0)
    assert counts["dropped"] == admitted - steps * per_step
