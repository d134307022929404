"""Mixtral: Mistral with a mixture of experts in every layer. The weights of the chosen experts add up to 1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.models.families.mistral import Mistral
from runtime.models.families.shape import ModelShape, read_routed


class Mixtral(Mistral):
    model_type = "mixtral"
    architecture = "Mixtral"
    unsupported = {"attention_bias": False}  # noqa: RUF012
    defaults = {  # noqa: RUF012
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }

    @classmethod
    def read(cls, config: Mapping[str, Any], where: str) -> ModelShape:
        return read_routed(config, where, "num_local_experts", block="block_sparse_moe", parts=("w1", "w3", "w2"))
