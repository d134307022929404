"""The expected cost of a call at a rollout, by hand, and what a rollout is taken to hold."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import placement as placement_bench
from runtime.commands import PeerAddress
from runtime.gateway.placement import BLOCK, CROWDING, PlacedCall, RolloutCost, beginnings, cheapest
from runtime.types import RolloutLoad

pytestmark = pytest.mark.numeric

SLOTS = 4
PACE, SERVICE = 0.001, 2.0  # seconds a token, and of a reply
A, B = (PeerAddress(name, 0, "", "", SLOTS) for name in ("a", "b"))


def text(blocks: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, blocks * BLOCK + 3, dtype=np.int32)


def call(tokens: np.ndarray, n: int = 1) -> PlacedCall:
    return PlacedCall(len(tokens), n, beginnings(tokens))


def measured(samples: int = 0, room: int = 100 * BLOCK, used: float = 0.0, now: float = 10.0) -> RolloutCost:
    """A rollout that answered one call of 1,000 tokens, and then reports so many samples."""
    cost, first = RolloutCost(SLOTS), PlacedCall(1000, 1, [])
    cost.begin(first, now - SERVICE - 1000 * PACE)
    cost.end(first)
    cost.observe(first, RolloutLoad(cached=0, prefill_seconds=1000 * PACE, samples=samples, room=room, used=used), now)
    return cost


def test_the_cost_of_an_idle_rollout_is_the_prefill_of_what_it_lacks() -> None:
    cost, whole = measured(), text(8)
    crowd = SERVICE * CROWDING / SLOTS
    assert cost.seconds(call(whole), 10.0) == pytest.approx(len(whole) * PACE + crowd)
    cost.keep(beginnings(whole[: 5 * BLOCK + 7]))
    assert cost.seconds(call(whole), 10.0) == pytest.approx((3 * BLOCK + 3) * PACE + crowd)
    assert cost.seconds(call(whole[1:]), 10.0) == pytest.approx((len(whole) - 1) * PACE + crowd), "another text"


def test_the_cost_of_a_busy_rollout_has_its_queue_and_delays_what_is_there() -> None:
    cost, whole = measured(samples=9), text(8)
    load = (9 + 2) / SLOTS
    queue = SERVICE * (load - 1 + CROWDING * load)
    assert cost.seconds(call(whole, n=2), 10.0) == pytest.approx(len(whole) * PACE * (1 + 9) + queue)
    # Half of what others have there is taken for done after the time that it takes.
    load = (4.5 + 2) / SLOTS
    queue = SERVICE * (load - 1 + CROWDING * load)
    later = 10.0 + SERVICE * 9 / SLOTS
    assert cost.seconds(call(whole, n=2), later) == pytest.approx(len(whole) * PACE * (1 + 4.5) + queue)


def test_memory_counts_as_a_queue_where_samples_share_it() -> None:
    whole, room = text(8), 10 * BLOCK
    load = (0.75 * room + len(whole)) / room
    cost = measured(room=room, used=0.75)
    assert cost.seconds(call(whole), 10.0) == pytest.approx(len(whole) * PACE + SERVICE * (load - 1 + CROWDING * load))


def test_own_calls_are_not_counted_twice() -> None:
    costs = [measured(), measured()]
    own, last = [call(text(2, seed)) for seed in range(6)], call(text(2, 7))
    for cost in costs:
        for each in (*own, last):
            cost.begin(each, 10.0)
        cost.end(last)
    costs[1].observe(last, RolloutLoad(cached=0, prefill_seconds=last.prompt * PACE, samples=6, room=100 * BLOCK), 10.0)
    assert costs[1]._others.tolist() == [0, 0]
    for cost in costs:
        for each in own:
            cost.end(each)
        assert cost._own.tolist() == [0, 0]


def test_what_an_engine_does_not_find_is_held_less_and_less() -> None:
    cost, whole = measured(), text(8)
    cost.keep(beginnings(whole))
    costs = []
    for _ in range(50):
        costs.append(cost.seconds(call(whole), 10.0))
        sent = call(whole)
        cost.begin(sent, 10.0)
        cost.end(sent)
        took = len(whole) * PACE
        cost.observe(sent, RolloutLoad(cached=0, prefill_seconds=took, room=100 * BLOCK), 10.0 + SERVICE + took)
    assert sorted(costs) == costs
    assert costs[-1] - costs[0] == pytest.approx(8 * BLOCK * PACE, rel=0.02)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), max_size=30), st.integers(0, 12))
def test_no_more_is_held_than_fits_and_the_newest_stays(kept: list[tuple[int, int]], blocks: int) -> None:
    cost = measured(room=blocks * BLOCK + BLOCK - 1)
    for seed, length in kept:
        newest = text(length, seed)
        cost.keep(beginnings(newest))
        assert len(cost.texts) <= blocks
        assert cost._found(call(newest)) == min(length, blocks) * BLOCK


def test_a_call_moves_when_the_queue_costs_more_than_its_prefill() -> None:
    whole = text(8)
    for samples, expected in ((0, A), (3, A), (9, B)):
        costs = {A: measured(samples), B: measured()}
        costs[A].keep(beginnings(whole[: 7 * BLOCK]))
        assert cheapest(costs, call(whole), 10.0, "a") is expected, samples


def test_equal_rollouts_leave_a_conversation_where_it_is_and_new_ones_go_round() -> None:
    costs = {A: RolloutCost(SLOTS), B: RolloutCost(SLOTS)}
    assert cheapest(costs, call(text(1)), 0.0, "b") is B
    placed = []
    for seed in range(6):
        new = call(text(1, seed))
        placed.append(cheapest(costs, new, 0.0, ""))
        costs[placed[-1]].begin(new, 0.0)
    assert placed == [A, B] * 3


def test_conversations_at_twice_the_slots_find_their_texts_and_no_rollout_idles() -> None:
    """In the bench's simulated engines: one serves alone at first, and one is lost."""
    load = placement_bench.PlacementLoad("", 64, 8, 300_000)
    settings = placement_bench.PlacementSettings(loads=(load,), seconds=200.0, swap=80.0, seeds=(0,))
    report = asyncio.run(placement_bench.measure(Path(), settings))
    sticky, least, cost = report.results
    assert cost.hits >= 0.9 > least.hits
    assert cost.idle < 0.02 < 0.1 < sticky.idle
    assert cost.tokens_per_second > 1.1 * max(sticky.tokens_per_second, least.tokens_per_second)
