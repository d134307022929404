"""The models of configs/models as their published config.json describes them: no weights, only sizes."""

from __future__ import annotations

from typing import Any

_QWEN25 = {"model_type": "qwen2", "tie_word_embeddings": False, "max_position_embeddings": 32768}
_QWEN3 = {"model_type": "qwen3", "tie_word_embeddings": False, "max_position_embeddings": 40960, "vocab_size": 151936}


def _sizes(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "qwen25_1.5b": _QWEN25 | {"vocab_size": 151936, "tie_word_embeddings": True} | _sizes(1536, 8960, 28, 12, 2),
    "qwen25_7b": _QWEN25 | {"vocab_size": 152064} | _sizes(3584, 18944, 28, 28, 4),
    "qwen25_32b": _QWEN25 | {"vocab_size": 152064} | _sizes(5120, 27648, 64, 40, 8),
    "qwen3_8b": _QWEN3 | {"head_dim": 128} | _sizes(4096, 12288, 36, 32, 8),
    "qwen3_32b": _QWEN3 | {"head_dim": 128} | _sizes(5120, 25600, 64, 64, 8),
    "qwen3_30b_a3b": _QWEN3
    | {"model_type": "qwen3_moe", "head_dim": 128, "num_experts": 128, "moe_intermediate_size": 768, "num_experts_per_tok": 8}
    | _sizes(2048, 6144, 48, 32, 4),
}

DEEPSEEK = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "tie_word_embeddings": False,
    "rope_scaling": (
        {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
        | {"original_max_position_embeddings": 4096}
    ),
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
}
CONFIGS["deepseek_v3_671b"] = DEEPSEEK | _sizes(7168, 18432, 61, 128, 128)

PARAMETERS = {  # as their publishers count them: the elements of the safetensors
    "qwen25_1.5b": 1_543_714_304,
    "qwen25_7b": 7_615_616_512,
    "qwen25_32b": 32_763_876_352,
    "qwen3_8b": 8_190_735_360,
    "qwen3_32b": 32_762_123_264,
    "qwen3_30b_a3b": 30_532_122_624,
    "deepseek_v3_671b": 671_026_419_200,  # without the layer for multi-token prediction
}
