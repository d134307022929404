"""The coordinator's side of checkpoints: when one is due, where the run is then, and which of them stay."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from runtime import checkpoint, codec
from runtime.config import Config
from runtime.data.prompts import PromptStream
from runtime.ledger import Ledger
from runtime.ledger_records import CheckpointSaved
from runtime.pipeline.buffer import Buffer
from runtime.ports import Answer, TrainerPort
from runtime.position import Position
from runtime.types import PolicyVersion


class Checkpoints:
    """`accuracy` holds what evaluations found, by step: the best checkpoint is the best of those that were evaluated."""

    def __init__(
        self, folder: Path, config: Config, trainer: TrainerPort, ledger: Ledger, stream: PromptStream, buffer: Buffer
    ):
        self._folder = folder
        self._settings = config.checkpoint
        self._retain_bytes = config.ledger.retain_bytes
        self._trainer = trainer
        self._ledger = ledger
        self._stream = stream
        self._buffer = buffer
        self._incarnation = 0
        self.accuracy: dict[int, float] = {}

    def resume(self, incarnation: int, position: Position) -> None:
        """Go on after `position`, as `incarnation`."""
        self._incarnation = incarnation
        if position.best_step is not None and position.best_accuracy is not None:
            self.accuracy[position.best_step] = position.best_accuracy

    @property
    def newest_accuracy(self) -> float | None:
        return self.accuracy[max(self.accuracy)] if self.accuracy else None

    async def due(self, step: int) -> Callable[[], Answer[None]] | None:
        """What orders the checkpoint of version `step`, if there is to be one; asked before the step that makes it is applied,
        when every group of it has been taken."""
        if not self._settings.every or step % self._settings.every:
            return None
        position = await self.position(step)
        return lambda: self.save(step, position)

    async def position(self, step: int) -> bytes:
        """Where the run is once version `step` is made."""
        best = self._best(self.accuracy)
        untrained = [group for group in self._buffer if group.taken is None or group.taken >= step]
        position = Position(
            version=PolicyVersion(self._incarnation, step),
            stream=self._stream.state(),
            trained=await self._ledger.trained(step),
            pending=[group.ticket.problem for group in sorted(untrained, key=lambda group: group.group_id)],
            accuracy=self.newest_accuracy,
            best_accuracy=None if best is None else self.accuracy[best],
            best_step=best,
        )
        return codec.encode(position)

    def save(self, step: int, position: bytes) -> Answer[None]:
        """Order the checkpoint of version `step`, behind the commands before; the answer comes once old ones are pruned."""
        folder = checkpoint.folder_for(self._folder, step)
        return self._saved_at(step, folder, self._trainer.save(str(folder.absolute()), position))

    async def _saved_at(self, step: int, folder: Path, saving: Answer[None]) -> None:
        await saving
        self._ledger.record(CheckpointSaved(step=step, incarnation=self._incarnation, path=str(folder), at=time.time()))
        best = self._best(self.accuracy.keys() & set(checkpoint.steps(self._folder))) if self._settings.keep_best else None
        await asyncio.to_thread(checkpoint.prune, self._folder, self._settings.keep, best)
        oldest = min(checkpoint.steps(self._folder), default=step)
        await self._ledger.trim(oldest, self._retain_bytes)

    def _best(self, steps: Iterable[int]) -> int | None:
        return max(steps, key=lambda step: self.accuracy[step], default=None)
