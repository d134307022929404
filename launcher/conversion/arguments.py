"""Translates Megatron-LM's arguments of a model, as in its checkpoints, and the keys of a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from runtime.errors import UserError
from runtime.models.families.family import Family
from runtime.models.families.shape import ExpertShape, LatentShape
from runtime.models.forward import YarnScaling, read_rope
from runtime.weights.plain_pickle import excerpt

_MOST = 1 << 31
_LISTED = 10_000  # limit for layers, and experts of a layer, as there are lists of them


class _Type(NamedTuple):
    allowed: str
    suits: Callable[[Any], bool]


def _whole(least: int, most: int) -> _Type:
    name = f"a positive integer, at most {most}" if least else f"an integer from 0 to {most}"
    return _Type(name, lambda value: type(value) is int and least <= value <= most)


def _has_integers(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) <= _LISTED and all(type(i) is int and 0 <= i < _MOST for i in value)


_SIZE = _whole(1, _MOST)
_TEXT = _Type("a text of at most 200 characters", lambda value: isinstance(value, str) and len(value) <= 200)
_TYPES: dict[str, _Type] = {
    "size": _SIZE,
    "any_size": _whole(0, _MOST),
    "layers": _whole(1, _LISTED),
    "count": _whole(0, _LISTED),
    "number": _Type("a positive number", lambda value: type(value) in (int, float) and 0 < value <= 1e30),
    "flag": _Type("a boolean", lambda value: isinstance(value, int) and value in (0, 1)),
    "text": _TEXT,
    "frequency": _Type("a positive integer, or a list of integers", lambda v: _SIZE.suits(v) or _has_integers(v)),
    "integers": _Type("a list of integers", _has_integers),
    "numbers": _Type("a text such as 0,3, or a list of integers", lambda v: _TEXT.suits(v) or _has_integers(v)),
}


class _Argument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row of `arguments.yaml`, which says what the fields mean."""

    type: str
    config: str = ""
    only: Any = msgspec.UNSET
    plain: Any = msgspec.UNSET
    of: str = ""
    local: bool = False
    written: bool = False


_ARGUMENTS = msgspec.yaml.decode(Path(__file__).with_suffix(".yaml").read_bytes(), type=dict[str, _Argument])
DECISIVE = tuple(name for name, argument in _ARGUMENTS.items() if not argument.local)  # all ranks have to agree on these


def require_types(found: Mapping[str, Any], where: str, keys: Iterable[str] = _ARGUMENTS) -> None:
    """Check the types and sizes of the arguments `keys` that are there. Raises UserError for the first wrong one."""
    for key in keys:
        kind = _TYPES[_ARGUMENTS[key].type]
        if (value := found.get(key)) is not None and not kind.suits(value):
            raise UserError(f"{where}: args.{key} is {excerpt(value)}; must be {kind.allowed}")


