"""Qwen3's mixture of experts, such as Qwen3-30B-A3B."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.models.families.family import Family
from runtime.models.families.shape import ModelShape, number, read_routed


class Qwen3Moe(Family):
    model_type = "qwen3_moe"
    architecture = "Qwen3Moe"
    qk_norm = True
    unsupported = {"attention_bias": False}  # noqa: RUF012

    @classmethod
    def read(cls, config: Mapping[str, Any], where: str) -> ModelShape:
        """Return the sizes. Every `decoder_sparse_step`-th layer has experts, except those in `mlp_only_layers`."""
        layers = range(number(config, "num_hidden_layers", where))
        step = number(config, "decoder_sparse_step", where) if "decoder_sparse_step" in config else 1
        single = set(config.get("mlp_only_layers") or ())
        return read_routed(
            config,
            where,
            "num_experts",
            intermediate_size=number(config, "moe_intermediate_size", where),
            normalized=bool(config.get("norm_topk_prob", False)),
            layers=frozenset(layer for layer in layers if (layer + 1) % step == 0 and layer not in single),
        )
