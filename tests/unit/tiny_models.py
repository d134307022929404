"""Tiny random models of each family, saved by transformers."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

from runtime.models.forward import ROUTER_BIAS
from tests.unit.family_cases import session_folder

VOCABULARY = 61
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    # Large weights, so that the model prefers some tokens clearly.
    "initializer_range": 0.25,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
_EXPERTS_IN_TWO = {**_EXPERTS, "num_hidden_layers": 3, "mlp_only_layers": [1]}
_GEMMA = (
    {"head_dim": 12, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 20}
    | {"rope_local_base_freq": 50.0, "rope_theta": 500.0, "sliding_window": 7, "sliding_window_pattern": 3}
    | {"tie_word_embeddings": True}
)
_LATENT = (
    {"num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
    | {"n_routed_experts": 16, "n_shared_experts": 2, "num_experts_per_tok": 4, "moe_intermediate_size": 24}
    | {"first_k_dense_replace": 1, "num_hidden_layers": 4, "topk_method": "noaux_tc", "rms_norm_eps": 1e-5}
    | {"rope_theta": 500.0, "tie_word_embeddings": False}
)
_GLM = (
    {"head_dim": 16, "moe_intermediate_size": 24, "n_routed_experts": 4, "num_experts_per_tok": 2}
    | {"num_hidden_layers": 3, "partial_rotary_factor": 0.5, "rope_theta": 500.0, "routed_scaling_factor": 1.5}
    | {"tie_word_embeddings": False}
)
_CLASSES = {"Gemma3Config": "Gemma3TextConfig", "Gemma3ForSequenceClassification": "Gemma3TextForSequenceClassification"}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2_untied": ("Qwen2", {"tie_word_embeddings": False}),
    "qwen3": ("Qwen3", {"head_dim": 12, "tie_word_embeddings": True}),
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama3_scaled": ("Llama", {"rope_scaling": _LLAMA3, "rope_theta": 500.0, "tie_word_embeddings": False}),
    "llama_linear": ("Llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.5}, "tie_word_embeddings": False}),
    "qwen2_yarn": ("Qwen2", {"rope_scaling": _YARN, "rope_theta": 500.0, "tie_word_embeddings": False}),
    "llama_biased": ("Llama", {"attention_bias": True, "tie_word_embeddings": False}),
    "gemma3": ("Gemma3", {**_GEMMA, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "gemma3_capped": ("Gemma3", {**_GEMMA, "final_logit_softcapping": 3.0, "num_hidden_layers": 3, "layer_types": None}),
    "mistral": ("Mistral", {"sliding_window": 7, "tie_word_embeddings": False}),
    "mistral_whole": ("Mistral", {"sliding_window": None, "head_dim": 12, "tie_word_embeddings": True}),
}


WITH_EXPERTS = {
    "gpt_oss": (
        "GptOss",
        (
            {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 3}
            | {"rope_scaling": {**_YARN, "truncate": False}, "sliding_window": 7, "tie_word_embeddings": False}
        ),
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False}),
    "mixtral_sliding": ("Mixtral", {"num_local_experts": 3, "sliding_window": 7, "tie_word_embeddings": True}),
    "glm4_moe": ("Glm4Moe", {**_GLM, "attention_bias": True, "use_qk_norm": True}),
    "glm4_moe_air": ("Glm4Moe", {**_GLM, "partial_rotary_factor": 0.25, "rope_scaling": _YARN}),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **_LATENT,
            "q_lora_rank": 20,
            "n_group": 4,
            "topk_group": 2,
            "rope_scaling": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
        },
    ),
    "deepseek_v3_whole_queries": (
        "DeepseekV3",
        {**_LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    ),
    "qwen3_moe": ("Qwen3Moe", {"head_dim": 12, "tie_word_embeddings": False, **_EXPERTS_IN_TWO}),
    "qwen3_moe_tied": (
        "Qwen3Moe",
        {"head_dim": 12, "tie_word_embeddings": True, **_EXPERTS_IN_TWO, "norm_topk_prob": False, "num_hidden_layers": 4},
    ),
}

# No family of ours: `tests/unit/families_page.py` says which of them run packed.
_RECURRENT = (
    {"head_dim": 12, "layer_types": ["linear_attention", "full_attention"], "linear_conv_kernel_dim": 4}
    | {"linear_key_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_value_head_dim": 8}
    | {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 24}
    | {"tie_word_embeddings": False}
)
_SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}
_SCALED = {"attention_multiplier": 0.2, "embedding_multiplier": 2.0, "logits_scaling": 3.0, "residual_multiplier": 0.6}
WIDE: dict[str, tuple[str, dict[str, Any]]] = {
    "exaone4": ("Exaone4", {**_SLIDING, "tie_word_embeddings": False}),
    "falcon_h1": (
        "FalconH1",
        {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_chunk_size": 8},
    ),
    "gemma2": ("Gemma2", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "head_dim": 12, **_SLIDING}),
    "glm4": ("Glm4", {"head_dim": 12, "tie_word_embeddings": False}),
    "opt": ("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "granite": ("Granite", {**_SCALED, "tie_word_embeddings": True}),
    "lfm2": ("Lfm2", {"block_auto_adjust_ff_dim": False, "conv_L_cache": 3, "layer_types": ["conv", "full_attention"]}),
    "mamba2": ("Mamba2", {"num_heads": 8, "head_dim": 8, "state_size": 4, "n_groups": 1, "chunk_size": 8}),
    "olmo2": ("Olmo2", {"tie_word_embeddings": False}),
    # What transformers 5, which vLLM has, gives its sliding layers whatever config.json says.
    "olmo3": ("Olmo3", {**_SLIDING, "rope_theta": 500000.0, "tie_word_embeddings": False}),
    "phi3": ("Phi3", {"partial_rotary_factor": 0.5, "tie_word_embeddings": False}),
    "qwen3_next": ("Qwen3Next", _RECURRENT),
    "seed_oss": ("SeedOss", {"head_dim": 12, "attention_bias": True, "tie_word_embeddings": False}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2, "tie_word_embeddings": True}),
}


def save_model(folder: Path, name: str = "qwen2", seed: int = 0, **save: Any) -> Any:
    """Build the model, write it to `folder`, and return it in float32 for comparison."""
    return _saved(folder, name, "ForCausalLM", seed, {}, save)


@cache
def saved(name: str = "qwen2", seed: int = 0) -> tuple[Path, Any]:
    """The folder and the model of `save_model`, made once in a process: to be read, not to be changed."""
    folder = session_folder("models") / f"{name}-{seed}"
    return folder, save_model(folder, name, seed)


def save_classifier(folder: Path, name: str = "qwen2", **options: Any) -> Any:
    """The same of a sequence classifier with one label, `options` being keys of its configuration."""
    return _saved(folder, name, "ForSequenceClassification", 0, {"num_labels": 1, **options}, {})


def _saved(folder: Path, name: str, task: str, seed: int, options: dict[str, Any], save: dict[str, Any]) -> Any:
    family, extra = (FAMILIES | WITH_EXPERTS | WIDE)[name]
    torch.manual_seed(seed)
    no_specials = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    of_config, of_model = (_CLASSES.get(name, name) for name in (f"{family}Config", f"{family}{task}"))
    config = getattr(transformers, of_config)(**_SHAPE | extra | no_specials | options)
    model = getattr(transformers, of_model)(config).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 or name.endswith("bias"):  # norms and biases start as ones and zeros, which would hide mistakes
            torch.nn.init.normal_(parameter, 1.0 if parameter.mean() > 0.5 else 0.0, 0.2)
    for name, buffer in model.named_buffers():
        # Above 0 with a score: transformers gives those that are left out a 0, megatron-core and vLLM -inf.
        if name.endswith(ROUTER_BIAS):
            torch.nn.init.normal_(buffer, 0.6, 0.15)
    model.save_pretrained(folder, **save)
    return model


_SERVED = {"vocab_size": 264, "hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 512}
_OF_SERVED = {"head_dim": 32, "initializer_range": 0.06, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
_LATENT_SERVED = {"kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32}


def save_served(folder: Path, name: str, **save: Any) -> Any:
    """As `save_model`, of sizes that vLLM takes on CPUs, and with the tokenizer of tiny models."""
    from runtime.models import tiny_model

    _, extra = (FAMILIES | WITH_EXPERTS | WIDE)[name]
    sizes: dict[str, Any] = {
        key: value for key, value in (_OF_SERVED | _LATENT_SERVED).items() if key in extra or key == "initializer_range"
    }
    if "rope_scaling" in extra:
        sizes["rope_scaling"] = {**extra["rope_scaling"], "original_max_position_embeddings": 128}
    folder.mkdir(parents=True, exist_ok=True)
    tiny_model.write_tokenizer(folder)
    return _saved(folder, name, "ForCausalLM", 0, _SERVED | sizes, save)
