"""What every model here has in common, as megatron-core's TransformerConfig takes it."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

PLAIN: dict[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "perform_initialization": False,  # the weights are read from a folder
    # No kernels that only CUDA, or only Apex, has.
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
}
