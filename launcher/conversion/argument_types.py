"""Of what types and sizes Megatron-LM's arguments are, as far as a conversion reads them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from runtime.errors import UserError
from runtime.weights.plain_pickle import told

_MOST = 1 << 31
_LISTED = 10_000  # layers, or experts of a layer: there are lists of them


class _Type(NamedTuple):
    allowed: str
    suits: Callable[[Any], bool]


def _whole(least: int, most: int) -> _Type:
    name = f"a positive integer, at most {most}" if least else f"an integer from 0 to {most}"
    return _Type(name, lambda value: type(value) is int and least <= value <= most)


def _has_integers(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) <= _LISTED and all(type(i) is int and 0 <= i < _MOST for i in value)


_SIZE = _whole(1, _MOST)
_FLAG = _Type("a boolean", lambda value: isinstance(value, int) and value in (0, 1))
_NUMBER = _Type("a positive number", lambda value: type(value) in (int, float) and 0 < value <= 1e30)
_TEXT = _Type("a text of at most 200 characters", lambda value: isinstance(value, str) and len(value) <= 200)
_TYPES: dict[str, _Type] = {
    "num_layers": _whole(1, _LISTED),
    "num_experts": _whole(0, _LISTED),
    "mtp_num_layers": _whole(0, _LISTED),
    "expert_tensor_parallel_size": _whole(0, _MOST),
    **dict.fromkeys(
        ("hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "num_key_value_heads"), _SIZE
    ),
    **dict.fromkeys(("kv_channels", "max_position_embeddings", "vocab_size", "padded_vocab_size"), _SIZE),
    **dict.fromkeys(("moe_ffn_hidden_size", "moe_router_topk", "moe_shared_expert_intermediate_size"), _SIZE),
    **dict.fromkeys(("moe_router_num_groups", "moe_router_group_topk", "q_lora_rank", "kv_lora_rank"), _SIZE),
    **dict.fromkeys(("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"), _SIZE),
    **{f"{kind}_model_parallel_size": _SIZE for kind in ("tensor", "pipeline", "expert")},
    **dict.fromkeys(("norm_epsilon", "rotary_base", "rotary_percent", "moe_router_topk_scaling_factor"), _NUMBER),
    **dict.fromkeys(("group_query_attention", "untie_embeddings_and_output_weights", "add_qkv_bias", "qk_layernorm"), _FLAG),
    **dict.fromkeys(("use_rope_scaling", "moe_router_pre_softmax", "norm_topk_prob", "moe_tp_extend_ep"), _FLAG),
    **dict.fromkeys(("multi_latent_attention", "add_bias_linear", "add_dense_bias", "apply_layernorm_1p"), _FLAG),
    "mla_mm_split": _FLAG,
    "moe_router_score_function": _TEXT,
    **dict.fromkeys(("squared_relu", "swiglu"), _FLAG),
    **dict.fromkeys(("schedules_method", "normalization", "position_embedding_type", "rope_scaling_type"), _TEXT),
    "moe_layer_freq": _Type(
        "a positive integer, or a list of integers", lambda value: _SIZE.suits(value) or _has_integers(value)
    ),
    "window_size": _Type("a list of integers", _has_integers),
    "noop_layers": _Type("a text such as 0,3, or a list of integers", lambda v: _TEXT.suits(v) or _has_integers(v)),
}


def require_types(found: Mapping[str, Any], where: str, keys: Iterable[str] = _TYPES) -> None:
    """Raises UserError for the first of `keys` that is of another type, or a size that is none.

    An argument that is missing or None says nothing.
    """
    for key in keys:
        if (value := found.get(key)) is not None and not _TYPES[key].suits(value):
            raise UserError(f"{where}: args.{key} is {told(value)}; must be {_TYPES[key].allowed}")
