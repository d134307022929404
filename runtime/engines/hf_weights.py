"""Reading a Hugging Face model folder: config.json and safetensors, without the transformers package."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from runtime.engines.families import family_for
from runtime.engines.families.shape import Experts
from runtime.errors import UserError

DECODED = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""The families that the lean decoder computes."""


class RopeScaling(msgspec.Struct, frozen=True):
    """Llama 3.1's stretching of the low frequencies of rotary embeddings (the `llama3` rope type)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a decoder-only model. Sizes in elements."""

    family: str  # config.json's model_type
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_positions: int
    tied: bool  # lm_head is the embedding
    qkv_bias: bool
    output_bias: bool  # of the attention's output projection
    qk_norm: bool
    experts: Experts | None = None


def read_config(folder: str | Path, families: Collection[str] = DECODED) -> ModelConfig:
    """Parse `folder`/config.json. Raises UserError when it is missing, malformed or of a model that is none of `families`."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"model {folder}: no such folder")
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"model {folder}: has no config.json") from None
    except json.JSONDecodeError as error:
        raise UserError(f"model {path}: not valid JSON: {error}") from error
    family = raw.get("model_type")
    if family not in families:
        raise UserError(f"model {path}: model_type {family!r} is not supported; must be one of {', '.join(families)}")
    try:
        return _parse(family, raw, path)
    except KeyError as error:
        raise UserError(f"model {path}: the key {error} is missing") from error
    except (msgspec.ValidationError, TypeError) as error:
        raise UserError(f"model {path}: {error}") from error


def _parse(family: str, raw: Mapping[str, Any], path: Path) -> ModelConfig:
    for key, supported in (("hidden_act", "silu"), ("use_sliding_window", False), ("mlp_bias", False)):
        if raw.get(key, supported) != supported:
            raise UserError(f"model {path}: {key} {raw[key]!r} is not supported; must be {supported!r}")
    attention_bias = bool(raw.get("attention_bias", False)) and family != "qwen2"
    heads = raw["num_attention_heads"]
    theta, scaling = read_rope(raw, path)
    fields = {
        "family": family,
        "vocab_size": raw["vocab_size"],
        "hidden_size": raw["hidden_size"],
        "intermediate_size": raw["intermediate_size"],
        "layers": raw["num_hidden_layers"],
        "heads": heads,
        "kv_heads": raw.get("num_key_value_heads") or heads,
        "head_dim": raw.get("head_dim") or raw["hidden_size"] // heads,
        "norm_eps": raw.get("rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_positions": raw.get("max_position_embeddings", 2048),
        "tied": bool(raw.get("tie_word_embeddings", False)),
        "qkv_bias": family == "qwen2" or attention_bias,
        "output_bias": attention_bias,
        "qk_norm": family in ("qwen3", "qwen3_moe"),
        "experts": family_for(raw, f"model {path}").shape.experts if family == "qwen3_moe" else None,
    }
    config = msgspec.convert(fields, ModelConfig)
    if config.heads % config.kv_heads or config.head_dim % 2:
        raise UserError(
            f"model {path}: {config.heads} heads of {config.head_dim} with {config.kv_heads} key-value heads: "
            "heads must be a multiple of key-value heads, and head_dim even"
        )
    return config


def read_rope(raw: Mapping[str, Any], path: Path) -> tuple[float, RopeScaling | None]:
    """Theta and scaling, from `rope_parameters` (transformers 5) or from `rope_theta` and `rope_scaling` (before)."""
    options = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = options.get("rope_theta", raw.get("rope_theta", 10000.0))
    kind = options.get("rope_type", options.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "llama3":
        return theta, RopeScaling(**{name: options[name] for name in RopeScaling.__struct_fields__})
    raise UserError(f"model {path}: rope_type {kind!r} is not supported; must be one of default, llama3")


def weight_paths(folder: str | Path) -> list[Path]:
    """The safetensors files of a model folder. Raises UserError when it has none, or an index that cannot be read."""
    single, index = Path(folder) / "model.safetensors", Path(folder) / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise UserError(f"model {folder}: has neither model.safetensors nor model.safetensors.index.json")
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (json.JSONDecodeError, KeyError) as error:
        raise UserError(f"model {index}: not an index of safetensors shards: {error!r}") from error
    return [index.with_name(name) for name in sorted(set(weight_map.values()))]


class WeightFiles:
    """The safetensors files of a folder: one `model.safetensors`, or the shards of its index."""

    def __init__(self, folder: str | Path):
        """Reads names and shapes only. Raises UserError when there are no weights or a shard is missing or torn."""
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[Path, list[str]] = {}
        for path in weight_paths(folder):
            try:
                with safe_open(path, framework="pt") as file:
                    # Buffers that old checkpoints stored; they follow from config.json.
                    names = [name for name in list(file.keys()) if not name.endswith("rotary_emb.inv_freq")]
                    self.shapes.update((name, tuple(file.get_slice(name).get_shape())) for name in names)
            except (OSError, SafetensorError) as error:
                raise UserError(f"model {path}: cannot be read: {error}") from error
            self._files[path] = names

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and tensor, one at a time, so that no more than one tensor lies in memory twice."""
        for path, names in self._files.items():
            with safe_open(path, framework="pt") as file:
                for name in names:
                    yield name, file.get_tensor(name)

    @contextlib.contextmanager
    def slices(self) -> Iterator[Callable[[str], Any]]:
        """While it is open: what reads any part of a tensor, by the tensor's name."""
        with contextlib.ExitStack() as stack:
            opened = {path: stack.enter_context(safe_open(path, framework="pt")) for path in self._files}
            holding = {name: opened[path] for path, names in self._files.items() for name in names}
            yield lambda name: holding[name].get_slice(name)
