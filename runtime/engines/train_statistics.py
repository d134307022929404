"""Sums and extremes that a step gathers over its micro-batches and ranks, read back once at its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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

    def reduce(self, world_size: int) -> tuple[dict[str, Mean], dict[str, float]]:
        """Means and extremes over all ranks: one synchronisation. Names with nothing counted, or no extreme, are left out."""
        sums = self._vector([number for pair in self._sums.values() for number in pair])
        maxima = self._vector(list(self._maxima.values()))
        if world_size > 1:
            dist.all_reduce(sums, dist.ReduceOp.SUM)
            dist.all_reduce(maxima, dist.ReduceOp.MAX)
        numbers = iter(sums.tolist())
        means = {name: Mean(total, count) for name, total, count in zip(self._sums, numbers, numbers, strict=True)}
        extremes = {
            name.removeprefix("-"): -value if name.startswith("-") else value
            for name, value in zip(self._maxima, maxima.tolist(), strict=True)
            if value != -torch.inf
        }
        return {name: mean for name, mean in means.items() if mean.count}, extremes

    def _vector(self, numbers: Sequence[Number]) -> torch.Tensor:
        if not numbers:
            return torch.zeros(0, dtype=self._dtype, device=self._device)
        return torch.stack([torch.as_tensor(number, dtype=self._dtype, device=self._device) for number in numbers])
