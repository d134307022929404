"""Sums, extremes and histograms of an update, gathered over its micro-batches and ranks and read back once at its end. Also a
report of the samples with a NaN or infinite loss or gradient.

A histogram has counts in logarithmic bins. Counts add up to the same, however numbers are split over micro-batches, updates and
ranks. A bin spans a sixteenth of an octave: a quantile is at most 4.3 % (1 - 2^(-1/16)) below the exact one, and never above.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from runtime import run_files
from runtime.process import spans
from runtime.trainer.collectives import RankInfo
from runtime.trainer.micro_batch import MicroBatch
from runtime.trainer.rows import Rows

Number = torch.Tensor | float

BINS_PER_OCTAVE = 16
LOWEST, HIGHEST = -30, 8  # exponents of 2; smaller numbers count as 0, larger ones as 2^HIGHEST
BINS = (HIGHEST - LOWEST) * BINS_PER_OCTAVE + 2
NAMED = 8  # samples named in a message about NaN or infinity


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
    """The result of `StepStatistics.reduce`; `+` joins those of several updates. A minimum is the maximum of negated numbers.

    `bins` are the counts of histograms by name and bin, without empty bins.
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
        """Return the statistics without NaN and infinite ones."""
        return Reduced(
            {name: mean for name, mean in self.means.items() if math.isfinite(mean.total)},
            {name: value for name, value in self.maxima.items() if math.isfinite(value)},
            self.totals,
            self.bins,
        )

    def metrics(self) -> dict[str, float]:
        """Return the numbers by name. A histogram NAME gives its 99th percentile, as NAME_p99."""
        means = {name: mean.value for name, mean in self.means.items()}
        extremes = {name.removeprefix("-"): -value if name.startswith("-") else value for name, value in self.maxima.items()}
        tails = {f"{name}_p99": quantile(counts, 0.99) for name, counts in self.bins.items()}
        return means | extremes | self.totals | tails


class StepStatistics:
    """Add 0-dimensional tensors of the device, or floats. All ranks must add the same names, with any values."""

    def __init__(self, device: torch.device):
        self.device = device
        # Large steps have more tokens than float32 counts exactly; NPUs reduce nothing wider than float32.
        self.dtype = torch.float32 if device.type == "npu" else torch.float64
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
        """Add `values` >= 0 where `counted` is 1 to a histogram; tensors of one shape."""
        counts = bin_counts(values, counted, self.dtype)
        self._bins[name] = self._bins[name] + counts if name in self._bins else counts

    def reduce(self, world_size: int, group: dist.ProcessGroup | None = None) -> Reduced:
        """Reduce over the ranks of `group` (None: all ranks) with one synchronisation. Leave out each mean with a count of 0,
        and each maximum or minimum without a value on any rank."""
        pairs = [number for pair in self._sums.values() for number in pair]
        sums = torch.cat([self._vector([*pairs, *self._totals.values()]), *self._bins.values()])
        maxima = self._vector(list(self._maxima.values()))
        if world_size > 1:
            dist.all_reduce(sums, dist.ReduceOp.SUM, group)
            dist.all_reduce(maxima, dist.ReduceOp.MAX, group)
        numbers = iter(sums.tolist())
        means = {name: Mean(next(numbers), next(numbers)) for name in self._sums}
        totals = {name: next(numbers) for name in self._totals}
        bins = {name: dict(enumerate(islice(numbers, BINS))) for name in self._bins}
        extremes = dict(zip(self._maxima, maxima.tolist(), strict=True))
        return Reduced(
            {name: mean for name, mean in means.items() if mean.count},
            {name: value for name, value in extremes.items() if value != -torch.inf},
            totals,
            {name: found for name, counts in bins.items() if (found := {at: count for at, count in counts.items() if count})},
        )

    def _vector(self, numbers: Sequence[Number]) -> torch.Tensor:
        if not numbers:
            return torch.zeros(0, dtype=self.dtype, device=self.device)
        return torch.stack([torch.as_tensor(number, dtype=self.dtype, device=self.device) for number in numbers])


