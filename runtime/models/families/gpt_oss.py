"""gpt-oss: attention with sinks, a window in every other layer, and a mixture of experts with biases in every layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from runtime.models.families.family import Family, ParameterMapping, norm
from runtime.models.families.parameter import SourceTensor
from runtime.models.families.shape import ModelShape, read_routed, windows


class GptOss(Family):
    model_type = "gpt_oss"
    architecture = "GptOss"
    unmapped = "its attention's sinks and its experts' biases"
    qkv_bias = True
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
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "sliding_window": 128,
    }

    @classmethod
    def read(cls, config: Mapping[str, Any], where: str) -> ModelShape:
        return read_routed(config, where, "num_local_experts", biased=True)

    @classmethod
    def traits(cls, config: Mapping[str, Any], shape: ModelShape, where: str) -> dict[str, Any]:
        """Return the traits. Layers with a window and full layers alternate, unless `layer_types` says otherwise."""
        kinds = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(shape.layers)]
        found = windows({**config, "layer_types": config.get("layer_types") or kinds}, where)
        return {"windows": found, "output_bias": True, "sinks": True}

    def layer(self, number: int) -> Iterator[ParameterMapping]:
        shape, experts = self.shape, self.shape.experts
        assert experts is not None
        count, inner, hidden = experts.count, experts.intermediate_size, shape.hidden_size
        yield from self.attention()
        yield norm("pre_mlp_layernorm", "post_attention_layernorm", hidden)
        others = {
            "self_attn.o_proj.bias": (hidden,),
            "self_attn.sinks": (shape.heads,),
            "mlp.router.weight": (count, hidden),
            "mlp.router.bias": (count,),
            "mlp.experts.gate_up_proj": (count, hidden, 2 * inner),
            "mlp.experts.gate_up_proj_bias": (count, 2 * inner),
            "mlp.experts.down_proj": (count, inner, hidden),
            "mlp.experts.down_proj_bias": (count, hidden),
        }
        yield from (ParameterMapping(name=name, sources=(SourceTensor(name, size),)) for name, size in others.items())
