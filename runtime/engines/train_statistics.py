"""Sums and extremes that an update gathers over its micro-batches and ranks, read back once at its end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

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
    """What `StepStatistics.reduce` found; `+` joins those of several updates. Minima are the maxima of what is negated."""

    means: dict[str, Mean] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)

    def __add__(self, other: Reduced) -> Reduced:
        means, maxima = dict(self.means), dict(self.maxima)
        for name, mean in other.means.items():
            means[name] = means[name] + mean if name in means else mean
        for name, value in other.maxima.items():
            maxima[name] = max(maxima.get(name, value), value)
        return Reduced(means, maxima)

    def finite(self) -> Reduced:
        """Without what is NaN or infinite."""
        return Reduced(
            {name: mean for name, mean in self.means.items() if math.isfinite(mean.total)},
            {name: value for name, value in self.maxima.items() if math.isfinite(value)},
        )

    def metrics(self) -> dict[str, float]:
        means = {name: mean.value for name, mean in self.means.items()}
        return means | {
            name.removeprefix("-"): -value if name.startswith("-") else value for name, value in self.maxima.items()
        }


class StepStatistics:
    """Add 0-dimensional tensors of the device, or floats. All ranks must add the same names, with any values."""

    def __init__(self, device: torch.device):
        self._device = device
        # Token counts of large steps exceed what float32 counts exactly; NPUs reduce nothing wider.
        self._dtype = torch.float32 if device.type == "npu" else torch.float64
        self._sums: dict[str, tuple[Number, Number]] = {}
        self._maxima: dict[str, Number] = {}

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

    def reduce(self, world_size: int, group: dist.ProcessGroup | None = None) -> Reduced:
        """Over the ranks of `group`, by default all: one synchronisation. Names with nothing counted, or no extreme, are left
        out."""
        sums = self._vector([number for pair in self._sums.values() for number in pair])
        maxima = self._vector(list(self._maxima.values()))
        if world_size > 1:
            dist.all_reduce(sums, dist.ReduceOp.SUM, group)
            dist.all_reduce(maxima, dist.ReduceOp.MAX, group)
        numbers = iter(sums.tolist())
        means = {name: Mean(total, count) for name, total, count in zip(self._sums, numbers, numbers, strict=True)}
        extremes = dict(zip(self._maxima, maxima.tolist(), strict=True))
        return Reduced(
            {name: mean for name, mean in means.items() if mean.count},
            {name: value for name, value in extremes.items() if value != -torch.inf},
        )

    def _vector(self, numbers: Sequence[Number]) -> torch.Tensor:
        if not numbers:
            return torch.zeros(0, dtype=self._dtype, device=self._device)
        return torch.stack([torch.as_tensor(number, dtype=self._dtype, device=self._device) for number in numbers])
