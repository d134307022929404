"""How many groups are under way at once: the rules, and the depth of the pipeline."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.coordinator.gateways import AFTER_CUT, LOOKS, START, TRIMMED, Concurrency, concurrency_of
from runtime.coordinator.metrics_recorder import Load
from runtime.coordinator.run import depth_of
from runtime.coordinator.staleness import FIRST, STEPS, MovingMoments, PipelineDepth, most_live
from tests.unit.config_cases import Loading

SIZE, SLOTS = 4, 64
FREE = 1 << 30  # groups: no bound


def load(**told: float) -> Load:
    """Full slots, and half as many again that wait; a cycle of calls at each look."""
    whole = {"slots": SLOTS, "running": SLOTS, "waiting": 0.6 * SLOTS, "kv_use": 0.0, "preempted": 0, "unasked": 0}
    return Load(**{**whole, "calls": 100, "episodes": 100, **told})  # type: ignore[arg-type]


def after(policy: Concurrency, *told: Load, groups: int | None = None) -> float:
    """x, after a cycle of each, with as many groups under way as there may be."""
    for each in told:
        for _ in range(LOOKS if policy._slots else LOOKS + 1):  # at the first look it learns of the slots
            policy.look(each, policy.limit(each.slots) if groups is None else groups)
    return policy.per_slot


def test_it_begins_with_what_plain_replies_have_and_does_not_grow_where_something_else_bounds() -> None:
    policy = Concurrency(SIZE, FREE)
    assert policy.limit(SLOTS) == 2 * SLOTS // SIZE + 1
    assert after(policy, load()) == START, "slots are full, and as many wait as are to"
    assert after(policy, load(running=20, waiting=0), groups=policy.limit(SLOTS) - 1) == START
    bounded = Concurrency(SIZE, 40)
    after(bounded, *[load(running=0, waiting=0)] * 100)  # idle for ever
    assert bounded.limit(SLOTS) == 40
    assert bounded.per_slot <= 2 * 40 * SIZE / SLOTS


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({"running": 0, "waiting": 0}, 2 * START),
        ({"running": 20, "waiting": 0}, 2 * START),
        ({"running": 20, "waiting": 0, "kv_use": 0.4}, START * 0.6 / 0.4),
        ({"running": 48, "waiting": 0}, START * (64 + 8) / 48),
        ({"running": 60, "waiting": 20}, START * (80 + 8) / 80),
        ({"running": 60, "waiting": 10, "kv_use": 0.6}, START),
        ({"running": 60, "waiting": 10, "kv_use": 0.7}, START),
        ({"running": 60, "waiting": 10, "preempted": 2}, START),
        ({"running": 20, "waiting": 0, "unasked": 3}, START),
        ({"running": 20, "waiting": 0, "calls": 10}, START),
        ({"waiting": 2 * SLOTS}, START * TRIMMED),
        ({"kv_use": 0.85}, START * TRIMMED),
        ({"kv_use": 0.95}, START * AFTER_CUT),
    ],
)
def test_a_cycle_of_calls_changes_it_once(told: dict[str, float], expected: float) -> None:
    assert after(Concurrency(SIZE, FREE), load(**told)) == pytest.approx(expected, rel=0.04)


def test_a_cut_is_made_at_once_and_waits_until_it_has_taken_effect() -> None:
    policy = Concurrency(SIZE, FREE)
    before = policy.limit(SLOTS)
    policy.look(load(), before)
    for _ in range(20):
        policy.look(load(preempted=4), before)
    assert policy.limit(SLOTS) < before
    assert policy.per_slot == pytest.approx(START * AFTER_CUT, rel=0.04)
    policy.look(load(preempted=4), policy.limit(SLOTS))
    assert policy.per_slot == pytest.approx(START * AFTER_CUT**2, rel=0.1)


def test_it_goes_on_with_what_an_earlier_coordinator_has_left() -> None:
    policy = Concurrency(SIZE, FREE)
    policy.look(load(), groups=200)
    assert 200 <= policy.limit(SLOTS) <= 201
    assert policy.limit(SLOTS // 2) == 101


def test_after_a_decrease_it_grows_by_an_eighth_but_where_half_of_the_slots_stand_empty() -> None:
    policy = Concurrency(SIZE, FREE)
    before = after(policy, load(waiting=2 * SLOTS), load())
    assert after(policy, load(running=36, waiting=0)) == pytest.approx(before * 1.125)
    assert after(policy, load(running=30, waiting=0)) == pytest.approx(2 * before * 1.125)
    for _ in range(100):  # from the least it comes back
        policy.look(load(preempted=SLOTS), policy.limit(SLOTS))
    assert policy.limit(SLOTS) == 1
    after(policy, *[load(running=2, waiting=0)] * 2)
    assert policy.limit(SLOTS) == 3


def test_a_decrease_counts_from_what_is_under_way() -> None:
    policy = Concurrency(SIZE, FREE)
    after(policy, *[load(running=20, waiting=0)] * 3)
    assert policy.per_slot == 2**3 * START
    policy.look(load(preempted=SLOTS), groups=SLOTS // SIZE)
    assert policy.per_slot == pytest.approx(AFTER_CUT)


def test_without_a_gateway_there_is_none_and_with_one_its_episodes_bound_it(loading: Loading) -> None:
    assert concurrency_of(loading("run: {name: a}")) is None
    bounded = concurrency_of(loading("run: {name: a}", "gateway={episodes: 40}", "services.gateway.replicas=2"))
    assert bounded is not None
    assert bounded.limit(10_000) == 2 * 40 // 8


NUMBERS = st.floats(0, 1e4)
LOADS = st.builds(
    Load,
    slots=st.integers(1, 2000),
    running=NUMBERS,
    waiting=NUMBERS,
    kv_use=st.floats(0, 1),
    preempted=NUMBERS,
    calls=NUMBERS,
    episodes=NUMBERS,
    unasked=st.sampled_from([0, 0, 1]),
)


@given(st.lists(st.tuples(LOADS, st.integers(0, 500)), max_size=60), st.integers(1, 32), st.integers(1, 300))
def test_whatever_it_is_told_a_group_is_played_and_the_bound_holds(told: list[tuple[Load, int]], size: int, most: int) -> None:
    policy = Concurrency(size, most)
    policy.look(load(), 0)
    for each, groups in told:
        before = policy.limit(each.slots)
        policy.look(each, groups)
        assert 1 <= policy.limit(each.slots) <= most
        assert policy.limit(each.slots) <= 2 * before + 1
        assert policy.limit(each.slots) >= min(before, groups) * AFTER_CUT - 1


# -------------------------------------------------------------------------------------------------------- depth of the pipeline
GROUPS, STALENESS = 8, 8
BOUND = most_live(STALENESS, GROUPS)


def depth_after(seconds: list[float], step: float, size: int = GROUPS, **options: bool) -> PipelineDepth:
    depth = PipelineDepth(size, most_live(STALENESS, size), **options)
    for each in seconds:
        depth.became_ready(each)
    depth.stepped(step)
    return depth


def test_until_both_times_are_known_a_few_steps_groups_are_admitted() -> None:
    depth = PipelineDepth(GROUPS, BOUND)
    assert depth.target == FIRST * GROUPS
    depth.stepped(1.0)
    for _ in range(GROUPS - 1):
        depth.became_ready(0.1)
    assert depth.target == FIRST * GROUPS
    depth.became_ready(0.1)
    assert depth.target == 2 * GROUPS


@pytest.mark.parametrize(
    ("latency", "step", "expected"),
    [
        (0.1, 1.0, 2 * GROUPS),  # those that are trained, and those that the next step needs
        (1.0, 1.0, 2 * GROUPS),
        (1.5, 1.0, 20),
        (3.0, 0.5, 7 * GROUPS),
        (30.0, 1.0, BOUND),
        (1.0, 0.0, FIRST * GROUPS),
    ],
)
def test_as_many_as_become_ready_while_a_step_is_made(latency: float, step: float, expected: int) -> None:
    assert depth_after([latency] * GROUPS, step).target == expected


def test_a_batch_that_is_sent_whole_waits_for_its_slowest_group_and_one_in_parts_for_most() -> None:
    seconds = [0.5, 1.5] * GROUPS
    slowest = np.mean(seconds) + np.std(seconds) * math.sqrt(2 * math.log(GROUPS))
    whole = depth_after(seconds, 1.0, streams=False)
    assert whole.slowest == pytest.approx(slowest, rel=1e-12)
    assert whole.target == round(GROUPS * (1 + slowest)) == 24
    assert depth_after(seconds, 1.0).target == GROUPS * (1 + 1.5)
    assert depth_after([0.5, 1.5], 1.0, size=1, streams=False).target == 2, "the largest of one number is the mean"


def test_what_was_dropped_makes_the_next_one_late() -> None:
    depth = PipelineDepth(GROUPS, BOUND)
    for _ in range(GROUPS):
        depth.dropped(1.0)
        depth.dropped(1.0)
        depth.became_ready(1.0)
    depth.stepped(1.0)
    assert depth.target == GROUPS * (1 + 3)


def test_times_that_change_are_followed() -> None:
    depth = depth_after([4.0] * GROUPS, 1.0)
    assert depth.target == 5 * GROUPS
    targets = []
    for _ in range(6 * STEPS):
        for _ in range(GROUPS):
            depth.became_ready(0.5)
        depth.stepped(1.0)
        targets.append(depth.target)
    assert targets[-1] == 2 * GROUPS
    assert all(later <= earlier for earlier, later in itertools.pairwise(targets[STEPS:]))
    moments, values = MovingMoments(20), np.random.default_rng(3).normal(5.0, 2.0, 20)
    for value in values:  # those of the first numbers are plain ones
        moments.add(float(value))
    assert math.isclose(moments.mean, values.mean(), rel_tol=1e-12)  # 20 additions in float64
    assert math.isclose(moments.variance, values.var(), rel_tol=1e-12)
    moments = MovingMoments(0.5)
    for value in (3.0, 5.0):  # the latest alone counts
        moments.add(value)
    assert (moments.mean, moments.variance) == (5.0, 0.0)


def test_where_the_bound_says_how_many(loading: Loading) -> None:
    colocated = "{colocate: trainer}"
    for overrides, measures in (((), True), (("training.depth=bound",), False), ((f"services.rollout={colocated}",), False)):
        config = loading("run: {name: a}", *overrides)
        depth, bound = depth_of(config), most_live(config.training.staleness, config.training.groups_per_step)
        for _ in range(config.training.groups_per_step):
            depth.became_ready(1.0)
        depth.stepped(1.0)
        assert (depth.target < bound) == measures
