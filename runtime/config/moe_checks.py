"""Checks of how a policy with experts is trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from runtime.config import Config, Moe
from runtime.models import hf_config


def moe_faults(config: Config, policy: Mapping[str, Any] | None) -> Iterator[str]:
    """One line per fault. `policy`: the contents of its config.json, as far as it is known."""
    experts, off = hf_config.experts_of(policy or {}), msgspec.structs.asdict(Moe())
    for name, value in msgspec.structs.asdict(config.moe).items():
        if value == off[name]:
            continue
        fault = ""
        if policy is not None and experts is None:
            fault = "is for models with experts, and model.path has none"
        elif config.lora is not None:
            fault = "is not for adapters (lora)"
        elif config.services.trainer.engine != "torch":
            fault = "needs services.trainer.engine torch"
        elif name == "bias_update" and experts is not None and not experts.corrected:
            fault = "is for models whose scores have a bias, as deepseek_v3's and glm4_moe's, and model.path has none"
        if fault:
            yield f"moe.{name}: {value} {fault}; must be {off[name]}"
