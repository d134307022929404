"""GLM-4.5 and its smaller Air: grouped-query attention with partly rotated heads, and DeepSeek-V3's experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from runtime.errors import UserError
from runtime.models.families.deepseek_v3 import read_experts
from runtime.models.families.family import Family
from runtime.models.families.shape import ModelShape, read_shape


class Glm4Moe(Family):
    model_type = "glm4_moe"
    architecture = "Glm4Moe"
    unsupported = {"norm_topk_prob": True}  # noqa: RUF012
    defaults = {  # noqa: RUF012
        "attention_bias": False,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 131072,
        "n_group": 1,
        "n_shared_experts": 1,
        "num_key_value_heads": 8,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "topk_group": 1,
        "use_qk_norm": False,
    }

    def __init__(self, config: Mapping[str, Any], where: str, value_head: bool = False):
        super().__init__(config, where, value_head)
        config = {**self.defaults, **config}
        self.qkv_bias, self.qk_norm = bool(config["attention_bias"]), bool(config["use_qk_norm"])

    @classmethod
    def read(cls, config: Mapping[str, Any], where: str) -> ModelShape:
        return replace(read_shape(config, where), experts=read_experts(config, where))

    @classmethod
    def traits(cls, config: Mapping[str, Any], shape: ModelShape, where: str) -> dict[str, Any]:
        share = config["partial_rotary_factor"]
        rotated = int(shape.head_dim * share) if isinstance(share, (int, float)) and 0 < share <= 1 else 0
        if rotated < 2 or rotated % 2:
            raise UserError(
                f"{where}: partial_rotary_factor is {share!r} of head_dim {shape.head_dim}; must be above 0, at most 1, "
                "and make an even number"
            )
        return {"output_bias": False, "qk_norm": bool(config["use_qk_norm"]), "rotary_dim": rotated}
