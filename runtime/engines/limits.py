"""What engines need, hold and cannot do, as far as it is known before one is made: for the engines, and for the checks that
come before them. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.config import Parallel
from runtime.engines.families import Layout

MEGATRON_NEEDS_CORE = "megatron needs a package: pip install 'sluice-rl[megatron]'"
LORA_NEEDS_PEFT = "lora: needs a package: pip install 'sluice-rl[lora]'"


def uncut(tied: bool, pipeline: int, version: str) -> str:
    """What keeps megatron-core of this version from cutting such a model into pipeline stages; "" for nothing."""
    if not (tied and pipeline > 1 and version.startswith("0.12.")):
        return ""
    return (
        f"parallel.pipeline: {pipeline}: megatron-core {version} cannot cut up a model whose head is its embedding; "
        "must be 1, or take version 0.16.1"
    )


def layout_of(parallel: Parallel) -> Layout:
    return Layout(
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        expert=parallel.expert,
        layers_per_stage=tuple(parallel.layers_per_stage),
    )


def kv_cache_bytes(model: Mapping[str, Any], slots: int, max_len: int, dtype_bytes: int) -> int:
    """Bytes of a static KV cache: keys and values, 2 · layers · kv_heads · head_dim · bytes · slots · length.

    `model` is a config.json of the Llama family; `num_key_value_heads` and `head_dim` have the family's defaults.
    """
    heads = model["num_attention_heads"]
    kv_heads = model.get("num_key_value_heads") or heads
    head_dim = model.get("head_dim") or model["hidden_size"] // heads
    return 2 * model["num_hidden_layers"] * kv_heads * head_dim * dtype_bytes * slots * max_len
