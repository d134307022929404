"""One process of the changes in `sluice bench weight_sync`.

`python -m benchmarks.weight_sync.changes_trial FOLDER RANK WORLD` is as `trial` beside it, but rank 0 trains what it
publishes, as the trainer does it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from benchmarks.weight_sync.trial import Receiver, Sender, WeightSyncTrial, run
from benchmarks.worker import Bench
from runtime.config import Config
from runtime.trainer.rank import TrainRank
from runtime.trainer.step import ModelTrainer


class TrainingSender(Sender):
    def __init__(self, config: Config, engine: ModelTrainer):
        super().__init__(config, ())
        self._engine = engine

    def load(self) -> None:
        self._worker = TrainRank(self._engine, self.config)


class ChangesTrial(WeightSyncTrial):
    _bench: Bench
    _before: Sequence[torch.Tensor] = ()

    async def open_training(self, config: Any) -> None:
        settings = msgspec.convert(config, Config)
        if self._rank:
            await self._serve(Receiver(settings, f"rollout-{self._rank - 1}", 0))
            return
        self._bench = Bench(settings)
        await self._serve(TrainingSender(settings, self._bench.trainer))

    async def step(self, number: int) -> None:
        """The trainer: one step of GRPO."""
        await asyncio.to_thread(self._bench.step, number)

    async def changed(self) -> float:
        """The trainer: the share of words in its buckets that are not those of the call before; 1 at the first."""
        views = [each.block.view(-1).view(torch.int16) for each in self._sender.buckets()]
        differ = sum(int((old != new).sum()) for old, new in zip(self._before, views, strict=bool(self._before)))
        share = differ / sum(view.numel() for view in views) if self._before else 1.0
        self._before = [view.clone() for view in views]
        return share


if __name__ == "__main__":
    run(ChangesTrial)
