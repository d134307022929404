"""A model on megatron-core, and passes through it: micro-batches down the pipeline, and what the last stage found for all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import megatron.core
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from runtime.config import Spread
from runtime.errors import UserError
from runtime.models import hf_config
from runtime.models.families import FAMILIES
from runtime.models.limits import uncut
from runtime.process.progress import at
from runtime.trainer.backend import BatchOutputs
from runtime.trainer.head import PerToken, token_numbers
from runtime.trainer.megatron import context, facade, vocab_parallel
from runtime.trainer.megatron.grid import ProcessGrid
from runtime.trainer.megatron.model import PackedModel, transformer_config
from runtime.trainer.megatron.weights import ModelWeights, held_by
from runtime.trainer.micro_batch import MicroBatch, padded


class MegatronPasses:
    """What is trained, or only asked, on megatron-core. `facade.prepare` has been called in this process."""

    def __init__(
        self,
        source: str,
        settings: Spread,
        compute: torch.dtype,
        device: torch.device,
        *,
        seed: int,
        timeout: float,
        value_head: bool = False,
    ) -> None:
        """Load this rank's part of the Hugging Face folder `source`, with `value_head` as a critic.

        `timeout`: seconds of a collective. Raises UserError for what the folder or the layout gets wrong.
        """
        family, shape = hf_config.read_family(source, value_head), hf_config.read_config(source, FAMILIES)
        grid = ProcessGrid(settings, device, seed, timeout)
        grid.layout.require(family.shape)
        if fault := uncut(family.tied, settings.parallel.pipeline, megatron.core.__version__):
            raise UserError(fault)
        padded = grid.layout.padded_vocab(family.shape)
        with facade.moving(device):
            described = transformer_config(shape, settings, compute)
            made = PackedModel(described, shape, padded, value_head)
        self.model = made.to(device, compute)
        self.weights = ModelWeights(family, held_by(self.model), grid)
        self.weights.load(source)
        self.shape, self.family = shape, family
        self.grid = grid
        self._multiple = settings.parallel.tensor if settings.parallel.sequence else 1
        self.passed: torch.nn.Module = self.model
        """What passes go through: the model, perhaps wrapped."""

    def infer(self, batches: Iterable[MicroBatch], output: BatchOutputs) -> Iterator[tuple[MicroBatch, torch.Tensor]]:
        """Each of `batches` with its `output`, on every stage; no gradients."""
        held = list(batches)
        sizes = [len(batch.targets) for batch in held]

        def report(batch: MicroBatch, outputs: torch.Tensor, non_loss_data: bool) -> torch.Tensor:
            found = output(batch, outputs)
            return batch.whole(found) if isinstance(batch, context.ContextShard) else found

        with torch.no_grad():
            found = self.pipeline(held, report, forward_only=True, collect_non_loss_data=True)
        yield from zip(held, self.of_last_stage(found, sizes), strict=True)

    def pipeline(self, batches: list[MicroBatch], report: Any, **options: Any) -> list[torch.Tensor]:
        """What `report` gives for each of `batches` on the last stage; nothing on the others."""

        def step(waiting: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
            with at("forward"):  # so that the whole goes on with each micro-batch
                batch = self._share(next(waiting))
                return model(batch), partial(report, batch)

        if not batches:
            return []
        phase = "forward" if options["forward_only"] else "backward"
        with facade.moving(self.grid.device), at(phase, f"{len(batches)} micro-batches"):
            found: list[torch.Tensor] = get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=iter(batches),
                model=[self.passed],
                num_microbatches=len(batches),
                seq_length=1,  # stages tell each other how long each is
                micro_batch_size=1,
                **options,
            )
        return found

    def _share(self, batch: MicroBatch) -> MicroBatch:
        """What this rank computes of `batch`."""
        if self.grid.context > 1:
            return context.part_of(batch, self.grid.context_group, self._multiple)
        return padded(batch, self._multiple)

    def token_logprobs(
        self, outputs: torch.Tensor, batch: MicroBatch, temperature: float = 1.0, *, entropy_gradient: bool = False
    ) -> PerToken:
        """As `ModelBackend.token_logprobs`. The chunks are the same on all ranks that share the vocabulary."""
        start, width = self.model.vocabulary_start, self.shape.vocab_size // self.grid.layout.tensor
        numbers = partial(
            vocab_parallel.token_logprobs,
            temperature=temperature,
            group=self.grid.tensor_group,
            start=start,
            entropy_gradient=entropy_gradient,
        )
        return token_numbers(numbers, outputs, self.model.head_weight(), width, batch, start)

    def of_last_stage(self, parts: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[torch.Tensor]:
        """`parts`, float32 of these sizes, on every stage."""
        flat = torch.empty(sum(sizes), device=self.grid.device)
        if self.grid.last and sizes:
            torch.cat([part.detach().float() for part in parts], out=flat)
        return list(self.grid.of_last_stage(flat).split(list(sizes)))
