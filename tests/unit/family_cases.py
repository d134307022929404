"""Small models of each family: their config.json, and tensors under Hugging Face names."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from runtime.models.families import Family, family_for

_COMMON = {
    "vocab_size": 101,  # divisible by nothing
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_COMMON, "model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "qwen2": {**_COMMON, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    "qwen2-tied": {**_COMMON, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    "qwen3": {**_COMMON, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 16},
    "qwen3_moe": {**_COMMON, **_EXPERTS, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "head_dim": 16},
    "deepseek_v3": (
        {**_COMMON, "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
        | {"num_key_value_heads": 8, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12}
        | {"qk_rope_head_dim": 8, "v_head_dim": 10, "n_routed_experts": 4, "n_shared_experts": 2}
        | {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1, "n_group": 1}
        | {"topk_group": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True}
    ),
    "glm4_moe": (
        {**_COMMON, "model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True}
        | {"head_dim": 16, "use_qk_norm": True, "n_routed_experts": 4, "n_shared_experts": 1}
        | {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1}
        | {"routed_scaling_factor": 1.5, "norm_topk_prob": True}
    ),
    "mistral": {**_COMMON, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 16},
    "mixtral": (
        {**_COMMON, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4}
        | {"num_experts_per_tok": 2, "sliding_window": None}
    ),
}


def session_folder(name: str) -> Path:
    """Where this process keeps what its tests share, for as long as it runs."""
    return Path(os.environ["SLUICE_TEST_FOLDER"]) / f"{name}-{os.getpid()}"


def make_family(case: str, *, value_head: bool = False, **changes: Any) -> Family:
    return family_for({**CONFIGS[case], **changes}, "config.json", value_head=value_head)


def make_tensors(family: Family, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Random values, all different from those of the other tensors."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in family.tensors().items()}


def write_folder(folder: Path, case: str, dtype: torch.dtype = torch.float32, **changes: Any) -> dict[str, torch.Tensor]:
    """A Hugging Face folder with a file of the tokenizer's; returns its tensors."""
    folder.mkdir(parents=True)
    config = {**CONFIGS[case], **changes, "torch_dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text('{"model": {}}')
    tensors = make_tensors(make_family(case, **changes), dtype=dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors
