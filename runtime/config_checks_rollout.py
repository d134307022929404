"""Checks of a configuration's rollout engine. Loads neither torch nor vLLM."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

from runtime.config import Config, Rollout
from runtime.engines.vllm.arguments import own_faults
from runtime.engines.vllm.sampling import LEAST_TEMPERATURE

KEY = "services.rollout"


def rollout_faults(config: Config, model: Mapping[str, Any] | None) -> Iterator[str]:
    """One line per fault. `model`: the contents of the policy's config.json, as far as it is known."""
    settings = config.services.rollout
    if settings.engine == "torch":
        for key in ("tensor_parallel", "engine_args"):
            if getattr(settings, key) != getattr(Rollout(), key):
                yield f"{KEY}.{key}: is for engine vllm"
        return
    # An interpreter of its own has other packages; the process says so itself.
    if not settings.python and importlib.util.find_spec("vllm") is None:
        yield f"{KEY}.engine: vllm is not installed here; install it, or name the interpreter that has it in {KEY}.python"
    yield from own_faults(settings.engine_args)
    yield from _heads(settings.tensor_parallel, model or {})
    yield from _temperatures(config)


def _heads(ways: int, model: Mapping[str, Any]) -> Iterator[str]:
    heads = model.get("num_attention_heads")
    if heads is not None and heads % ways:
        yield f"{KEY}.tensor_parallel: {ways} does not divide the model's {heads} attention heads"


def _temperatures(config: Config) -> Iterator[str]:
    chosen = {"sampling.temperature": config.sampling.temperature, "evaluation.temperature": config.evaluation.temperature}
    for index, each in enumerate(config.evaluation.sets):
        if each.temperature is not None:
            chosen[f"evaluation.sets.{index}.temperature"] = each.temperature
    for key, temperature in chosen.items():
        if 0 < temperature < LEAST_TEMPERATURE:
            yield f"{key}: {temperature} is too low for engine vllm; must be 0 or at least {LEAST_TEMPERATURE}"
