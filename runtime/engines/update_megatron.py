"""How megatron-core's models run and are updated: micro-batches down the pipeline, the distributed optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from runtime import codec, platform
from runtime.config import Config, Optimizer, Trainer
from runtime.engines import hf_weights, train_batch
from runtime.engines.megatron import facade, state
from runtime.engines.megatron.grid import Grid
from runtime.engines.megatron.model import PackedModel, require_stages, transformer_config
from runtime.engines.megatron.optimizer import Updates
from runtime.engines.megatron.weights import ModelWeights, read_family
from runtime.engines.megatron.writer import Writer
from runtime.engines.offload import Shelf
from runtime.engines.train_batch import MicroBatch
from runtime.engines.train_loop import UpdateLoop
from runtime.engines.train_model import Placement
from runtime.engines.train_rows import Needs
from runtime.engines.train_statistics import Reduced
from runtime.types import TrainGroup

Loss = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # as megatron-core has it: the sum, its tokens, what to report


class MegatronUpdateEngine(UpdateLoop):
    """Every block of ranks that holds the model has its own share of the data: that of its first rank."""

    def __init__(
        self,
        config: Config,
        source: str,
        settings: Trainer,
        options: Optimizer,
        needs: Needs,
        compute: torch.dtype,
        placement: Placement,
        *,
        value_head: bool = False,
    ):
        """Load the Hugging Face folder `source`, with `value_head` as a critic. Raises UserError for what it gets wrong."""
        device = placement.device
        family, shape = read_family(source, value_head), hf_weights.read_config(source)
        grid = Grid(settings, device, config.run.seed, config.deadlines.train)
        grid.layout.require(family.shape)
        if not value_head:
            require_stages(shape, settings)
        padded = grid.layout.padded_vocab(family.shape)
        with facade.moving(device):
            made = PackedModel(transformer_config(shape, settings, compute), shape, padded, value_head)
        self._model = made.to(device, compute).train()
        self._weights = ModelWeights(family, self._model, grid)
        self._weights.load(source)
        self._grid = grid
        self._source = source
        self._multiple = settings.parallel.tensor if settings.parallel.sequence else 1
        self._updates = Updates(self._model, options, compute, device, settings.overlap)
        self._writer = Writer(grid.host_group(config.deadlines.save), self.role, config.deadlines.save)
        self._shelves = [Shelf(self._updates.tensors(kind), keep=kind != "grad") for kind in settings.offloaded]
        super().__init__(config, options, needs, placement, shape.vocab_size)

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
        held = list(batches)
        sizes = [len(batch.targets) for batch in held]
        with torch.no_grad():
            numbers = self._pipeline(held, self._given_numbers, forward_only=True, collect_non_loss_data=True)
        yield from zip(held, self._of_last_stage(numbers, sizes), strict=True)

    def _pipeline(self, batches: list[MicroBatch], report: Any, **options: Any) -> list[torch.Tensor]:
        """What `report` gives for each of `batches` on the last stage; nothing on the others."""

        def step(waiting: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
            batch = train_batch.padded(next(waiting), self._multiple)
            return model(batch), partial(report, batch)

        if not batches:
            return []
        with facade.moving(self._device):
            found: list[torch.Tensor] = get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=iter(batches),
                model=[self._updates.model],
                num_microbatches=len(batches),
                seq_length=1,  # stages tell each other how long each is
                micro_batch_size=1,
                **options,
            )
        return found

    def _given_loss(self, batch: MicroBatch, outputs: torch.Tensor) -> Loss:
        loss = self._loss(batch, outputs)
        return loss, torch.ones((), dtype=torch.int, device=loss.device), loss.detach()

    def _given_numbers(self, batch: MicroBatch, outputs: torch.Tensor, non_loss_data: bool) -> torch.Tensor:
        return self._numbers(batch, outputs)

    def _of_last_stage(self, parts: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[torch.Tensor]:
        """`parts`, float32 of these sizes, on every stage."""
        flat = torch.empty(sum(sizes), device=self._device)
        if self._grid.last and sizes:
            torch.cat([part.detach().float() for part in parts], out=flat)
        return list(self._grid.of_last_stage(flat).split(list(sizes)))

    # ------------------------------------------------------------------------------------------ updates

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
