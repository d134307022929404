"""Quantiles that add up: over micro-batches and ranks they are those of all numbers at once."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from runtime.trainer.statistics import BINS_PER_OCTAVE, Reduced, StepStatistics

pytestmark = pytest.mark.numeric


def reduced(values: np.ndarray, counted: np.ndarray) -> Reduced:
    statistics = StepStatistics(torch.device("cpu"))
    statistics.histogram("gap", torch.from_numpy(values), torch.from_numpy(counted))
    return statistics.reduce(1)


def exact(values: np.ndarray) -> float:
    return float(np.sort(values)[math.ceil(0.99 * len(values)) - 1])


@pytest.mark.parametrize("size", [1, 7, 100, 101, 5000])
def test_the_99th_percentile_is_within_a_bin_of_the_exact_one(size: int) -> None:
    rng = np.random.default_rng(size)
    values = np.exp(rng.normal(-8, 4, size)).clip(2e-9, 200).astype(np.float32)
    found = reduced(values, np.ones(size)).metrics()["gap_p99"]
    assert exact(values) * 2 ** (-1 / BINS_PER_OCTAVE) * (1 - 1e-5) <= found <= exact(values)


def test_parts_add_up_to_the_whole() -> None:
    rng = np.random.default_rng(0)
    values, counted = np.exp(rng.normal(-8, 4, (60, 9))).astype(np.float32), rng.random((60, 9)) < 0.7
    whole = reduced(values, counted)
    parts = reduced(values[:1], counted[:1]) + reduced(values[1:37], counted[1:37]) + reduced(values[37:], counted[37:])
    assert parts == whole
    assert sum(whole.bins["gap"].values()) == counted.sum()
    assert whole.metrics()["gap_p99"] <= exact(values[counted])


def test_what_is_not_counted_has_no_say_and_the_ends_are_open() -> None:
    values = np.array([0.0, 1e-12, 1e6, np.nan, 4.0], np.float32)
    assert reduced(values, np.array([0, 0, 0, 0, 1])).metrics() == {"gap_p99": 4.0}
    assert reduced(values, np.array([1, 1, 0, 0, 0])).metrics() == {"gap_p99": 0.0}
    assert reduced(values, np.array([1, 1, 1, 1, 0])).metrics() == {"gap_p99": 256.0}
    assert reduced(values, np.zeros(5)).metrics() == {}
