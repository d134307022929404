"""Sums and extremes that an update gathers over its micro-batches and ranks, read back once at its end."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
import torch.distributed as dist

from runtime.trainer import histogram as train_histogram

Number = torch.Tensor | float


@dataclass(frozen=True)
class Mean:
    total: float
    count: float

    @property
    def value(self) -> float:
        return self.total / self.count

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)


@dataclass(frozen=True)
class Reduced:
    """What `StepStatistics.reduce` found; `+` joins those of several updates. Minima are the maxima of what is negated.

    `bins` are the counts of `train_histogram` by name and bin, without empty bins.
    """

    means: dict[str, Mean] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=dict)
    bins: dict[str, dict[int, float]] = field(default_factory=dict)

    def __add__(self, other: Reduced) -> Reduced:
        means, maxima, totals, bins = dict(self.means), dict(self.maxima), dict(self.totals), dict(self.bins)
        for name, mean in other.means.items():
            means[name] = means[name] + mean if name in means else mean
        for name, value in other.maxima.items():
            maxima[name] = max(maxima.get(name, value), value)
        for name, total in other.totals.items():
            totals[name] = totals.get(name, 0.0) + total
        for name, counts in other.bins.items():
            bins[name] = dict(Counter(bins.get(name, {})) + Counter(counts))
        return Reduced(means, maxima, totals, bins)

    def finite(self) -> Reduced:
        """Without what is NaN or infinite."""
        return Reduced(
            {name: mean for name, mean in self.means.items() if math.isfinite(mean.total)},
            {name: value for name, value in self.maxima.items() if math.isfinite(value)},
            self.totals,
            self.bins,
        )

    def metrics(self) -> dict[str, float]:
        """By name; of a histogram NAME the 99th percentile, as NAME_p99."""
        means = {name: mean.value for name, mean in self.means.items()}
        extremes = {name.removeprefix("-"): -value if name.startswith("-") else value for name, value in self.maxima.items()}
        tails = {f"{name}_p99": train_histogram.quantile(counts, 0.99) for name, counts in self.bins.items()}
        return means | extremes | self.totals | tails


class StepStatistics:
    """Add 0-dimensional tensors of the device, or floats. All ranks must add the same names, with any values."""

    def __init__(self, device: torch.device):
        self._device = device
        # Token counts of large steps exceed what float32 counts exactly; NPUs reduce nothing wider.
        self._dtype = torch.float32 if device.type == "npu" else torch.float64
        self._sums: dict[str, tuple[Number, Number]] = {}
        self._maxima: dict[str, Number] = {}
        self._totals: dict[str, Number] = {}
        self._bins: dict[str, torch.Tensor] = {}

    def mean(self, name: str, total: Number, count: Number) -> None:
        known = self._sums.get(name)
        self._sums[name] = (total, count) if known is None else (known[0] + total, known[1] + count)

    def maximum(self, name: str, value: Number) -> None:
        known = self._maxima.get(name, -torch.inf)
        if isinstance(known, torch.Tensor) and isinstance(value, torch.Tensor):
            self._maxima[name] = torch.maximum(known, value)  # max() would wait for the device
        else:
            self._maxima[name] = max(known, value)

    def minimum(self, name: str, value: Number) -> None:
        self.maximum(f"-{name}", -value)

    def total(self, name: str, number: Number) -> None:
        self._totals[name] = self._totals.get(name, 0.0) + number

    def histogram(self, name: str, values: torch.Tensor, counted: torch.Tensor) -> None:
        """Of `values` >= 0 where `counted`, tensors of one shape."""
        counts = train_histogram.counts(values, counted, self._dtype)
        self._bins[name] = self._bins[name] + counts if name in self._bins else counts

    def reduce(self, world_size: int, group: dist.ProcessGroup | None = None) -> Reduced:
        """Over the ranks of `group`, by default all: one synchronisation. Names with nothing counted, or no extreme, are left
        out."""
        pairs = [number for pair in self._sums.values() for number in pair]
        sums = torch.cat([self._vector([*pairs, *self._totals.values()]), *self._bins.values()])
        maxima = self._vector(list(self._maxima.values()))
        if world_size > 1:
            dist.all_reduce(sums, dist.ReduceOp.SUM, group)
            dist.all_reduce(maxima, dist.ReduceOp.MAX, group)
        numbers = iter(sums.tolist())
        means = {name: Mean(next(numbers), next(numbers)) for name in self._sums}
        totals = {name: next(numbers) for name in self._totals}
        bins = {name: dict(enumerate(islice(numbers, train_histogram.BINS))) for name in self._bins}
        extremes = dict(zip(self._maxima, maxima.tolist(), strict=True))
        return Reduced(
            {name: mean for name, mean in means.items() if mean.count},
            {name: value for name, value in extremes.items() if value != -torch.inf},
            totals,
            {name: found for name, counts in bins.items() if (found := {at: count for at, count in counts.items() if count})},
        )

    def _vector(self, numbers: Sequence[Number]) -> torch.Tensor:
        if not numbers:
            return torch.zeros(0, dtype=self._dtype, device=self._device)
        return torch.stack([torch.as_tensor(number, dtype=self._dtype, device=self._device) for number in numbers])
