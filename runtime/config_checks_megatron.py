"""Checks of a configuration whose trainer or critic runs on megatron-core. Loads neither torch nor megatron-core."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

from runtime.config import Config, Parallel, Trainer
from runtime.engines.families import Layout, family_for
from runtime.errors import UserError

INSTALL = "megatron needs a package: pip install 'sluice-rl[megatron]'"


def megatron_faults(config: Config, models: Mapping[str, Mapping[str, Any] | None]) -> Iterator[str]:
    """One line per fault. `models`: by role, the contents of its model's config.json, as far as it is known."""
    for role, model in models.items():
        settings: Trainer = getattr(config.services, role)
        key = f"services.{role}"
        if settings.engine == "megatron":
            yield from _processes(key, settings)
            yield from _unsupported(key, config, settings)
            if model is not None:
                yield from _layout(key, config, settings.parallel, model)
        else:
            if config.checkpoint.async_save:
                yield f"checkpoint.async_save: true needs {key}.engine megatron; must be false for engine torch"
            if settings.parallel != Parallel():
                yield f"{key}.parallel: is for engine megatron; engine torch spreads models over all its processes"
            if not settings.overlap:
                yield f"{key}.overlap: false is for engine megatron; engine torch always overlaps; must be true"
            for kind in settings.offloaded:
                yield f"{key}.offload_train_{kind}: true is for engine megatron; engine torch has cpu_offload; must be false"


def _processes(key: str, settings: Trainer) -> Iterator[str]:
    tensor, pipeline = settings.parallel.tensor, settings.parallel.pipeline
    if settings.processes % (tensor * pipeline):
        yield f"{key}.processes: {settings.processes} is not a multiple of parallel.tensor {tensor} x pipeline {pipeline}"
    if settings.parallel.sequence and tensor == 1:
        yield f"{key}.parallel.sequence: true needs parallel.tensor > 1, whose ranks it spreads activations over"
    # An interpreter of its own has other packages; the process says so itself.
    if not settings.python and not _installed():
        yield f"{key}.engine: {INSTALL}"


def _unsupported(key: str, config: Config, settings: Trainer) -> Iterator[str]:
    if config.lora is not None and key == "services.trainer":
        yield "lora: engine megatron trains whole models; take services.trainer.engine torch"
    if settings.offload_train_param and key == "services.critic":
        yield f"{key}.offload_train_param: true leaves it no weights to compute values with between updates; must be false"
    if settings.cpu_offload:
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
    for fault in Layout(tensor=parallel.tensor, pipeline=parallel.pipeline).faults(family.shape):
        yield f"{key}.parallel: {fault}"


def _installed() -> bool:
    try:
        return importlib.util.find_spec("megatron.core") is not None
    except ModuleNotFoundError:
        return False
