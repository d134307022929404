"""Checks of a configuration whose trainer, critic or reference runs on megatron-core. Loads neither torch nor megatron-core."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

from runtime.cluster.topology import block_size, model_key
from runtime.config import Config, Parallel, Spread, Trainer
from runtime.errors import UserError
from runtime.models import hf_config
from runtime.models.families import FAMILIES, family_for
from runtime.models.families.memory import RankBytes
from runtime.models.limits import MEGATRON_NEEDS_CORE, layout_of, rank_memory, uncut

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
                yield from _layout(key, config, settings, model)
        else:
            if settings.parallel != Parallel():
                yield f"{key}.parallel: is for engine megatron; {_ON_TORCH[role]}"
            if isinstance(settings, Trainer):
                yield from _megatrons_own(key, config, settings)
            elif settings.backend != "auto":
                yield f"{key}.backend: {settings.backend} is for engine megatron; {_ON_TORCH[role]}"


def _megatrons_own(key: str, config: Config, settings: Trainer) -> Iterator[str]:
    """What engine torch has not."""
    if config.checkpoint.async_save:
        yield f"checkpoint.async_save: true needs {key}.engine megatron; must be false for engine torch"
    if not settings.overlap:
        yield f"{key}.overlap: false is for engine megatron; engine torch always overlaps; must be true"
    for kind in settings.offloaded if settings.cpu_offload else ():
        yield f"{key}.offload_train_{kind}: true, but with cpu_offload it is in host memory at all times; must be false"
    yield from _values_need_weights(key, settings)


def _processes(key: str, settings: Spread) -> Iterator[str]:
    parallel, processes = settings.parallel, settings.processes
    block = block_size(parallel)
    product = f"parallel.tensor {parallel.tensor} x context {parallel.context} x pipeline {parallel.pipeline}"
    if parallel.data is None and processes % block:
        yield f"{key}.processes: {processes} is not a multiple of {product}"
    if parallel.data is not None and processes != block * parallel.data:
        expected = block * parallel.data
        yield f"{key}.processes: {processes} is not {product} x data {parallel.data}; must be {expected}, or left out"
    alike = processes // (parallel.tensor * parallel.pipeline)
    if processes % block == 0 and alike % parallel.expert:
        yield (
            f"{key}.parallel.expert: {parallel.expert} does not divide the ranks that hold the same part of the model, of "
            f"which {processes} processes of parallel.tensor {parallel.tensor} x pipeline {parallel.pipeline} make {alike}"
        )
    if parallel.sequence and parallel.tensor == 1:
        yield f"{key}.parallel.sequence: true needs parallel.tensor > 1, whose ranks it spreads activations over"
    # An interpreter of its own has other packages; the process says so itself.
    if not settings.python and not _installed():
        yield f"{key}.engine: {MEGATRON_NEEDS_CORE}"


def _unsupported(key: str, config: Config, settings: Spread) -> Iterator[str]:
    if config.lora is not None and key == "services.trainer":
        yield "lora: engine megatron trains whole models; take services.trainer.engine torch"
    if not isinstance(settings, Trainer):
        return
    yield from _values_need_weights(key, settings)
    if settings.cpu_offload:
        yield f"{key}.cpu_offload: is engine torch's; must be false for engine megatron"


def _values_need_weights(key: str, settings: Trainer) -> Iterator[str]:
    if settings.offload_train_param and key == "services.critic":
        yield f"{key}.offload_train_param: true leaves it no weights to compute values with between updates; must be false"


def _layout(key: str, config: Config, settings: Spread, policy: Mapping[str, Any]) -> Iterator[str]:
    parallel, stages = settings.parallel, settings.parallel.layers_per_stage
    made: dict[str, Any] = {}
    if config.warmup:
        made = {
            "model_type": "qwen2",
            "vocab_size": 1,
            "intermediate_size": config.warmup.intermediate_size,
            "tie_word_embeddings": True,
        }
    where = model_key(config, key.removeprefix("services."))
    try:
        described = {**made, **policy} if not config.model.path else policy
        family = family_for(described, where)
        hf_config.parse(described, where, FAMILIES)
    except UserError as error:
        yield str(error)
        return
    for fault in layout_of(parallel).faults(family.shape):
        yield f"{key}.parallel: {fault}"
    if family.shape.experts is not None and parallel.tensor > 1 and not parallel.sequence:
        yield f"{key}.parallel.sequence: must be true for a mixture of experts with parallel.tensor {parallel.tensor}"
    if len(set(stages[1:-1])) > 1:
        yield f"{key}.parallel.layers_per_stage: {stages}: all but the first and the last number must be equal in megatron-core"
    version = "" if settings.python else _version()
    if key != "services.critic" and (fault := uncut(family.tied, parallel.pipeline, version)):
        yield f"{key}.{fault}"


def _version() -> str:
    """Of the installed package, without importing it; "" where there is none."""
    try:
        return importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return ""


def memory_of_ranks(
    config: Config, models: Mapping[str, Mapping[str, Any] | None], on_cpus: bool = False
) -> dict[str, RankBytes]:
    """By role, of those on megatron-core whose model is known: what a rank holds."""
    return {
        role: rank_memory(config, role, model, on_cpus)
        for role, model in models.items()
        if model is not None and "model_type" in model and getattr(config.services, role).engine == "megatron"
    }


def _installed() -> bool:
    try:
        return importlib.util.find_spec("megatron.core") is not None
    except ModuleNotFoundError:
        return False
