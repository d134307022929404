"""How many groups are under way, of measured times: against hand-made pipelines, and what numpy says of the moments."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from runtime.coordinator.admission.depth import FIRST, STEPS, MovingMoments, PipelineDepth, depth_of
from runtime.coordinator.staleness import most_live
from tests.unit.config_cases import Loading

SIZE, STALENESS = 8, 8
BOUND = most_live(STALENESS, SIZE)


def measured(seconds: list[float], step: float, size: int = SIZE, streams: bool = True) -> PipelineDepth:
    depth = PipelineDepth(size, most_live(STALENESS, size), streams=streams)
    for each in seconds:
        depth.became_ready(each)
    depth.stepped(step)
    return depth


def test_until_both_times_are_known_a_few_steps_groups_are_admitted() -> None:
    depth = PipelineDepth(SIZE, BOUND)
    assert depth.target == FIRST * SIZE
    depth.stepped(1.0)
    for _ in range(SIZE - 1):
        depth.became_ready(0.1)
    assert depth.target == FIRST * SIZE
    depth.became_ready(0.1)
    assert depth.target == 2 * SIZE


@pytest.mark.parametrize(
    ("latency", "step", "expected"),
    [
        (0.1, 1.0, 2 * SIZE),  # those that are trained, and those that the next step needs
        (1.0, 1.0, 2 * SIZE),
        (1.5, 1.0, 20),
        (3.0, 0.5, 7 * SIZE),
        (30.0, 1.0, BOUND),
        (1.0, 0.0, FIRST * SIZE),
    ],
)
def test_as_many_as_become_ready_while_a_step_is_made(latency: float, step: float, expected: int) -> None:
    assert measured([latency] * SIZE, step).target == expected


def test_a_batch_that_is_sent_whole_waits_for_its_slowest_group_and_one_in_parts_for_most() -> None:
    seconds = [0.5, 1.5] * SIZE
    slowest = np.mean(seconds) + np.std(seconds) * math.sqrt(2 * math.log(SIZE))
    whole = measured(seconds, 1.0, streams=False)
    assert whole.slowest == pytest.approx(slowest, rel=1e-12)
    assert whole.target == round(SIZE * (1 + slowest)) == 24
    assert measured(seconds, 1.0).target == SIZE * (1 + 1.5)
    assert measured([0.5, 1.5], 1.0, size=1, streams=False).target == 2, "the largest of one number is the mean"


def test_what_was_dropped_makes_the_next_one_late() -> None:
    depth = PipelineDepth(SIZE, BOUND)
    for _ in range(SIZE):
        depth.dropped(1.0)
        depth.dropped(1.0)
        depth.became_ready(1.0)
    depth.stepped(1.0)
    assert depth.target == SIZE * (1 + 3)


def test_times_that_change_are_followed() -> None:
    depth = measured([4.0] * SIZE, 1.0)
    assert depth.target == 5 * SIZE
    targets = []
    for _ in range(6 * STEPS):
        for _ in range(SIZE):
            depth.became_ready(0.5)
        depth.stepped(1.0)
        targets.append(depth.target)
    assert targets[-1] == 2 * SIZE
    assert all(later <= earlier for earlier, later in itertools.pairwise(targets[STEPS:]))


def test_the_moments_of_the_first_numbers_are_plain_ones() -> None:
    moments, values = MovingMoments(20), np.random.default_rng(3).normal(5.0, 2.0, 20)
    for value in values:
        moments.add(float(value))
    assert math.isclose(moments.mean, values.mean(), rel_tol=1e-12)  # 20 additions in float64
    assert math.isclose(moments.variance, values.var(), rel_tol=1e-12)


def test_where_the_bound_says_how_many(loading: Loading) -> None:
    colocated = "{colocate: trainer}"
    for overrides, measures in (((), True), (("training.depth=bound",), False), ((f"services.rollout={colocated}",), False)):
        config = loading("run: {name: a}", *overrides)
        depth, bound = depth_of(config), most_live(config.training.staleness, config.training.groups_per_step)
        for _ in range(config.training.groups_per_step):
            depth.became_ready(1.0)
        depth.stepped(1.0)
        assert (depth.target < bound) == measures
