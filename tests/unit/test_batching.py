"""Micro-batches and the balancing of loads."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.batching import balance, balance_each, length_buckets, micro_batches
from runtime.config import Optimizer
from runtime.engines.lr_schedule import learning_rate

LENGTHS = st.lists(st.integers(1, 100), max_size=40)


def test_micro_batches_are_cut_by_padded_size():
    # 2 x 5, then 2 x 8, then the 9 alone: three rows of 9 would be 27 tokens.
    assert micro_batches([8, 3, 9, 5, 7], budget=16) == [[1, 3], [4, 0], [2]]


@given(LENGTHS, st.integers(1, 300))
def test_micro_batches_hold_everything_once_and_fit(lengths: list[int], budget: int):
    batches = micro_batches(lengths, budget)
    flat = list(itertools.chain.from_iterable(batches))
    assert sorted(flat) == list(range(len(lengths)))
    assert [lengths[i] for i in flat] == sorted(lengths)
    assert all(len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= budget for batch in batches)


@given(LENGTHS, st.floats(1, 4))
def test_length_buckets_bound_the_spread(lengths: list[int], ratio: float):
    ascending = sorted(lengths)
    sizes = length_buckets(ascending, ratio)
    assert sum(sizes) == len(lengths)
    begin = 0
    for size in sizes:
        assert ascending[begin + size - 1] <= ratio * ascending[begin] or size == 1
        begin += size


def test_balance_beats_greedy_where_differencing_does():
    # Greedy, largest first: {8, 5, 4} and {7, 6}; Karmarkar-Karp: 16 and 14.
    parts = balance([8, 7, 6, 5, 4], 2)
    assert sorted(sum([8, 7, 6, 5, 4][i] for i in part) for part in parts) == [14, 16]


@pytest.mark.parametrize(("costs", "parts"), [([], 3), ([5], 3), ([1, 2], 2)])
def test_balance_of_few_items(costs: list[float], parts: int):
    shared = balance(costs, parts)
    assert len(shared) == parts
    assert sorted(itertools.chain.from_iterable(shared)) == list(range(len(costs)))
    assert max((len(part) for part in shared), default=0) <= 1


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(1, 8))
def test_balance_spread_is_at_most_the_largest_item(costs: list[int], parts: int):
    shared = balance(costs, parts)
    sums = [sum(costs[i] for i in part) for part in shared]
    assert sorted(itertools.chain.from_iterable(shared)) == list(range(len(costs)))
    assert max(sums) - min(sums) <= max(costs)
    assert shared == balance(costs, parts)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.775, 0.55, 0.325, 0.1]),
        ("cosine", [0.5, 1.0, 1.0, 0.1 + 0.9 * 0.8535533905932737, 0.55, 0.1 + 0.9 * 0.14644660940672624, 0.1]),
    ],
)
def test_learning_rate(schedule: str, expected: list[float]):
    options = Optimizer(learning_rate=1.0, min_learning_rate=0.1, schedule=schedule, warmup_steps=2)
    assert [learning_rate(step, 6, options) for step in range(7)] == pytest.approx(expected)
    assert learning_rate(100, 6, options) == pytest.approx(expected[-1])


def test_each_kind_is_shared_out_for_itself() -> None:
    costs, kinds = [9, 1, 5, 5, 1, 9, 4, 4], [0, 0, 1, 1, 0, 0, 1, 1]
    shares = balance_each(costs, kinds, 2)
    assert sorted(index for share in shares for index in share) == list(range(8))
    assert all(share == sorted(share) for share in shares)
    for kind, half in ((0, 10), (1, 9)):
        assert [sum(costs[i] for i in share if kinds[i] == kind) for share in shares] == [half, half]
    assert balance_each([], [], 3) == [[], [], []]
    assert sorted(map(len, balance_each([1, 1], [0, 1], 2))) == [0, 2]  # fewer items of a kind than parts
