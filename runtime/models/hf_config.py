"""The shape of a model by the config.json of its Hugging Face folder. Loads neither torch nor transformers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from runtime.errors import UserError
from runtime.models import quantized
from runtime.models.families import FAMILIES, Family, family_for
from runtime.models.families.shape import ExpertShape, ModelShape
from runtime.models.rope import Rope, read_rope
from runtime.run_files import read_object

DECODED = tuple(FAMILIES)
"""The families that the lean decoder computes."""

PACKED = (*FAMILIES, "exaone4", "glm4", "granite", "olmo2", "olmo3", "phi3", "seed_oss", "smollm3")
"""Families whose sequences, packed by transformers' model, have been compared with each alone. Others are trained padded."""

_UNTRUE = (
    *(
        ".safetensors",
        ".bin",
        ".pt",
        ".pth",
        ".ckpt",
        ".h5",
        ".msgpack",
        ".onnx",
        ".onnx_data",
        ".gguf",
        ".ot",
        ".npz",
        ".pkl",
        ".distcp",
    ),
    *(".index.json", "quantize_config.json", "quant_config.json", "adapter_config.json", "trainer_state.json"),
    *("_results.json", "README.md"),  # what is said of the model that was
)
"""How names end of what is not true of a model that was trained further, or is its weights."""

_PACKABLE_LAYERS = {"full_attention", "sliding_attention"}


class ModelConfig(ModelShape, frozen=True, kw_only=True):
    """What a decoder-only model computes. Of latent attention `kv_heads` is 1, and `head_dim` what of a head is rotated."""

    family: str  # config.json's model_type
    norm_eps: float
    rope: Rope
    max_positions: int
    qkv_bias: bool
    output_bias: bool  # of the attention's output projection
    qk_norm: bool
    windows: tuple[int, ...] = ()
    """Of each layer, how many tokens attention reaches back to, its own included; 0: to the first. (): so in all layers."""
    rotary_dim: int = 0  # of a head, its first elements that are rotated; 0: all
    local_theta: float | None = None  # of the rotary embeddings of layers with a window, where these have their own
    score_scale: float | None = None  # of attention; None: head_dim^-1/2
    sinks: bool = False
    output_norms: bool = False  # of what attention and MLP give, before it is added
    centred_norms: bool = False  # norms multiply by 1 + their weight
    activation: Literal["silu", "gelu_tanh"] = "silu"
    embedding_scale: float = 1.0
    softcap: float = 0.0  # of the logits; 0: none

    @property
    def cached(self) -> tuple[int, int, int]:
        """Of a layer and a token in the key-value cache: parts, heads of each, and a head's width."""
        return (2, self.kv_heads, self.head_dim) if self.latent is None else (1, 1, self.latent.cached)


def read_config(folder: str | Path, families: Collection[str] = DECODED) -> ModelConfig:
    """Parse `folder`/config.json. Raises UserError when it is missing, malformed or of a model that is none of `families`."""
    return parse(read_raw(folder), f"model {Path(folder) / 'config.json'}", families)


