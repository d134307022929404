"""What `sluice bench engines` measures: one training engine's passes on packed samples, and its checkpoints."""

from __future__ import annotations

import shutil
import tempfile
import time
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.random_groups import draw_groups, draw_lengths
from runtime.config import Config

if TYPE_CHECKING:
    from runtime.trainer.step import ModelTrainer
    from runtime.types import TrainGroup

STEP = 1  # which the engine stands at: the optimizer has its moments from the one before


class EngineTrial:
    """The engine that `services.trainer.engine` names, on one rank, built when first used."""

    def __init__(self, config: Config):
        self._config = config

    @cached_property
    def real_tokens(self) -> int:
        """Of the batch, prompts included."""
        return sum(sum(group.samples) for group in draw_lengths(self._config)[0])

    def passes(self) -> float:
        """Seconds of the forward and backward passes of a batch; the weights stay as they are."""
        engine, groups = self._engine, self._batch
        begun = time.perf_counter()
        engine.begin_step(STEP)
        engine.accumulate(groups)
        return time.perf_counter() - begun

    def save(self) -> float:
        """Seconds to write a checkpoint of weights and optimizer, which takes the place of the one before."""
        engine = self._engine
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        begun = time.perf_counter()
        engine.save(str(self._folder))
        return time.perf_counter() - begun

    def load(self) -> float:
        """Seconds to read back what `save` wrote."""
        begun = time.perf_counter()
        self._engine.load(str(self._folder))
        return time.perf_counter() - begun

    @cached_property
    def _batch(self) -> list[TrainGroup]:
        return draw_groups(self._config)[0]

    @cached_property
    def _engine(self) -> ModelTrainer:
        from runtime.trainer.step import policy_trainer

        engine = policy_trainer(self._config)
        for step in range(STEP):
            engine.begin_step(step)
            engine.accumulate(self._batch)
            engine.apply()
        return engine

    @cached_property
    def _folder(self) -> Path:
        return Path(tempfile.mkdtemp()) / "checkpoint"  # in the worker's temporary folder, which goes with it
