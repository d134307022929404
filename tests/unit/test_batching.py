"""Micro-batches and the balancing of loads."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.config import Optimizer
from runtime.trainer.rows import balance, balance_each, cut_by_length, length_buckets
from runtime.trainer.step import learning_rate

LENGTHS = st.lists(st.integers(1, 100), max_size=40)


def test_micro_batches_are_cut_by_padded_size():
    # 2 x 5, then 2 x 8, then the 9 alone: three rows of 9 would be 27 tokens.
    assert cut_by_length([8, 3, 9, 5, 7], budget=16) == [[1, 3], [4, 0], [2]]


@given(LENGTHS, st.integers(1, 300))
def test_micro_batches_hold_everything_once_and_fit(lengths: list[int], budget: int):
    batches = cut_by_length(lengths, budget)
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


def test_balance_beats_greedy_and_differencing():
    # Greedy, largest first: 17 and 13; Karmarkar-Karp: 16 and 14.
    parts = balance([8, 7, 6, 5, 4], 2)
    assert [sum([8, 7, 6, 5, 4][i] for i in part) for part in parts] == [15, 15]


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


def group_tokens(tail: str, groups: int, seed: int) -> list[int]:
    """Tokens of groups of 8 whose replies have a long tail, prompts included; a Pareto tail of 1.2 has no variance."""
    rng = np.random.default_rng(seed)
    tails = {
        "lognormal": lambda: np.exp(rng.normal(5.0, 1.0, (groups, 8))),
        "pareto 2": lambda: 50 * (1 + rng.pareto(2.0, (groups, 8))),
        "pareto 1.2": lambda: 50 * (1 + rng.pareto(1.2, (groups, 8))),
    }
    replies = np.clip(tails[tail](), 1, 8192).astype(int)
    return (replies.sum(1) + 8 * rng.integers(20, 400, groups)).tolist()


@pytest.mark.parametrize(("parts", "groups"), [(2, 64), (4, 65), (8, 64), (8, 100), (16, 128), (16, 256), (16, 512)])
@pytest.mark.parametrize("tail", ["lognormal", "pareto 2", "pareto 1.2"])
@settings(max_examples=15)
@given(seed=st.integers(0, 2**32 - 1))
def test_balance_of_long_tails_is_within_5_percent_of_the_mean(tail: str, parts: int, groups: int, seed: int):
    """Or at the longest group, where that alone is above the mean: no sharing can be better."""
    tokens = group_tokens(tail, groups, seed)
    shared = balance(tokens, parts)
    assert sorted(itertools.chain.from_iterable(shared)) == list(range(groups))
    worst = max(sum(tokens[i] for i in part) for part in shared)
    assert worst <= 1.05 * max(sum(tokens) / parts, max(tokens))


@pytest.mark.parametrize(("tail", "seed"), [("lognormal", 328), ("pareto 2", 121), ("pareto 1.2", 196)])
def test_balance_where_differencing_alone_misses_5_percent(tail: str, seed: int):
    """Four groups a part."""
    tokens = group_tokens(tail, 64, seed)
    worst = max(sum(tokens[i] for i in part) for part in balance(tokens, 16))
    assert worst <= 1.05 * sum(tokens) / 16


def test_balance_of_one_long_group_is_that_group_alone():
    shared = balance([1000, *[10] * 30], 4)
    assert [0] in shared
    assert sorted(len(part) for part in shared) == [1, 10, 10, 10]


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
