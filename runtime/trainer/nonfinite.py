"""Which samples made a loss or a gradient NaN or infinite: found by training on one micro-batch at a time, and written down.

`RUN/nonfinite/ROLE-step-00000012.json`: `{"step": 12, "micro_batches": [[[GROUP, SAMPLE], ...], ...]}`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
import torch

from runtime import run_files
from runtime.trainer.batch import MicroBatch
from runtime.trainer.fsdp import sharding
from runtime.trainer.model import RankPlace
from runtime.trainer.rows import Rows

NAMED = 8  # samples that a message names


class NonFiniteReport:
    """Every rank makes the same calls."""

    def __init__(self, role: str, step: int, rank_place: RankPlace):
        self._role, self._step, self._rank_place = role, step, rank_place
        self._tried: list[np.ndarray] = []  # int64 [samples, (micro-batch, group, sample)] of this rank
        self._guilty: list[np.ndarray] = []

    def add(self, rows: Rows, batch: MicroBatch, loss: torch.Tensor, gradients: Sequence[torch.Tensor]) -> None:
        """One micro-batch of each rank, with its `loss` and this rank's shards of the gradients that it alone left.

        Gradients are sums over ranks: one that is not finite though all losses are is every rank's.
        """
        where = self._rank_place
        bad_loss = not torch.isfinite(loss)
        bad_gradient = not all(torch.isfinite(gradient).all() for gradient in gradients)
        any_loss, any_gradient = sharding.largest([bad_loss, bad_gradient], where.device, where.world_size)
        chosen = batch.samples
        names = np.stack(
            [np.full(len(chosen), len(self._tried)), rows.group_id[rows.group[chosen]], rows.sample[chosen]], axis=1
        )
        self._tried.append(names)
        if bad_loss or (any_gradient and not any_loss):
            self._guilty.append(names)

    def write(self, folder: Path) -> str:
        """Write the file of the run's `folder`, and say in a line whose loss or gradient it was."""
        named = self._gather(self._guilty)
        # Finite one by one, and not together: no micro-batch is to blame more than another.
        named = named if len(named) else self._gather(self._tried)
        path = folder / run_files.NONFINITE / f"{self._role}-step-{self._step:08d}.json"
        if self._rank_place.rank == 0:
            batches = [[[group, sample] for _, group, sample in rows] for _, rows in groupby(named, lambda row: row[0])]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"step": self._step, "micro_batches": batches}) + "\n", encoding="utf-8")
        samples = ", ".join(f"{group}:{sample}" for _, group, sample in named[:NAMED])
        more = f" and {len(named) - NAMED} more" * (len(named) > NAMED)
        return f"the loss or its gradient is NaN or infinite in the micro-batch of samples {samples}{more} (see {path})"

    def _gather(self, parts: list[np.ndarray]) -> list[tuple[int, int, int]]:
        where = self._rank_place
        own = torch.from_numpy(np.concatenate(parts)) if parts else torch.zeros(0, 3, dtype=torch.int64)
        rows = sharding.gathered(own, where.device, where.world_size).tolist()
        # Ranks that hold parts of one model name the same samples.
        return list(dict.fromkeys((batch, group, sample) for batch, group, sample in rows))
