"""Quantiles of numbers that are spread over micro-batches, updates and ranks: counts in logarithmic bins, which add up.

However the numbers are split, the counts are the same, and so is what is read off them. A bin spans a sixteenth of an octave,
so that a quantile is at most 4.3 % (1 - 2^(-1/16)) below the exact one, and never above it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

BINS_PER_OCTAVE = 16
LOWEST, HIGHEST = -30, 8  # exponents of 2; what is below counts as 0, what is above as 2^HIGHEST
BINS = (HIGHEST - LOWEST) * BINS_PER_OCTAVE + 2


def counts(values: torch.Tensor, counted: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[BINS] of `dtype`: how many of `values` (>= 0, any shape) are in each bin, of those where `counted` (the same shape)."""
    exponents = values.detach().float().nan_to_num(nan=torch.inf).log2()
    places = ((exponents - LOWEST) * BINS_PER_OCTAVE).floor().clamp(-1, BINS - 2).long() + 1
    found = torch.zeros(BINS, dtype=dtype, device=values.device)
    return found.index_add_(0, places.flatten(), counted.to(dtype).flatten())


def quantile(counts: Mapping[int, float], share: float) -> float:
    """The lower edge of the bin that holds the number of rank ceil(`share` · n) among all n; `counts` by bin, not all 0."""
    rank, below = math.ceil(share * sum(counts.values())), 0.0
    for place, number in sorted(counts.items()):
        below += number
        if below >= rank:
            return 2.0 ** (LOWEST + (place - 1) / BINS_PER_OCTAVE) if place else 0.0
    raise ValueError("a quantile of nothing")
