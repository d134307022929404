"""How megatron-core's models run and are updated: micro-batches down the pipeline, the distributed optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch

from runtime import codec
from runtime.config import Config, Optimizer, Trainer
from runtime.models.offload import Shelf
from runtime.process import platform
from runtime.trainer.batch import MicroBatch
from runtime.trainer.loop import UpdateLoop
from runtime.trainer.megatron import state
from runtime.trainer.megatron.optimizer import MegatronOptimizer
from runtime.trainer.megatron.passes import MegatronPasses
from runtime.trainer.megatron.writer import Writer
from runtime.trainer.model import RankPlace
from runtime.trainer.rows import Needs
from runtime.trainer.statistics import Reduced
from runtime.types import TrainGroup

Loss = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # as megatron-core has it: the sum, its tokens, what to report


class MegatronUpdateEngine(MegatronPasses, UpdateLoop):
    """Every block of ranks that holds the model has its own share of the data: that of its first rank."""

    def __init__(
        self,
        config: Config,
        source: str,
        settings: Trainer,
        options: Optimizer,
        needs: Needs,
        compute: torch.dtype,
        rank_place: RankPlace,
        *,
        value_head: bool = False,
    ):
        """Load the Hugging Face folder `source`, with `value_head` as a critic. Raises UserError for what it gets wrong."""
        device, seed, timeout = rank_place.device, config.run.seed, config.deadlines.train
        self._build(source, settings, compute, device, seed=seed, timeout=timeout, value_head=value_head)
        self._source = source
        self._updates = MegatronOptimizer(self._model.train(), options, compute, device, settings.overlap)
        self._passed = self._updates.model
        self._writer = Writer(self._grid.host_group(config.deadlines.save), self.role, config.deadlines.save)
        self._shelves = [Shelf(self._updates.tensors(kind), keep=kind != "grad") for kind in settings.offloaded]
        super().__init__(config, options, needs, rank_place, self._shape.vocab_size)

    def accumulate(self, groups: Sequence[TrainGroup], last: bool = False) -> None:
        shared = codec.decode(list[TrainGroup], self._grid.bytes_of_leader(codec.encode(list(groups))))
        super().accumulate(shared, last)

    # ------------------------------------------------------------------------------------------ passes

    def _run(self, batches: Iterable[MicroBatch], backward: bool, last: bool = False) -> list[torch.Tensor]:
        held = list(batches)
        with torch.set_grad_enabled(backward), self._updates.passes(last):
            losses = self._pipeline(held, self._given_loss, forward_only=not backward)
        return self._of_last_stage([loss[None] for loss in losses], [1] * len(held))

    def _infer(self, batches: Iterable[MicroBatch]) -> Iterator[tuple[MicroBatch, torch.Tensor]]:
        return self._inferred(batches, self._numbers)

    def _given_loss(self, batch: MicroBatch, outputs: torch.Tensor) -> Loss:
        loss = self._loss(batch, outputs)
        return loss, torch.ones((), dtype=torch.int, device=loss.device), loss.detach()

    # ------------------------------------------------------------------------------------------ updates

    @property
    def _place(self) -> int:
        return self._grid.block

    def _batch_sum(self, part: torch.Tensor) -> torch.Tensor:
        return self._grid.batch_sum(part)

    def _reduce(self) -> tuple[Reduced, float]:
        squared = self._updates.finish()
        reduced = self._statistics.reduce(self._grid.blocks, self._grid.data_group) if self._grid.last else Reduced()
        return codec.decode(Reduced, self._grid.bytes_of_last_stage(codec.encode(reduced))), squared

    def _gradients(self) -> list[torch.Tensor]:
        return self._updates.gradients()

    def _clear_gradients(self) -> None:
        self._updates.clear()

    def _step_optimizer(self, scale: float, rate: float) -> None:
        self._updates.step(scale, rate)

    def offload(self) -> None:
        self._updates.settle()
        for shelf in self._shelves:
            shelf.put()
        platform.release(self._device)

    def onload(self) -> None:
        for shelf in self._shelves:
            shelf.take()

    # ------------------------------------------------------------------------------------------ its state on disk

    def begin_save(self, folder: str) -> Callable[[], None]:
        self._updates.settle()
        return state.prepare(Path(folder), self._updates, self._position(), self._source, self._writer)

    def load(self, folder: str) -> None:
        self._resume(state.load(Path(folder), self._updates))