def read_raw(folder: str | Path) -> dict[str, Any]:
    """`folder`/config.json. Raises UserError when it is missing or malformed."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"model {folder}: no such folder")
    path = folder / "config.json"
    if not path.exists():
        raise UserError(f"model {folder}: has no config.json")
    return read_object(path, f"model {path}")


def shard_names(index: Path) -> list[str]:
    """The files that a model.safetensors.index.json names. Raises UserError for what is no name of such a file beside it."""
    weight_map = read_object(index, f"model {index}").get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else [""]
    if not all(isinstance(name, str) and name.isprintable() and Path(name).name == name for name in names):
        names = [""]
    if not all(name.endswith(".safetensors") for name in names):
        raise UserError(f"model {index}: not an index of safetensors shards, which are files beside it")
    return sorted(set(names))


def described_files(folder: str | Path) -> list[Path]:
    """What a model trained from the one in `folder` takes over, by path within: everything beside the weights that is still
    true of it.

    Links lead to files within, or, in the hub's cache, to its blobs: a folder of somebody else's could publish any file here.
    Raises UserError for other links and for what is no file.
    """
    root = Path(folder).resolve()
    homes = [root, *([root.parents[1] / "blobs"] if root.parent.name == "snapshots" else [])]
    found = []
    for path in sorted([*root.iterdir(), *root.glob("additional_chat_templates/*.jinja")]):
        if path.name.startswith(".") or path.name.endswith(_UNTRUE) or path.is_dir():
            continue
        if not path.is_file() or not any(path.resolve().is_relative_to(home) for home in homes):
            raise UserError(f"model {path}: must be a file, or a link to one within the folder (cp -rL makes files of links)")
        found.append(path.relative_to(root))
    return found


def read_family(folder: str | Path, value_head: bool = False) -> Family:
    """The mapping to megatron-core of the model in `folder`, as `family_for` has it. Raises UserError."""
    return family_for(read_raw(folder), f"model {Path(folder) / 'config.json'}", value_head=value_head)


def parse(raw: Mapping[str, Any], where: str, families: Collection[str] = DECODED) -> ModelConfig:
    """Of the contents of a config.json, which messages call `where`. Raises UserError when it is malformed, of a model that is
    none of `families`, or has what these are not computed with."""
    family = raw.get("model_type")
    if not isinstance(family, str) or family not in families:
        raise UserError(f"{where}: model_type {family!r} is not supported; must be one of {', '.join(families)}")
    try:
        return _parse(family, {**FAMILIES[family].defaults, **raw}, where)
    except (msgspec.ValidationError, TypeError) as error:
        raise UserError(f"{where}: {error}") from error


def _parse(family: str, raw: Mapping[str, Any], where: str) -> ModelConfig:
    model = FAMILIES[family]
    shape = model.supported(raw, where)
    quantized.blocks_of(raw, where)
    attention_bias = bool(raw.get("attention_bias", False)) and not model.qkv_bias
    fields = {
        **msgspec.structs.asdict(shape),
        "family": family,
        "norm_eps": raw.get("rms_norm_eps", 1e-6),
        "rope": read_rope(raw, where),
        "max_positions": raw.get("max_position_embeddings", 2048),
        "qkv_bias": model.qkv_bias or attention_bias,
        "output_bias": attention_bias,
        "qk_norm": model.qk_norm,
        "centred_norms": model.centred_norms,
        **model.traits(raw, shape, where),
    }
    config = msgspec.convert(fields, ModelConfig)
    if config.head_dim % 2:
        raise UserError(f"{where}: head_dim is {config.head_dim}; must be even")
    return config


def experts_of(raw: Mapping[str, Any]) -> ExpertShape | None:
    """Of the contents of a config.json, the experts of a model of a known family; None where it has none."""
    try:
        return parse(raw, "", FAMILIES).experts
    except UserError:
        return None


def packs(raw: Mapping[str, Any]) -> bool:
    """Whether transformers' model of this config.json is known to run packed. One that is not may carry something from one
    sequence to the next, as a recurrent state, and nothing that it tells of itself would say so."""
    return raw.get("model_type") in PACKED and not unpackable(raw)


def unpackable(raw: Mapping[str, Any]) -> str:
    """Why a model of transformers cannot run packed, as far as its config.json says it; "" for nothing. Layers that mix tokens
    otherwise than by the attention function would mix the packed sequences, and that is a scaled softmax here."""
    kind = raw.get("model_type")
    if others := sorted(set(raw.get("layer_types") or ()) - _PACKABLE_LAYERS):
        return f"a {kind} model cannot run packed ({', '.join(others)}); all layers must be full or sliding attention"
    if raw.get("attn_logit_softcapping") is not None:
        return f"a {kind} model cannot run packed (its attention has softcapping); must be a scaled softmax"
    return unread(raw)


def unread(raw: Mapping[str, Any]) -> str:
    """Why weights in the folder of this config.json cannot be trained; "" for nothing."""
    stored = raw.get(quantized.KEY) or {}
    if isinstance(stored, Mapping) and stored.get("quant_method") == "mxfp4":
        return "quantization_config has quant_method 'mxfp4', which is not trained; must be a folder of bfloat16 weights"
    return quantized.fault_of(raw)
