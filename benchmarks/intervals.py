"""Confidence intervals for the benches. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, stdev

from msgspec import Struct

CONFIDENCE = 0.95  # of both intervals


class ConfidenceInterval(Struct, frozen=True):
    low: float
    high: float


def wilson(successes: int, trials: int) -> ConfidenceInterval:
    """Of a probability, from independent trials with that probability each (Wilson 1927, the score interval).

    (p + z²/2n ± z √(p(1 - p)/n + z²/4n²)) / (1 + z²/n), with p = successes / trials, n = trials > 0 and z the normal quantile.
    """
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    share, spread = successes / trials, z * z / trials
    centre, half = share + spread / 2, z * math.sqrt(share * (1 - share) / trials + spread / (4 * trials))
    return ConfidenceInterval(max(0.0, (centre - half) / (1 + spread)), min(1.0, (centre + half) / (1 + spread)))


def t_interval(values: Sequence[float]) -> ConfidenceInterval | None:
    """Of the mean that independent, roughly normal `values` scatter about (Student 1908): mean ± t s / √n.

    None for fewer than two values, whose spread says nothing.
    """
    if len(values) < 2:
        return None
    mean, half = fmean(values), t_quantile(CONFIDENCE, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return ConfidenceInterval(mean - half, mean + half)


def t_quantile(confidence: float, freedom: int) -> float:
    """The t with P(|T| <= t) = `confidence` for Student's T with `freedom` >= 1 degrees of freedom, by bisection."""
    low, high = 0.0, math.pi / 2
    while low < (middle := (low + high) / 2) < high:
        if _within(middle, freedom) < confidence:
            low = middle
        else:
            high = middle
    return math.sqrt(freedom) * math.tan(low)


def _within(angle: float, freedom: int) -> float:
    """P(|T| <= √ν tan(angle)) for whole ν = `freedom` (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    sine, cosine = math.sin(angle), math.cos(angle)
    even = freedom % 2 == 0
    term, total = (1.0 if even else cosine), 0.0
    for index in range(1, freedom // 2 + 1):
        total += term
        term *= cosine**2 * ((2 * index - 1) / (2 * index) if even else 2 * index / (2 * index + 1))
    return sine * total if even else (angle + sine * total) * 2 / math.pi
