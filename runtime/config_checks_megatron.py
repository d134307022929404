"""Checks of a configuration whose trainer, critic or reference runs on megatron-core. Loads neither torch nor megatron-core."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

from runtime.config import Config, Parallel, Spread, Trainer
from runtime.engines.families import Layout, family_for
from runtime.engines.families.memory import RankBytes, Work, rank_bytes
from runtime.errors import UserError

INSTALL = "megatron needs a package: pip install 'sluice-rl[megatron]'"


_SHARDS = "engine torch spreads models over all its processes"
_ON_TORCH = {"trainer": _SHARDS, "critic": _SHARDS, "reference": "engine torch has one process a replica"}


def megatron_faults(config: Config, models: Mapping[str, Mapping[str, Any] | None]) -> Iterator[str]:
    """One line per fault. `models`: by role, the contents of its model's config.json, as far as it is known."""
    for role, model in models.items():
        settings: Spread = getattr(config.services, role)
        key = f"services.{role}"
        if settings.engine == "megatron":
            yield from _processes(key, settings)
            yield from _unsupported(key, config, settings)
            if model is not None:
                yield from _layout(key, config, settings.parallel, model)
        elif settings.parallel != Parallel():
            yield f"{key}.parallel: is for engine megatron; {_ON_TORCH[role]}"


def _processes(key: str, settings: Spread) -> Iterator[str]:
    tensor, pipeline = settings.parallel.tensor, settings.parallel.pipeline
    if settings.processes % (tensor * pipeline):
        yield f"{key}.processes: {settings.processes} is not a multiple of parallel.tensor {tensor} x pipeline {pipeline}"
    if settings.parallel.sequence and tensor == 1:
        yield f"{key}.parallel.sequence: true needs parallel.tensor > 1, whose ranks it spreads activations over"
    # An interpreter of its own has other packages; the process says so itself.
    if not settings.python and not _installed():
        yield f"{key}.engine: {INSTALL}"


def _unsupported(key: str, config: Config, settings: Spread) -> Iterator[str]:
    if config.lora is not None and key == "services.trainer":
        yield "lora: engine megatron trains whole models; take services.trainer.engine torch"
    if isinstance(settings, Trainer) and settings.cpu_offload:
        yield f"{key}.cpu_offload: is engine torch's; must be false for engine megatron"


def _layout(key: str, config: Config, parallel: Parallel, policy: Mapping[str, Any]) -> Iterator[str]:
    made = (
        {"model_type": "qwen2", "vocab_size": 1, "intermediate_size": config.warmup.intermediate_size} if config.warmup else {}
    )
    try:
        family = family_for({**made, **policy} if not config.model.path else policy, "model.path")
    except UserError as error:
        yield str(error)
        return
    if family.shape.experts is not None:
        yield f"{key}.engine: megatron trains no mixture of experts yet; the model is of type {family.model_type}"
        return
    for fault in layout_of(parallel).faults(family.shape):
        yield f"{key}.parallel: {fault}"


def layout_of(parallel: Parallel) -> Layout:
    return Layout(tensor=parallel.tensor, pipeline=parallel.pipeline)


def memory_of_ranks(config: Config, models: Mapping[str, Mapping[str, Any] | None]) -> dict[str, RankBytes]:
    """By role, of those on megatron-core whose model is known: what a rank holds on accelerators."""
    return {
        role: _memory(role, config, getattr(config.services, role), model)
        for role, model in models.items()
        if model is not None and "model_type" in model and getattr(config.services, role).engine == "megatron"
    }


def _memory(role: str, config: Config, settings: Spread, model: Mapping[str, Any]) -> RankBytes:
    family = family_for(model, value_head=role == "critic")
    trains = isinstance(settings, Trainer)
    dtype = config.model.dtype if isinstance(settings, Trainer) else settings.dtype
    tokens = config.training if isinstance(settings, Trainer) else settings
    work = Work(
        ranks=settings.processes,
        tokens=tokens.max_tokens_per_microbatch,
        width=4 if dtype == "float32" else 2,
        trains=trains,
        sequence=settings.parallel.sequence,
        checkpointing=isinstance(settings, Trainer) and settings.activation_checkpointing,
    )
    return rank_bytes(family, layout_of(settings.parallel), work)


def _installed() -> bool:
    try:
        return importlib.util.find_spec("megatron.core") is not None
    except ModuleNotFoundError:
        return False
