"""What is kept of a step's tokens for whoever reads samples: collected on the device, written once the step is over."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from runtime.config import Config
from runtime.telemetry.trained_tokens import TrainedTokenLog, TrainedTokens
from runtime.trainer.micro_batch import MicroBatch
from runtime.trainer.rows import Rows


class KeptTokens:
    """Of this rank, the first `mismatch.keep_tokens` of each step that it trains; none without a run's folder. No pass waits
    for it."""

    def __init__(self, config: Config, rank: int):
        self._most = config.mismatch.keep_tokens if config.run.dir else 0
        self._log = TrainedTokenLog(Path(config.run.dir), f"trainer-{rank}")
        self._parts: list[tuple[Rows, np.ndarray, torch.Tensor]] = []
        self._count = 0

    def add(self, rows: Rows, batch: MicroBatch, logprobs: torch.Tensor, advantages: torch.Tensor) -> None:
        """Of `batch`, which is of `rows`: `logprobs` float [B, R], `advantages` float [B, R] or [B, 1]."""
        take = min(len(batch.places), self._most - self._count)
        if take > 0:
            cells = batch.cells[:take]
            figures = [each.detach().expand(batch.mask.shape).reshape(-1)[cells].float() for each in (logprobs, advantages)]
            self._parts.append((rows, batch.places[:take], torch.stack(figures)))
            self._count += take

    def clear(self) -> None:
        self._parts, self._count = [], 0

    def write(self, step: int) -> None:
        """Append the step's."""
        parts = self._parts
        self.clear()
        if parts:
            places = [_places(rows, flat) for rows, flat, _ in parts]
            group, row, position = (np.concatenate(column) for column in zip(*places, strict=True))
            logprob, advantage = torch.cat([figures for _, _, figures in parts], 1).cpu().numpy()
            self._log.append(TrainedTokens(step, group, row, position, logprob, advantage))


def _places(rows: Rows, flat: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of tokens by their index in the flat arrays: their groups' ids, their rows within these, and their places in those."""
    row = np.searchsorted(rows.start, flat, side="right") - 1
    group = rows.group[row]
    return rows.group_id[group], row - np.searchsorted(rows.group, group), flat - rows.start[row]