def bin_counts(values: torch.Tensor, counted: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the number of `values` (>= 0, any shape) in each bin, [BINS] of `dtype`. Values count where `counted` is 1."""
    exponents = values.detach().float().nan_to_num(nan=torch.inf).log2()
    places = ((exponents - LOWEST) * BINS_PER_OCTAVE).floor().clamp(-1, BINS - 2).long() + 1
    found = torch.zeros(BINS, dtype=dtype, device=values.device)
    return found.index_add_(0, places.flatten(), counted.to(dtype).flatten())


def quantile(counts: Mapping[int, float], share: float) -> float:
    """Return the lower edge of the bin that holds the number of rank ceil(`share` · n) among all n numbers. `counts` by bin,
    not all 0."""
    rank, below = math.ceil(share * sum(counts.values())), 0.0
    for place, number in sorted(counts.items()):
        below += number
        if below >= rank:
            return 2.0 ** (LOWEST + (place - 1) / BINS_PER_OCTAVE) if place else 0.0
    raise ValueError("counts are all 0: no quantile")


class NonFiniteReport:
    """The samples that made a loss or a gradient NaN or infinite, found by training on one micro-batch at a time. The file is
    `RUN/nonfinite/ROLE-step-00000012.json`: `{"step": 12, "micro_batches": [[[GROUP, SAMPLE], ...], ...]}`.

    Every rank makes the same calls.
    """

    def __init__(self, role: str, step: int, rank_info: RankInfo):
        self._role, self._step, self._rank_info = role, step, rank_info
        self._tried: list[np.ndarray] = []  # int64 [samples, (micro-batch, group, sample)] of this rank
        self._guilty: list[np.ndarray] = []

    def add(self, rows: Rows, batch: MicroBatch, loss: torch.Tensor, gradients: Sequence[torch.Tensor]) -> None:
        """Add one micro-batch of each rank, with its `loss` and this rank's shards of the gradients of this micro-batch alone.

        Gradients are sums over ranks: a gradient that is not finite while all losses are finite counts for every rank.
        """
        bad_loss = not torch.isfinite(loss)
        bad_gradient = not all(torch.isfinite(gradient).all() for gradient in gradients)
        any_loss, any_gradient = self._rank_info.largest([bad_loss, bad_gradient])
        chosen = batch.samples
        names = np.stack(
            [np.full(len(chosen), len(self._tried)), rows.group_id[rows.group[chosen]], rows.sample[chosen]], axis=1
        )
        self._tried.append(names)
        if bad_loss or (any_gradient and not any_loss):
            self._guilty.append(names)

    def write(self, folder: Path) -> str:
        """Write the file in the run's `folder`, and return one line that names the samples."""
        named = self._gather(self._guilty)
        # Finite one by one, but not together: all micro-batches are named.
        named = named if len(named) else self._gather(self._tried)
        path = folder / run_files.NONFINITE / f"{self._role}-step-{self._step:08d}.json"
        if self._rank_info.rank == 0:
            batches = [[[group, sample] for _, group, sample in rows] for _, rows in groupby(named, lambda row: row[0])]
            with spans.at(spans.DISK, str(path)):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps({"step": self._step, "micro_batches": batches}) + "\n", encoding="utf-8")
        samples = ", ".join(f"{group}:{sample}" for _, group, sample in named[:NAMED])
        more = f" and {len(named) - NAMED} more" * (len(named) > NAMED)
        return f"the loss or its gradient is NaN or infinite in the micro-batch of samples {samples}{more} (see {path})"

    def _gather(self, parts: list[np.ndarray]) -> list[tuple[int, int, int]]:
        own = torch.from_numpy(np.concatenate(parts)) if parts else torch.zeros(0, 3, dtype=torch.int64)
        rows = self._rank_info.gathered(own).tolist()
        # Ranks that hold parts of one model name the same samples.
        return list(dict.fromkeys((batch, group, sample) for batch, group, sample in rows))
