"""Checks of a configuration's rollout engine. Loads neither torch nor vLLM."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from runtime.cluster.topology import fleets
from runtime.config import Config, Rollout
from runtime.rollout.vllm.arguments import own_faults
from runtime.rollout.vllm.sampling import LEAST_TEMPERATURE

_VLLM_ALONE = ("tensor_parallel", "engine_args")
_DEFAULT = msgspec.structs.asdict(Rollout())


def rollout_faults(config: Config, model: Mapping[str, Any] | None) -> Iterator[str]:
    """One line per fault. `model`: the contents of the policy's config.json, as far as it is known."""
    for key, fleet in fleets(config).items():
        if fleet.engine == "torch":
            yield from (f"{key}.{name}: is for engine vllm" for name in _VLLM_ALONE if getattr(fleet, name) != _DEFAULT[name])
            continue
        # An interpreter of its own has other packages; the process says so itself.
        if not fleet.python and importlib.util.find_spec("vllm") is None:
            yield f"{key}.engine: vllm is not installed here; run make install-vllm, and name its interpreter in {key}.python"
        yield from own_faults(fleet.engine_args, f"{key}.engine_args")
        yield from _heads(key, fleet.tensor_parallel, model or {})
    if any(fleet.engine == "vllm" for fleet in fleets(config).values()):
        yield from _temperatures(config)
        if config.publication.staging == "inplace":
            yield "publication.staging: inplace is for engine torch; vLLM takes whole versions alone, so that shadow is needed"


def _heads(key: str, ways: int, model: Mapping[str, Any]) -> Iterator[str]:
    heads = model.get("num_attention_heads")
    if heads is not None and heads % ways:
        yield f"{key}.tensor_parallel: {ways} does not divide the model's {heads} attention heads"


def _temperatures(config: Config) -> Iterator[str]:
    chosen = {"sampling.temperature": config.sampling.temperature, "evaluation.temperature": config.evaluation.temperature}
    for index, each in enumerate(config.evaluation.sets):
        if each.temperature is not None:
            chosen[f"evaluation.sets.{index}.temperature"] = each.temperature
    for key, temperature in chosen.items():
        if 0 < temperature < LEAST_TEMPERATURE:
            yield f"{key}: {temperature} is too low for engine vllm; must be 0 or at least {LEAST_TEMPERATURE}"