def arguments_of(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return Megatron-LM's arguments for the model that `config`, a Hugging Face config.json, describes."""
    config = {**family.defaults, **config}
    window = max(family.traits(config, family.shape, "config.json").get("windows", ()), default=0)
    shape, experts = family.shape, family.shape.experts
    positions = config.get("max_position_embeddings", 4096)
    attention = {entry.name for entry in family.layer(0)}
    found: dict[str, Any] = {
        **{key: argument.only for key, argument in _ARGUMENTS.items() if argument.written},
        "num_layers": shape.layers,
        "hidden_size": shape.hidden_size,
        "ffn_hidden_size": shape.intermediate_size,
        "multi_latent_attention": shape.latent is not None,
        "num_attention_heads": shape.heads,
        "group_query_attention": shape.kv_heads != shape.heads,
        "num_query_groups": shape.kv_heads,
        "kv_channels": shape.head_dim,
        "max_position_embeddings": positions,
        "seq_length": positions,
        **_rotary(config),
        "norm_epsilon": config.get("rms_norm_eps", 1e-6),
        "window_size": (window - 1, 0) if window else None,
        "add_qkv_bias": "self_attention.linear_qkv.bias" in attention,
        "qk_layernorm": "self_attention.q_layernorm.weight" in attention,
        "untie_embeddings_and_output_weights": not family.shape.tied,
        "vocab_size": shape.vocab_size,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }
    if shape.latent is not None:
        found |= _latent(shape.latent, config)
    if experts is not None:
        found |= {
            "num_experts": experts.count,
            "moe_ffn_hidden_size": experts.intermediate_size,
            "moe_router_topk": experts.per_token,
            "moe_router_pre_softmax": not experts.normalized,
            "moe_layer_freq": [int(layer in experts.layers) for layer in range(shape.layers)],
            **_corrected(experts),
        }
    return found


def _latent(latent: LatentShape, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of latent attention. YaRN's have other names in Megatron-LM than in MindSpeed-LLM."""
    found: dict[str, Any] = {
        "qk_layernorm": True,
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.rank,
        "qk_head_dim": latent.plain,
        "qk_pos_emb_head_dim": latent.rotated,
        "v_head_dim": latent.value,
        "rope_type": "rope",
    }
    scaling = read_rope(config, "config.json").scaling
    if not isinstance(scaling, YarnScaling):
        return found
    alike = {key: getattr(scaling, key) for key in ("mscale", "mscale_all_dim", "original_max_position_embeddings")}
    betas = {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
    prefixed = {f"rope_scaling_{key}": value for key, value in alike.items()}
    return found | {"rope_type": "yarn", "rotary_scaling_factor": scaling.factor, **betas, **alike, **prefixed}


def _corrected(experts: ExpertShape) -> dict[str, Any]:
    """Return the arguments for the scores that choose experts, and for experts of all tokens."""
    if not experts.corrected:
        return {"moe_router_score_function": "softmax"}
    grouped = experts.groups > 1
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_dtype": "fp32",
        "moe_router_num_groups": experts.groups if grouped else None,
        "moe_router_group_topk": experts.groups_per_token if grouped else None,
        "moe_router_topk_scaling_factor": experts.scale,
        "moe_shared_expert_intermediate_size": experts.shared_size or None,
    }


def _rotary(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the rotary embedding. `rope_parameters` is transformers 5's key."""
    rope = {**config, **(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = rope.get("rope_type") or rope.get("type")
    return {
        "rotary_base": rope.get("rope_theta", 10000.0),
        "rotary_percent": config.get("partial_rotary_factor", 1.0),
        "rotary_interleaved": False,
        "use_rope_scaling": kind == "llama3",  # Megatron-LM's argument; MindSpeed names the kind
        "rope_scaling_type": None if kind == "default" else kind,
        "rope_scaling_factor": rope.get("factor", 1.0),
    }


def require_arguments(found: Mapping[str, Any], family: Family, config: Mapping[str, Any], where: str) -> None:
    """Check that the arguments `found` suit the model of `config`. Raises UserError with both values of a mismatch. An argument
    that is missing or None is not checked. `where`: the name of the checkpoint's file in messages."""
    require_supported(found, where)
    needed = arguments_of(family, config)
    needed["num_layers"] += len(noop_layers(found))
    found = {**found, "num_query_groups": _groups(found)}
    for key, argument in _ARGUMENTS.items():
        value, other = found.get(key), needed.get(key, 0)
        if not argument.config or value is None or _unused(key, family):
            continue
        if value != other and (value, key) != (False, "use_rope_scaling"):
            declared = f"{argument.config} {config.get(argument.config)!r}"
            raise UserError(f"{where}: args.{key} is {value!r}; by config.json, {declared}, it is {other!r}")


def require_supported(found: Mapping[str, Any], where: str) -> None:
    """Raise UserError for an argument whose value has no mapping."""
    for key, argument in _ARGUMENTS.items():
        if argument.only is not msgspec.UNSET and (value := found.get(key)) is not None and value != argument.only:
            raise UserError(f"{where}: args.{key} is {value!r}, which is not supported; must be {argument.only!r}")
    if (expert := found.get("expert_model_parallel_size") or 1) > 1 and not found.get("num_experts"):
        raise UserError(f"{where}: args.expert_model_parallel_size is {expert}; must be 1 without num_experts")


def config_of(found: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a Hugging Face config.json made from the arguments. Raises UserError for the first that is missing or wrong."""
    require_types(found, where)
    require_supported(found, where)

    def need(key: str) -> Any:
        if found.get(key) is None:
            raise UserError(f"{where}: has no args.{key}; needs --hf-config DIR, the original Hugging Face folder")
        return found[key]

    # How MindSpeed combines its own argument of routing with Megatron-LM's is not known here.
    for key, argument in _ARGUMENTS.items():
        if argument.plain is not msgspec.UNSET and found.get(key) and found[key] != argument.plain:
            raise UserError(f"{where}: args.{key} is {found[key]!r}; needs --hf-config DIR, the original folder")
    experts = found.get("num_experts")
    name = ("qwen3_moe" if experts else "qwen3") if found.get("qk_layernorm") else "qwen2" if need("add_qkv_bias") else "llama"
    alike = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "norm_epsilon")
    config = {
        "model_type": name,
        "architectures": [{"qwen3_moe": "Qwen3Moe"}.get(name, name.capitalize()) + "ForCausalLM"],
        "hidden_act": "silu",
        **{_ARGUMENTS[key].config: need(key) for key in alike},
        **{key: need(key) for key in ("max_position_embeddings", "vocab_size")},
        "num_key_value_heads": need("num_query_groups") if _groups(found) is None else _groups(found),
        "rope_theta": float(need("rotary_base")),
        "tie_word_embeddings": not need("untie_embeddings_and_output_weights"),
    }
    if not experts:
        return config
    if name != "qwen3_moe":
        raise UserError(f"{where}: args.num_experts is {experts!r} without qk_layernorm; needs --hf-config DIR")
    layers, frequency = need("num_layers"), need("moe_layer_freq")
    sparse = frequency if isinstance(frequency, list) else [int(layer % frequency == 0) for layer in range(layers)]
    if len(sparse) != layers:
        raise UserError(f"{where}: args.moe_layer_freq has {len(sparse)} entries; must have one for each of {layers} layers")
    return config | {
        **{_ARGUMENTS[key].config: need(key) for key in ("num_experts", "moe_ffn_hidden_size", "moe_router_topk")},
        "norm_topk_prob": not need("moe_router_pre_softmax"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer, has in enumerate(sparse) if not has],
    }


def noop_layers(found: Mapping[str, Any]) -> list[Any]:
    """Return MindSpeed-LLM's layers that only pass tokens on, to even out stages. They are counted, but have no tensors."""
    value = found.get("noop_layers")
    if isinstance(value, str):
        return [number for number in value.split(",") if number]
    return list(value) if isinstance(value, (list, set)) else []


def _groups(found: Mapping[str, Any]) -> Any:
    """Return the number of key-value heads; None if it is unknown. Without grouped attention `num_query_groups` is 1, and
    unused. MindSpeed-LLM's converter always writes that it is off, but also Hugging Face's own key, which is right."""
    if found.get("num_key_value_heads") is not None:
        return found["num_key_value_heads"]
    return found.get("num_query_groups" if found.get("group_query_attention", True) else "num_attention_heads")


def _unused(key: str, family: Family) -> bool:
    """Return whether this model's tensors do not depend on the argument."""
    shape = family.shape
    if _ARGUMENTS[key].of == ("heads" if shape.latent is not None else "latent"):
        return True
    if key.startswith("moe_"):
        return shape.experts is None
    if key == "ffn_hidden_size":
        return shape.experts is not None and len(shape.experts.layers) == shape.layers
    return family.value_head and key == "untie_embeddings_and_output_weights"
