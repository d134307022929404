"""Low-rank adapters (`families.adapters`) beside the linear layers of a model on megatron-core, which do not change.

An adapter has its layer's input, and adds to the layer's output. For a token its ranks exchange as many numbers as A has rows,
while the layer's ranks exchange the model's width. A parameter that is the same on all tensor-parallel ranks gets the same
gradient on all: at once if all see every token, otherwise by megatron-core's sum over parameters marked `sequence_parallel`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from safetensors.torch import save_file

from runtime.config import Lora
from runtime.models import hf_policy
from runtime.models.adapters import AdapterBase, start_of
from runtime.models.families import Parameter
from runtime.models.families.adapters import AdapterTable, Pair
from runtime.trainer.backend import TrainingPosition
from runtime.trainer.fsdp import lora, state
from runtime.trainer.megatron.optimizer import KINDS, MegatronOptimizer
from runtime.trainer.megatron.passes import MegatronPasses
from runtime.trainer.megatron.weights import ModelWeights

Tensors = Mapping[str, torch.Tensor]


class LayerAdapter(torch.nn.Module):
    """The adapters of one linear layer, float32: A and B by the number of the matrix within the layer."""

    def __init__(self, layer: Any, each: Parameter, pairs: Sequence[Pair | None], settings: Lora, seed: int):
        """Make the adapters. `each` is the layer's weight."""
        super().__init__()
        self._each, self._rank, self._scaling = each, settings.rank, settings.alpha / settings.rank
        self._apart, self._sequence = layer.explicit_expert_comm, layer.sequence_parallel
        self.down, self.up = torch.nn.ParameterDict(), torch.nn.ParameterDict()
        for number, pair in enumerate(pairs):
            if pair is not None:
                a, b = pair
                source, device = a.sources[0], layer.weight.device
                down = a.from_hf({source.name: start_of(source.name, source.shape, seed)}.__getitem__)
                self.down[str(number)] = torch.nn.Parameter(down.to(device, copy=True))
                self.up[str(number)] = torch.nn.Parameter(torch.zeros(b.shape, device=device))
        for parameter in self.parameters():
            parameter.allreduce = layer.weight.allreduce  # type: ignore[attr-defined]  # False: differs between expert ranks
        for parameter in (self.up if each.split else self.down).values():
            parameter.sequence_parallel = self._apart or self._sequence

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the addition to this rank's part of the layer's output, [..., out], given its part of the input, [..., in]."""
        inner = self._exchanged(F.linear(x, torch.cat([*self.down.values()]).to(x.dtype)))
        parts = zip(self.up.items(), inner.split(self._rank, -1), strict=True)
        return self._joined({number: F.linear(part, up.to(x.dtype)) for (number, up), part in parts})

    def merged(self, weight: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the layer's `weight` with the adapters added, float32."""
        return self._joined({number: self.down[number].T @ up.T for number, up in self.up.items()}).T + weight

    def _exchanged(self, inner: torch.Tensor) -> torch.Tensor:
        """Exchange A's output between ranks. Not for experts: their tokens are gathered before and summed after the layers."""
        if self._apart:
            return inner
        if self._each.split and self._sequence:
            return tensor_parallel.reduce_scatter_to_sequence_parallel_region(inner)
        if self._each.split:
            return tensor_parallel.reduce_from_tensor_model_parallel_region(inner)
        if self._sequence:
            return tensor_parallel.gather_from_sequence_parallel_region(inner, tensor_parallel_output_grad=True)
        return tensor_parallel.copy_to_tensor_model_parallel_region(inner)

    def _joined(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Join and scale `parts` [..., a matrix's rows] as the layer joins its matrices: [..., out]. Missing parts add 0."""
        each, like = self._each, next(iter(parts.values()))
        blocks = [
            parts.get(str(number), like.new_zeros(*like.shape[:-1], source.shape[0] // each.tensor))
            for number, source in enumerate(each.sources)
        ]
        whole = torch.cat([block.unflatten(-1, (each.groups, -1)) for block in blocks], -1) if len(blocks) > 1 else like
        return (whole.flatten(-2) if len(blocks) > 1 else whole) * self._scaling


class MegatronAdapters:
    """The adapters of this rank's part of a policy. All ranks call every method alike."""

    def __init__(self, passes: MegatronPasses, settings: Lora, base: AdapterBase, seed: int):
        """Put the adapters into the model of `passes`, and freeze its rest. Raises UserError if it lacks a target layer."""
        weights, grid, model = passes.weights, passes.grid, passes.model
        self._table = AdapterTable(passes.family, settings.rank, settings.target_modules, grid.layout)
        self.config = lora.peft_config(settings, self._table.targets, base.path)
        self.known_base, self._grid, self._on = base, grid, True
        model.requires_grad_(False)
        for each in weights.parameters(grid.pipeline_rank, grid.expert_rank):
            if any(pairs := self._table.pairs(each)):
                layer: Any = model.get_submodule(each.name.removesuffix(".weight"))
                layer.adapter = LayerAdapter(layer, each, pairs, settings, seed)
                weights.merged[each.name] = layer.adapter.merged
                layer.register_forward_hook(self._add)
        self._trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
        self._weights = ModelWeights(self._table, self._trained, grid)

    def published(self) -> ModelWeights:
        """Return the adapters as in a weight sync (`runtime.models.adapters`), by their names in PEFT's files."""
        scale = self.config.lora_alpha / self.config.r
        parts = {name: each * scale if ".up." in name else each for name, each in self._trained.items()}
        return ModelWeights(self._table, parts, self._grid)

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Make the model compute as before it was adapted, within the context."""
        self._on = False
        try:
            yield
        finally:
            self._on = True

    def _add(self, layer: Any, inputs: tuple[torch.Tensor], outputs: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
        return (outputs[0] + layer.adapter(inputs[0]), outputs[1]) if self._on else outputs

    def write(self, folder: Path) -> None:
        """Write a PEFT folder; rank 0 writes."""
        wholes = {name: whole.to("cpu", copy=True) for name, whole in self._weights.wholes(torch.float32)}
        if wholes:
            lora.write(folder, wholes, self.config)

    # ------------------------------------------------------------------------------------------ checkpoints

    def prepare(self, folder: Path, updates: MegatronOptimizer, position: TrainingPosition) -> Callable[[], None]:
        """Bring the state to rank 0's host. Return a function that writes it in engine torch's form, beside training."""
        kept = {name: updates.gather(parameter) for name, parameter in self._trained.items()}
        found: dict[str, dict[str, torch.Tensor]] = {}
        for kind in KINDS:
            held = ModelWeights(self._table, {name: parts[kind] for name, parts in kept.items()}, self._grid)
            found[kind] = {name: whole.to("cpu", copy=True) for name, whole in held.wholes(torch.float32)}
        description = state.describe(position, "adamw", updates.count, self)
        moments = {f"{kind}.{name}": whole for kind in KINDS[1:] for name, whole in found[kind].items() if updates.count}
        return partial(self._write, folder, found["master"], moments, description) if found["master"] else lambda: None

    def _write(self, folder: Path, wholes: Tensors, moments: Tensors, description: str) -> None:
        lora.write(folder / lora.FOLDER, wholes, self.config)
        if moments:
            hf_policy.write_tensors(folder, "optimizer", moments, moments.items(), 0, torch.float32)
        save_file({}, folder / state.GENERATORS)  # no random numbers are used
        (folder / "trainer.json").write_text(description, encoding="utf-8")

    @torch.no_grad()
    def load(self, folder: Path, updates: MegatronOptimizer) -> TrainingPosition:
        """Restore the state that either engine saved. Raises UserError, and changes nothing, if it does not fit the model."""
        found = state.read_description(folder, self)
        state.require_same_optimizer(folder, found, "adamw")
        shapes = self._weights.shapes
        kept = {f"{kind}.{name}": shape for kind in KINDS[1:] for name, shape in shapes.items()}
        with contextlib.ExitStack() as stack:
            reads: dict[str, Callable[[str], Any]] = {}
            reads["master"] = state.open_tensors(folder / lora.FOLDER, lora.STEM, shapes, stack)
            if found["optimizer_updates"]:
                moments = state.open_tensors(folder, "optimizer", kept, stack)
                reads |= {kind: lambda name, kind=kind: moments(f"{kind}.{name}") for kind in KINDS[1:]}  # type: ignore[misc]
            for each in self._weights.parameters(self._grid.pipeline_rank, self._grid.expert_rank):
                parameter = self._trained[each.name]
                wholes = {kind: each.from_hf(read).to(parameter.device) for kind, read in reads.items()}
                parameter.copy_(wholes["master"])
                updates.scatter(parameter, {kind: wholes.get(kind, torch.zeros_like(parameter)) for kind in KINDS})
        updates.set_count(found["optimizer_updates"])
        return TrainingPosition(found["step"], found.get("kl_coefficient"))
