"""Qwen3's mixture of experts, such as Qwen3-30B-A3B."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from runtime.models.families.family import Family, ParameterMapping, attention, dense, experts
from runtime.models.families.shape import ExpertShape, ModelShape, number, read_shape, require_routing


class Qwen3Moe(Family):
    model_type = "qwen3_moe"
    architecture = "Qwen3Moe"
    unsupported = {"attention_bias": False, "use_sliding_window": False}  # noqa: RUF012

    def read(self, config: Mapping[str, Any], where: str) -> ModelShape:
        """Which layers have experts: every `decoder_sparse_step`-th, without those of `mlp_only_layers`."""
        shape = read_shape(config, where)
        step = number(config, "decoder_sparse_step", where) if "decoder_sparse_step" in config else 1
        single = set(config.get("mlp_only_layers") or ())
        sparse = frozenset(layer for layer in range(shape.layers) if (layer + 1) % step == 0 and layer not in single)
        experts = ExpertShape(
            count=number(config, "num_experts", where),
            intermediate_size=number(config, "moe_intermediate_size", where),
            per_token=number(config, "num_experts_per_tok", where),
            normalized=bool(config.get("norm_topk_prob", False)),
            layers=sparse,
        )
        require_routing(experts, "num_experts", where)
        return replace(shape, experts=experts)

    def layer(self, number: int) -> Iterator[ParameterMapping]:
        assert self.shape.experts is not None
        yield from attention(self.shape, qk_norm=True)
        yield from experts(self.shape) if number in self.shape.experts.layers else dense(self.shape)
