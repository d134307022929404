"""A model as a checkpoint of Megatron-LM's own layout: a release, without optimizer and generators."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import torch

from runtime.engines.classic_folder import FILE, RELEASE, TRACKER, VERSION, Coordinates, rank_name
from runtime.engines.conversion_parts import HfModel, Progress
from runtime.engines.families import Layout, Parameter
from runtime.engines.families.arguments import arguments_of
from runtime.engines.families.family import EMBEDDING
from runtime.engines.families.naming import REWARD_BIAS, REWARD_HEAD, Experts, Naming, place, reward_headed
from runtime.errors import UserError


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be written."""

    layout: Layout  # virtual stages are stages of it
    chunks: int = 1  # stages of the layout that each rank holds
    naming: Naming

    @property
    def sizes(self) -> Coordinates:
        """Of parallelism."""
        return self.layout.tensor, self.layout.pipeline // self.chunks, self.layout.expert


def target_for(layout: Layout, layers: int, layers_per_virtual_stage: int | None, naming: Naming) -> Target:
    """`layers_per_virtual_stage`: None for no virtual stages. Raises UserError when they do not divide the `layers`."""
    if layers_per_virtual_stage is None:
        return Target(layout=layout, naming=naming)
    each, told = layers_per_virtual_stage, f"--layers-per-virtual-stage: is {layers_per_virtual_stage}"
    if layout.layers_per_stage:
        raise UserError(f"{told}; not together with --layers-per-stage")
    if layout.pipeline < 2:
        raise UserError(f"{told}; needs --pipeline-parallel of at least 2")
    if each < 1 or layers % (each * layout.pipeline) or layers == each * layout.pipeline:
        raise UserError(
            f"{told}; a multiple of it, 2 or more times, must be the layers of a stage ({layers} / {layout.pipeline})"
        )
    stages = layers // each
    return Target(layout=msgspec.structs.replace(layout, pipeline=stages), chunks=stages // layout.pipeline, naming=naming)


def rank_parameters(model: HfModel, target: Target, rank: Coordinates) -> list[list[Parameter]]:
    """What a rank holds, of each of its virtual stages."""
    tensor, stage, expert = rank
    found = []
    for chunk in range(target.chunks):
        held = model.family.parameters(
            target.layout, tensor_rank=tensor, pipeline_rank=chunk * target.sizes[1] + stage, expert_rank=expert
        )
        found.append(list(map(reward_headed, held)) if target.naming.reward_head else held)
    return found


def ranks_of(target: Target) -> Iterator[Coordinates]:
    tensor, pipeline, expert = map(range, target.sizes)
    yield from product(tensor, pipeline, expert)


def write_ranks(folder: Path, model: HfModel, target: Target, progress: Progress) -> None:
    """All files; of a rank's tensors all are held at a time."""
    arguments = _arguments(model, target)
    for rank in ranks_of(target):
        state: dict[str, Any] = {"args": arguments, "checkpoint_version": VERSION, "iteration": 0}
        for chunk, parameters in enumerate(rank_parameters(model, target, rank)):
            key = "model" if target.chunks == 1 else f"model{chunk}"
            state[key] = _state(model, target.naming, parameters, progress)
        path = folder / RELEASE / rank_name(rank, target.sizes) / FILE
        path.parent.mkdir(parents=True)
        torch.save(state, path)
    (folder / TRACKER).write_text(RELEASE)


def _state(model: HfModel, naming: Naming, parameters: list[Parameter], progress: Progress) -> dict[str, torch.Tensor]:
    """By the names that the checkpoint is to have."""
    names = {parameter.name for parameter in parameters}
    state: dict[str, torch.Tensor] = {}
    grouped: dict[str, list[torch.Tensor]] = {}
    for parameter in parameters:
        tensor = parameter.from_hf(model.tensors.read)
        progress.add("converting", tensor.nbytes)
        where = place(parameter.name, naming, names)
        if where.expert is None:
            # What torch saves of a tensor is all of its memory.
            state[where.name] = tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
        else:
            grouped.setdefault(where.name, []).append(tensor)
    for name in list(grouped):
        whole = torch.stack([tensor.t() for tensor in grouped.pop(name)])
        hidden = model.family.shape.hidden_size
        state[name] = whole.view(hidden, -1) if name.endswith("1") else whole.view(-1, hidden)
    if REWARD_HEAD in state:
        state[REWARD_BIAS] = state[REWARD_HEAD].new_zeros(1)
    return state


def _arguments(model: HfModel, target: Target) -> argparse.Namespace:
    """What Megatron-LM compares with its own arguments, or takes over with --use-checkpoint-args."""
    tensor, pipeline, expert = target.sizes
    layout, shape = target.layout, model.family.shape
    embedding = next(p for p in model.family.parameters(Layout()) if p.sources[0].name == EMBEDDING)
    dtype = getattr(torch, model.tensors.spec(embedding).dtype)
    numbered = target.naming.experts is Experts.NUMBERED
    found = {
        **arguments_of(model.family, model.config),
        "padded_vocab_size": layout.padded_vocab(shape),
        "make_vocab_size_divisible_by": layout.make_vocab_size_divisible_by,
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": pipeline,
        "expert_model_parallel_size": expert,
        "expert_tensor_parallel_size": tensor,
        "virtual_pipeline_model_parallel_size": target.chunks if target.chunks > 1 else None,
        "num_layers_per_virtual_pipeline_stage": shape.layers // layout.pipeline if target.chunks > 1 else None,
        "num_layer_list": ",".join(map(str, layout.layers_per_stage)) or None,
        "moe_grouped_gemm": target.naming.experts is not Experts.SEQUENTIAL,
        "transformer_impl": "transformer_engine" if target.naming.fused or numbered else "local",
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "use_mcore_models": True,
        "ckpt_format": "torch",
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
    }
    if len(layout.layers_per_stage) > 1:
        found["decoder_first_pipeline_num_layers"] = layout.layers_per_stage[0]
        found["decoder_last_pipeline_num_layers"] = layout.layers_per_stage[-1]
    return argparse.Namespace(**found)
