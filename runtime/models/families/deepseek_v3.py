"""DeepSeek-V3 and models of its shape: R1, V3.1, Moonlight, Kimi-K2 (arXiv:2412.19437, section 2.1)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from runtime.errors import UserError
from runtime.models.families.family import Family, ParameterMapping, norm, row_parallel
from runtime.models.families.parameter import SourceTensor
from runtime.models.families.shape import ExpertShape, LatentShape, ModelShape, number, read_shape
from runtime.models.forward import YarnScaling, read_rope, yarn_growth


class DeepseekV3(Family):
    model_type = "deepseek_v3"
    architecture = "DeepseekV3"
    unsupported = {  # noqa: RUF012
        "attention_bias": False,
        "rope_interleave": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "moe_layer_freq": 1,
    }

    @classmethod
    def read(cls, config: Mapping[str, Any], where: str) -> ModelShape:
        """Return the sizes. All layers except the first `first_k_dense_replace` have experts."""
        latent = LatentShape(
            query_rank=None if config.get("q_lora_rank") is None else number(config, "q_lora_rank", where),
            rank=number(config, "kv_lora_rank", where),
            plain=number(config, "qk_nope_head_dim", where),
            rotated=number(config, "qk_rope_head_dim", where),
            value=number(config, "v_head_dim", where),
        )
        if latent.rotated % 2:
            raise UserError(f"{where}: qk_rope_head_dim is {latent.rotated}; must be even")
        # Every query head has its own key-value head: config.json's key-value heads and head_dim have no effect.
        alike = {"num_key_value_heads": config.get("num_attention_heads"), "head_dim": latent.head}
        return replace(read_shape({**config, **alike}, where), latent=latent, experts=read_experts(config, where))

    @classmethod
    def traits(cls, config: Mapping[str, Any], shape: ModelShape, where: str) -> dict[str, Any]:
        """Return the traits. The cache has one key-value head, which is partly rotated. YaRN's temperature scales all scores,
        by `mscale_all_dim`."""
        assert shape.latent is not None
        scaling, scale = read_rope(config, where).scaling, shape.latent.head**-0.5
        if isinstance(scaling, YarnScaling) and scaling.mscale_all_dim:
            scale *= yarn_growth(scaling.factor, scaling.mscale_all_dim) ** 2
        return {"kv_heads": 1, "head_dim": shape.latent.rotated, "score_scale": scale}

    def attention(self) -> Iterator[ParameterMapping]:
        """Yield the rows of multi-head latent attention and its norm."""
        latent, heads, hidden = self.shape.latent, self.shape.heads, self.shape.hidden_size
        assert latent is not None
        yield norm("input_layernorm", "input_layernorm", hidden)
        if latent.query_rank is None:
            yield _rows("linear_q_proj", "q_proj", heads * latent.head, hidden)
        else:
            yield _rows("linear_q_down_proj", "q_a_proj", latent.query_rank, hidden)
            yield norm("self_attention.q_layernorm", "self_attn.q_a_layernorm", latent.query_rank)
            yield _rows("linear_q_up_proj", "q_b_proj", heads * latent.head, latent.query_rank)
        yield _rows("linear_kv_down_proj", "kv_a_proj_with_mqa", latent.cached, hidden)
        yield norm("self_attention.kv_layernorm", "self_attn.kv_a_layernorm", latent.rank)
        yield _rows("linear_kv_up_proj", "kv_b_proj", heads * (latent.plain + latent.value), latent.rank)
        yield row_parallel("self_attention.linear_proj", "self_attn.o_proj", (hidden, heads * latent.value))


def read_experts(config: Mapping[str, Any], where: str) -> ExpertShape:
    inner, scale, first = number(config, "moe_intermediate_size", where), config.get("routed_scaling_factor", 1.0), 0
    if config.get("first_k_dense_replace", 0) != 0:
        first = number(config, "first_k_dense_replace", where)
    found = ExpertShape(
        count=number(config, "n_routed_experts", where),
        intermediate_size=inner,
        per_token=number(config, "num_experts_per_tok", where),
        normalized=True,
        layers=frozenset(range(first, number(config, "num_hidden_layers", where))),
        corrected=True,
        groups=number(config, "n_group", where),
        groups_per_token=number(config, "topk_group", where),
        scale=scale,
        shared_size=inner * number(config, "n_shared_experts", where),
    )
    if not isinstance(scale, (int, float)) or isinstance(scale, bool) or not 0 < scale < float("inf"):
        raise UserError(f"{where}: routed_scaling_factor is {scale!r}; must be a positive number")
    if found.count % found.groups or found.groups_per_token > found.groups:
        raise UserError(
            f"{where}: topk_group {found.groups_per_token} of n_group {found.groups} for {found.count} n_routed_experts; "
            "n_group must divide the experts, and topk_group be at most n_group"
        )
    if not 1 < found.per_token <= found.groups_per_token * found.count // found.groups:
        raise UserError(
            f"{where}: num_experts_per_tok is {found.per_token}; must be from 2 to the experts of topk_group groups "
            f"({found.groups_per_token * found.count // found.groups})"
        )
    # megatron-core scores a group by its best `per_token // groups_per_token` experts, the paper and transformers by two.
    if found.groups > 1 and (found.per_token // found.groups_per_token != 2 or found.count < 2 * found.groups):
        raise UserError(
            f"{where}: num_experts_per_tok {found.per_token} of topk_group {found.groups_per_token} groups is not supported "
            "with megatron-core; must be twice topk_group, and groups have two experts, or n_group be 1"
        )
    return found


def _rows(name: str, source: str, rows: int, columns: int) -> ParameterMapping:
    """Return a mapping cut by rows; the output of down-projections is gathered again."""
    tensor = SourceTensor(f"self_attn.{source}.weight", (rows, columns))
    return ParameterMapping(name=f"self_attention.{name}.weight", sources=(tensor,), split=0)
