"""Writes a model as a checkpoint of Megatron-LM's own layout: a release, without optimizer and generators."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import msgspec
import torch

from launcher.conversion.arguments import arguments_of
from launcher.conversion.classic_folder import FILE, RELEASE, TRACKER, VERSION, ClassicGrid, Coordinates, as_stored, renumbered
from launcher.conversion.parts import HfModel, Progress
from runtime.errors import UserError
from runtime.models.families import Layout, Parameter
from runtime.models.families.family import EMBEDDING
from runtime.models.families.naming import (
    REWARD_BIAS,
    REWARD_HEAD,
    ExpertStorage,
    LatentStorage,
    Naming,
    place,
)
from runtime.models.families.shape import ModelShape


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """The layout and the names of the checkpoint to write."""

    grid: ClassicGrid
    layout: Layout  # cuts a rank's parameters: its stages are virtual stages, its expert ranks are groups of experts
    naming: Naming
    noops: tuple[int, ...] = ()  # numbers of the layers that only pass tokens on
    each: int | None = None  # layers of a virtual stage, including those that only pass tokens on

    @property
    def chunks(self) -> int:
        """The stages of the layout on each rank."""
        return self.layout.pipeline // self.grid.pipeline


def target_for(
    layout: Layout,
    shape: ModelShape,
    naming: Naming,
    *,
    layers_per_virtual_stage: int | None = None,
    noops: tuple[int, ...] = (),
    expert_tensor: int | None = None,
    extended: bool = False,
) -> Target:
    """Return the target. `layout` is the requested layout: its stages and expert ranks are processes. `expert_tensor`: None for
    the number of tensor ranks. Raises UserError, which names the option, if options do not fit each other or the model.
    """
    latent = shape.latent
    if naming.latent is LatentStorage.JOINED and (naming.fused or latent is None or latent.query_rank is None):
        raise UserError("--mindspeed-mla: is for latent attention with a q_lora_rank, and not with --transformer-impl")
    _require_options(layout, shape, layers_per_virtual_stage, noops, expert_tensor, extended)
    grid = ClassicGrid(
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        expert=layout.expert,
        expert_tensor=expert_tensor or layout.tensor,
        extended=extended and layout.tensor > 1,
    )
    total = shape.layers + len(noops)
    stages = layout.pipeline if layers_per_virtual_stage is None else total // layers_per_virtual_stage
    counts = [sum(number not in noops for number in numbers) for numbers in _stage_numbers(total, stages)] if noops else []
    cut = msgspec.structs.replace(
        layout,
        pipeline=stages,
        expert=grid.groups,
        whole_experts=grid.whole_experts,
        empty_stages=bool(noops),
        layers_per_stage=tuple(counts) or layout.layers_per_stage,
    )
    cut.require(shape)
    return Target(grid=grid, layout=cut, naming=naming, noops=noops, each=layers_per_virtual_stage)


def _require_options(
    layout: Layout, shape: ModelShape, each: int | None, noops: tuple[int, ...], expert_tensor: int | None, extended: bool
) -> None:
    whole = extended or expert_tensor == 1
    msgspec.structs.replace(layout, whole_experts=whole, **({"pipeline": 1} if noops else {})).require(shape)
    total = shape.layers + len(noops)
    if noops:
        fault = f"--noop-layers: are {','.join(map(str, noops))}"
        if layout.layers_per_stage:
            raise UserError(f"{fault}; not together with --layers-per-stage")
        if len(set(noops)) < len(noops) or not all(0 <= number < total for number in noops):
            raise UserError(f"{fault}; must be different numbers from 0 to {total - 1}")
        if layout.pipeline < 1 or total % layout.pipeline:
            raise UserError(f"{fault}: {total} layers with them; must be a multiple of --pipeline-parallel {layout.pipeline}")
    if each is not None:
        fault = f"--layers-per-virtual-stage: is {each}"
        if layout.layers_per_stage:
            raise UserError(f"{fault}; not together with --layers-per-stage")
        if layout.pipeline < 2:
            raise UserError(f"{fault}; needs --pipeline-parallel of at least 2")
        if each < 1 or total % (each * layout.pipeline) or total == each * layout.pipeline:
            raise UserError(
                f"{fault}; a multiple of it, 2 or more times, must be the layers of a stage ({total} / {layout.pipeline})"
            )
    if expert_tensor not in (None, 1, layout.tensor):
        raise UserError(f"--expert-tensor-parallel: is {expert_tensor}; must be 1, or --tensor-parallel {layout.tensor}")
    if whole and shape.experts is None:
        option = "--moe-tp-extend-ep" if extended else "--expert-tensor-parallel"
        raise UserError(f"{option}: is for models with experts")
    if extended and expert_tensor is not None:
        raise UserError("--moe-tp-extend-ep: not together with --expert-tensor-parallel")


def _stage_numbers(total: int, stages: int) -> list[range]:
    """Return the layers of each stage, numbered in the model."""
    return [range(stage * (total // stages), (stage + 1) * (total // stages)) for stage in range(stages)]


def rank_parameters(model: HfModel, target: Target, rank: Coordinates) -> list[list[Parameter]]:
    """Return the parameters of a rank, for each of its virtual stages."""
    found = []
    for stage in range(rank[1], target.layout.pipeline, target.grid.pipeline):
        held = model.family.parameters(
            target.layout, tensor_rank=rank[0], pipeline_rank=stage, expert_rank=target.grid.group(rank)
        )
        held = as_stored(held, target.naming.latent, target.naming.reward_head)
        if target.noops:  # their numbers are left out
            numbers = _stage_numbers(model.family.shape.layers + len(target.noops), target.layout.pipeline)[stage]
            left = [local for local, number in enumerate(numbers) if number not in target.noops]
            held = [msgspec.structs.replace(each, name=renumbered(each.name, left)) for each in held]
        found.append(held)
    return found


def write_ranks(model: HfModel, target: Target, folder: Path, progress: Progress) -> None:
    """Write the files of all ranks. Memory holds all tensors of one rank at a time."""
    arguments = _arguments(model, target)
    for rank in target.grid.ranks():
        state: dict[str, Any] = {"args": arguments, "checkpoint_version": VERSION, "iteration": 0}
        for chunk, parameters in enumerate(rank_parameters(model, target, rank)):
            key = "model" if target.chunks == 1 else f"model{chunk}"
            state[key] = _state(model, target.naming, parameters, progress)
        path = folder / RELEASE / target.grid.name(rank) / FILE
        path.parent.mkdir(parents=True)
        torch.save(state, path)
    (folder / TRACKER).write_text(RELEASE)


def _state(model: HfModel, naming: Naming, parameters: list[Parameter], progress: Progress) -> dict[str, torch.Tensor]:
    """Return a rank's tensors by their names in the checkpoint."""
    names = {parameter.name for parameter in parameters}
    state: dict[str, torch.Tensor] = {}
    grouped: dict[str, list[torch.Tensor]] = {}
    for parameter in parameters:
        tensor = parameter.from_hf(model.tensors.read)
        progress("converting", tensor.nbytes)
        where = place(parameter.name, naming, names)
        if where.expert is None:
            # torch saves the whole memory of a tensor.
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
    """Return the arguments that Megatron-LM compares with its own, or takes over with --use-checkpoint-args."""
    grid = target.grid
    layout, shape = target.layout, model.family.shape
    embedding = next(p for p in model.family.parameters(Layout()) if p.sources[0].name == EMBEDDING)
    dtype = getattr(torch, model.tensors.spec(embedding).dtype)
    numbered = target.naming.experts is ExpertStorage.NUMBERED
    found = {
        **arguments_of(model.family, model.config),
        "padded_vocab_size": layout.padded_vocab(shape),
        "make_vocab_size_divisible_by": layout.make_vocab_size_divisible_by,
        "tensor_model_parallel_size": grid.tensor,
        "pipeline_model_parallel_size": grid.pipeline,
        "expert_model_parallel_size": grid.expert,
        "expert_tensor_parallel_size": grid.expert_tensor,
        "moe_tp_extend_ep": grid.extended,
        "noop_layers": ",".join(map(str, target.noops)) or None,
        "virtual_pipeline_model_parallel_size": target.chunks if target.chunks > 1 else None,
        "num_layers_per_virtual_pipeline_stage": target.each,
        "num_layer_list": ",".join(map(str, layout.layers_per_stage)) or None if not target.noops else None,
        "moe_grouped_gemm": target.naming.experts is not ExpertStorage.SEQUENTIAL,
        "transformer_impl": "transformer_engine" if target.naming.fused or numbered else "local",
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16, "fp16": dtype == torch.float16,
        "use_mcore_models": True, "ckpt_format": "torch", "consumed_train_samples": 0, "consumed_valid_samples": 0,
    }
    found["num_layers"] += len(target.noops)
    if len(layout.layers_per_stage) > 1 and not target.noops:
        found["decoder_first_pipeline_num_layers"] = layout.layers_per_stage[0]
        found["decoder_last_pipeline_num_layers"] = layout.layers_per_stage[-1]
    return argparse.Namespace(**found)
