"""Families of dense models: Llama's layers, and what differs from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from runtime.models.families.family import Family, ParameterMapping, dense, norm
from runtime.models.families.shape import ModelShape, windows


class Llama(Family):
    """Llama 2 and 3, and models with the same layers."""

    model_type = "llama"
    architecture = "Llama"


class Qwen2(Family):
    """Qwen2 and Qwen2.5: q, k and v have biases."""

    model_type = "qwen2"
    architecture = "Qwen2"
    qkv_bias = True


class Qwen3(Family):
    """Qwen3: each head of q and k is normalised."""

    model_type = "qwen3"
    architecture = "Qwen3"
    qk_norm = True


class Mistral(Family):
    """Mistral: Llama's layers, with attention that may be limited to a window of tokens."""

    model_type = "mistral"
    architecture = "Mistral"
    defaults = {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072}  # noqa: RUF012

    @classmethod
    def traits(cls, config: Mapping[str, Any], shape: ModelShape, where: str) -> dict[str, Any]:
        return {"windows": windows(config, where, ["sliding_attention"] * shape.layers)}


class Gemma3(Family):
    """Gemma 3's language model: norms before and after attention and MLP, and a window in most layers."""

    model_type = "gemma3_text"
    architecture = "Gemma3"
    unmapped = "the norms behind its attention and its MLP"
    centred_norms = True
    qk_norm = True
    unsupported = {  # noqa: RUF012
        "attention_bias": False,
        "hidden_act": "gelu_pytorch_tanh",
        "attn_logit_softcapping": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "use_bidirectional_attention": False,
    }
    defaults = {  # noqa: RUF012
        "head_dim": 256,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "query_pre_attn_scalar": 256,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
        "vocab_size": 262208,
    }

    @classmethod
    def traits(cls, config: Mapping[str, Any], shape: ModelShape, where: str) -> dict[str, Any]:
        """Return the traits. Every `sliding_window_pattern`-th layer is full, unless `layer_types` says otherwise."""
        every = config.get("sliding_window_pattern", 6)
        kinds = ["sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(shape.layers)]
        local = (config.get("rope_parameters") or {}).get("sliding_attention", {})  # as transformers 5 writes it
        return {
            "windows": windows(config, where, config.get("layer_types") or kinds),
            "local_theta": local.get("rope_theta", config["rope_local_base_freq"]),
            "output_norms": True,
            "activation": "gelu_tanh",
            "embedding_scale": shape.hidden_size**0.5,
            "score_scale": config["query_pre_attn_scalar"] ** -0.5,
            "softcap": config.get("final_logit_softcapping") or 0.0,
        }

    def layer(self, number: int) -> Iterator[ParameterMapping]:
        yield from self.attention()
        yield norm("attention_norm", "post_attention_layernorm", "post_attention_layernorm", self.shape.hidden_size)
        yield from dense(self.shape, before="pre_feedforward_layernorm")
        yield norm("mlp_out_norm", "post_feedforward_layernorm", "post_feedforward_layernorm", self.shape.hidden_size)
