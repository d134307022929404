"""The benches' confidence intervals, against published tables."""

from __future__ import annotations

import math

import pytest

from benchmarks.intervals import t_interval, t_quantile, wilson


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_agrees_with_published_intervals(successes: int, trials: int, low: float, high: float) -> None:
    """Newcombe, Statistics in Medicine 17 (1998), table I, method 3; the mirror image by symmetry."""
    got, mirrored = wilson(successes, trials), wilson(trials - successes, trials)
    assert (got.low, got.high) == pytest.approx((low, high), abs=5e-5)
    assert (1 - mirrored.high, 1 - mirrored.low) == pytest.approx((low, high), abs=5e-5)


def test_t_quantiles_agree_with_tables() -> None:
    table = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 5: 2.5706, 8: 2.3060, 9: 2.2622, 10: 2.2281, 30: 2.0423}
    assert {freedom: t_quantile(0.95, freedom) for freedom in table} == pytest.approx(table, abs=6e-5)
    assert t_quantile(0.99, 4) == pytest.approx(4.6041, abs=6e-5)
    assert t_quantile(0.5, 1) == pytest.approx(1.0, abs=1e-12)


def test_the_t_interval_is_about_the_mean() -> None:
    values = [0.91, 0.95, 0.93, 0.97, 0.94]
    interval = t_interval(values)
    assert interval is not None
    half = 2.776445 * math.sqrt(sum((value - 0.94) ** 2 for value in values) / 4 / 5)
    assert (interval.low, interval.high) == pytest.approx((0.94 - half, 0.94 + half), abs=1e-7)
    assert t_interval([0.9]) is None
