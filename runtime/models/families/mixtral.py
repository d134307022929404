"""Mixtral: Mistral with a mixture of experts in every layer, whose chosen experts' weights add up to 1."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from runtime.models.families.family import Family, ParameterMapping, attention, experts
from runtime.models.families.shape import ExpertShape, ModelShape, number, read_shape, require_routing, windows


class Mixtral(Family):
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

    def read(self, config: Mapping[str, Any], where: str) -> ModelShape:
        shape = read_shape(config, where)
        experts = ExpertShape(
            count=number(config, "num_local_experts", where),
            intermediate_size=shape.intermediate_size,
            per_token=number(config, "num_experts_per_tok", where),
            normalized=True,
            layers=frozenset(range(shape.layers)),
            block="block_sparse_moe",
            parts=("w1", "w3", "w2"),
        )
        require_routing(experts, "num_local_experts", where)
        return replace(shape, experts=experts)

    @classmethod
    def traits(cls, config: Mapping[str, Any], where: str) -> dict[str, Any]:
        return {"windows": windows(config, where, alike=True), "experts": cls(config, where).shape.experts}

    def layer(self, number: int) -> Iterator[ParameterMapping]:
        yield from attention(self.shape)
        yield from experts(self.shape)
