"""Needs, memory and limits of engines, as far as known before an engine is made. Used by the engines and by the checks that run
before them. Loads no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from runtime.config import Config, Parallel, Spread, Trainer
from runtime.models.families import Family, Layout, family_for
from runtime.models.families.adapters import AdapterTable
from runtime.models.families.memory import ModelWork, RankBytes, rank_bytes

MEGATRON_NEEDS_CORE = "megatron needs a package: pip install 'sluice-rl[megatron]'"
MEGATRON_NEEDS_MINDSPEED = "megatron needs Megatron-LM and MindSpeed: install them (docs/guides/ascend.md)"
LORA_NEEDS_PEFT = "lora: needs a package: pip install 'sluice-rl[lora]'"


NEEDS_TORCHAO = "training.optimizer.name: adamw_8bit needs a package: pip install 'sluice-rl[torchao]'"


def uncut(tied: bool, pipeline: int, version: str) -> str:
    """Return why this version of megatron-core cannot cut such a model into pipeline stages; "" if it can."""
    if not (tied and pipeline > 1 and version.startswith("0.12.")):
        return ""
    return (
        f"parallel.pipeline: {pipeline}: megatron-core {version} cannot cut up a model whose head is its embedding; "
        "must be 1, or take version 0.16.1"
    )


def unreplayed(version: str) -> str:
    """Return why this version of megatron-core cannot replay the experts of the rollout; "" if it can."""
    if not version.startswith("0.12."):
        return ""
    return f"moe.router_replay: routing: megatron-core {version} cannot set experts; must be off, or take version 0.16.1"


def layout_of(parallel: Parallel) -> Layout:
    return Layout(
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        expert=parallel.expert,
        layers_per_stage=tuple(parallel.layers_per_stage),
    )


def longest_text(config: Config) -> int:
    """Return the number of tokens of prompt and reply that a rollout must be able to hold."""
    reply = max(config.sampling.max_new_tokens, config.evaluation.max_new_tokens)
    return max(config.data.max_prompt_tokens + reply, config.gateway.context if config.gateway is not None else 0)


def kv_cache_bytes(model: Mapping[str, Any], slots: int, max_len: int, dtype_bytes: int) -> int:
    """Return the bytes of a static KV cache: keys and values, 2 · layers · kv_heads · head_dim · bytes · slots · length; with
    latent attention layers · (kv_lora_rank + qk_rope_head_dim) · bytes · slots · length. `model` is a config.json of the Llama
    family; `num_key_value_heads` and `head_dim` have the family's defaults."""
    if isinstance(rank := model.get("kv_lora_rank"), int):
        return model["num_hidden_layers"] * (rank + model["qk_rope_head_dim"]) * dtype_bytes * slots * max_len
    heads = model["num_attention_heads"]
    kv_heads = model.get("num_key_value_heads") or heads
    head_dim = model.get("head_dim") or model["hidden_size"] // heads
    return 2 * model["num_hidden_layers"] * kv_heads * head_dim * dtype_bytes * slots * max_len


def rank_memory(config: Config, role: str, model: Mapping[str, Any], on_cpus: bool = False) -> RankBytes:
    """Return the memory of the rank of `role` on megatron-core that holds most. `model` is a config.json. Raises UserError if
    the model has no mapping."""
    settings: Spread = getattr(config.services, role)
    trains = isinstance(settings, Trainer)
    dtype = config.model.dtype if isinstance(settings, Trainer) else settings.dtype
    work = ModelWork(
        ranks=settings.processes,
        tokens=_microbatch_tokens(config, settings) // settings.parallel.context,
        width=4 if dtype == "float32" or (dtype == "auto" and on_cpus) else 2,
        trains=trains,
        sequence=settings.parallel.sequence,
        checkpointing=isinstance(settings, Trainer) and bool(settings.activation_checkpointing),
    )
    family = family_for(model, value_head=role == "critic")
    return rank_bytes(family, layout_of(settings.parallel), work, adapters_of(config, role, family))


MOMENTS = {"adamw": 8, "muon": 4, "adamw_8bit": 2}  # bytes of an element's optimizer state


def copies_bytes(config: Config, role: str, model: Mapping[str, Any]) -> int:
    """Return the host memory, on one node of several or on the only one, of the copies of all ranks of `role` together
    (`checkpoint.in_memory`): two versions of float32 weights and optimizer state. `model` is a config.json. On several nodes
    each copy has a mirror, so all nodes together have twice as much. Raises UserError if the model has no mapping."""
    family = family_for(model, value_head=role == "critic", mapped=False)
    trained = adapters_of(config, role, family) or family
    elements = sum(math.prod(shape) for shape in trained.tensors().values())
    return 2 * elements * (4 + MOMENTS[config.optimizer_of("critic" if role == "critic" else "trainer").name])


def adapters_of(config: Config, role: str, family: Family) -> AdapterTable | None:
    """Return the adapters that `role` trains; None if it trains the weights. Raises UserError as AdapterTable does."""
    if config.lora is None or role != "trainer":
        return None
    return AdapterTable(family, config.lora.rank, config.lora.target_modules, layout_of(config.services.trainer.parallel))


def memory_fault(config: Config, role: str, held: RankBytes, available: int) -> str:
    """Return why `available` bytes are too few for a rank that holds `held`; "" if they suffice."""
    if held.total <= available:
        return ""
    settings: Spread = getattr(config.services, role)
    gigabytes, fixed = f"{available / 1e9:.1f} GB", held.total - held.activations
    if fixed >= available:
        return (
            f"services.{role}.processes: {settings.processes} processes need {fixed / 1e9:.1f} GB each without activations, "
            f"and have {gigabytes}; must be more, or shard the model over more of them (services.{role}.parallel)"
        )
    constant = held.constant if fixed + held.constant < available else 0
    most = (available - fixed - constant) * _microbatch_tokens(config, settings) // (held.activations - constant)
    section, chosen = ("training", config.training) if isinstance(settings, Trainer) else (f"services.{role}", settings)
    return (
        f"{section}.max_tokens_per_microbatch: {chosen.max_tokens_per_microbatch} needs about {held.total / 1e9:.1f} GB "
        f"in a process of services.{role}, which has {gigabytes}; must be at most {most}"
    )


def _microbatch_tokens(config: Config, settings: Spread) -> int:
    """Return the tokens of the largest micro-batch: the number allowed, or that of a whole step if smaller."""
    if not isinstance(settings, Trainer):
        return settings.max_tokens_per_microbatch
    sequences = config.training.groups_per_step * config.sampling.group_size
    return min(config.training.max_tokens_per_microbatch, sequences * longest_text(config))
