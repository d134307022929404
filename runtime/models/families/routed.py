"""Families with mixtures of experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from runtime.errors import UserError
from runtime.models.families.dense import Mistral
from runtime.models.families.family import Family, ParameterMapping, norm, row
from runtime.models.families.shape import ExpertShape, LatentShape, ModelShape, number, read_routed, read_shape, windows
from runtime.models.forward import YarnScaling, read_rope, yarn_growth


class Mixtral(Mistral):
    """Mixtral: Mistral with a mixture of experts in every layer. The weights of the chosen experts add up to 1."""

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


class Qwen3Moe(Family):
    """Qwen3's mixture of experts, such as Qwen3-30B-A3B."""

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


class GptOss(Family):
    """gpt-oss: attention with sinks, a window in every other layer, and experts with biases in every layer."""

    model_type = "gpt_oss"
    architecture = "GptOss"
    unmapped = "its attention's sinks and its experts' biases"
    # Weights of mxfp4 must be dequantised first.
    unsupported = {"attention_bias": True, "quantization_config": None, "swiglu_limit": 7.0}  # noqa: RUF012
    defaults = {  # noqa: RUF012
        "attention_bias": True,
        "head_dim": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "num_experts_per_tok": 4,
        "num_local_experts": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096},
        "sliding_window": 128,
    }

    @classmethod
    def read(cls, config: Mapping[str, Any], where: str) -> ModelShape:
        return read_routed(config, where, "num_local_experts", biased=True)

    @classmethod
    def traits(cls, config: Mapping[str, Any], shape: ModelShape, where: str) -> dict[str, Any]:
        """Return the traits. Layers with a window and full layers alternate, unless `layer_types` says otherwise."""
        kinds = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(shape.layers)]
        return {"windows": windows(config, where, config.get("layer_types") or kinds), "sinks": True}

    def layer(self, number: int) -> Iterator[ParameterMapping]:
        shape, experts = self.shape, self.shape.experts
        assert experts is not None
        count, inner, hidden = experts.count, experts.intermediate_size, shape.hidden_size
        yield from self.attention()
        yield norm("mlp_norm", "pre_mlp_layernorm", "post_attention_layernorm", hidden)
        others = {
            "sinks": ("self_attn.sinks", (shape.heads,)),
            "router": ("mlp.router.weight", (count, hidden)),
            "logit_bias": ("mlp.router.bias", (count,)),
            "gate_up": ("mlp.experts.gate_up_proj", (count, hidden, 2 * inner)),
            "gate_up_bias": ("mlp.experts.gate_up_proj_bias", (count, 2 * inner)),
            "down": ("mlp.experts.down_proj", (count, inner, hidden)),
            "down_bias": ("mlp.experts.down_proj_bias", (count, hidden)),
        }
        yield from (row(field, name, name, size) for field, (name, size) in others.items())


class DeepseekV3(Family):
    """DeepSeek-V3 and models of its shape: R1, V3.1, Moonlight, Kimi-K2 (arXiv:2412.19437, section 2.1)."""

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
        yield norm("input_norm", "input_layernorm", "input_layernorm", hidden)
        if latent.query_rank is None:
            yield _rows("qkv", "linear_q_proj", "q_proj", heads * latent.head, hidden)
        else:
            yield _rows("qkv", "linear_q_down_proj", "q_a_proj", latent.query_rank, hidden)
            yield norm("query_norm", "self_attention.q_layernorm", "self_attn.q_a_layernorm", latent.query_rank)
            yield _rows("query_up", "linear_q_up_proj", "q_b_proj", heads * latent.head, latent.query_rank)
        yield _rows("qkv", "linear_kv_down_proj", "kv_a_proj_with_mqa", latent.cached, hidden)
        yield norm("latent_norm", "self_attention.kv_layernorm", "self_attn.kv_a_layernorm", latent.rank)
        yield _rows("latent_up", "linear_kv_up_proj", "kv_b_proj", heads * (latent.plain + latent.value), latent.rank)
        name, source = "self_attention.linear_proj.weight", "self_attn.o_proj.weight"
        yield row("output", name, source, (hidden, heads * latent.value), split=1)


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


def _rows(field: str, name: str, source: str, rows: int, columns: int) -> ParameterMapping:
    """Return a mapping cut by rows; the output of down-projections is gathered again."""
    return row(field, f"self_attention.{name}.weight", f"self_attn.{source}.weight", (rows, columns), split=0)


class Glm4Moe(Family):
    """GLM-4.5 and its smaller Air: grouped-query attention with partly rotated heads, and DeepSeek-V3's experts."""

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

    @classmethod
    def supported(cls, config: Mapping[str, Any], where: str) -> ModelShape:
        found, has_norms = super().supported(config, where), bool(config["use_qk_norm"])
        return replace(found, experts=read_experts(config, where), output_bias=False, qk_norm=has_norms)

    @classmethod
    def traits(cls, config: Mapping[str, Any], shape: ModelShape, where: str) -> dict[str, Any]:
        share = config["partial_rotary_factor"]
        rotated = int(shape.head_dim * share) if isinstance(share, (int, float)) and 0 < share <= 1 else 0
        if rotated < 2 or rotated % 2:
            raise UserError(
                f"{where}: partial_rotary_factor is {share!r} of head_dim {shape.head_dim}; must be above 0, at most 1, "
                "and make an even number"
            )
        return {"rotary_dim": rotated}
