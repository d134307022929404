"""Read the shape of a model from the config.json of its Hugging Face folder. Loads neither torch nor transformers."""

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
"""Families whose packed sequences in transformers equal each sequence alone, by test. Other families are trained padded."""

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
    *("_results.json", "README.md"),  # they describe the model before
)
"""Ends of the names of weight files, and of files that are not true of a model that was trained further."""

_PACKABLE_LAYERS = {"full_attention", "sliding_attention"}


class ModelConfig(ModelShape, frozen=True, kw_only=True):
    """The computation of a decoder-only model. With latent attention `kv_heads` is 1, and `head_dim` a head's rotated part."""

    family: str  # config.json's model_type
    norm_eps: float
    rope: Rope
    max_positions: int
    qkv_bias: bool
    output_bias: bool  # of the attention's output projection
    qk_norm: bool
    windows: tuple[int, ...] = ()
    """For each layer, the tokens in reach of attention, its own included; 0: all tokens. (): all tokens in all layers."""
    rotary_dim: int = 0  # first elements of a head that are rotated; 0: all
    local_theta: float | None = None  # rope's theta in layers with a window, if they have their own
    score_scale: float | None = None  # of attention; None: head_dim^-1/2
    sinks: bool = False
    output_norms: bool = False  # norms of the outputs of attention and MLP, before the residual addition
    centred_norms: bool = False  # norms multiply by 1 + their weight
    activation: Literal["silu", "gelu_tanh"] = "silu"
    embedding_scale: float = 1.0
    softcap: float = 0.0  # of the logits; 0: none

    @property
    def cached(self) -> tuple[int, int, int]:
        """Of a layer and a token in the key-value cache: number of parts, heads of each part, and a head's width."""
        return (2, self.kv_heads, self.head_dim) if self.latent is None else (1, 1, self.latent.cached)


def read_config(folder: str | Path, families: Collection[str] = DECODED) -> ModelConfig:
    """Parse `folder`/config.json. Raises UserError if it is missing or malformed, or its family is not in `families`."""
    return parse(read_raw(folder), f"model {Path(folder) / 'config.json'}", families)


def read_raw(folder: str | Path) -> dict[str, Any]:
    """Return the content of `folder`/config.json. Raises UserError if it is missing or malformed."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"model {folder}: no such folder")
    path = folder / "config.json"
    if not path.exists():
        raise UserError(f"model {folder}: has no config.json")
    return read_object(path, f"model {path}")


def shard_names(index: Path) -> list[str]:
    """Return the files in a model.safetensors.index.json. Raises UserError unless each is a shard in the index's folder."""
    weight_map = read_object(index, f"model {index}").get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else [""]
    if not all(isinstance(name, str) and name.isprintable() and Path(name).name == name for name in names):
        names = [""]
    if not all(name.endswith(".safetensors") for name in names):
        raise UserError(f"model {index}: not an index of safetensors shards in the same folder")
    return sorted(set(names))


def described_files(folder: str | Path) -> list[Path]:
    """Return the files, by path within `folder`, that also hold for a model trained from this one: all except the weights and
    files about them.

    A link must lead to a file within, or, in the hub's cache, to its blobs: otherwise a foreign folder could publish any file
    of this machine. Raises UserError for other links and for anything that is not a file.
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
    """Return the mapping to megatron-core of the model in `folder`. Raises UserError as `family_for`."""
    return family_for(read_raw(folder), f"model {Path(folder) / 'config.json'}", value_head=value_head)


def parse(raw: Mapping[str, Any], where: str, families: Collection[str] = DECODED) -> ModelConfig:
    """Parse the contents of a config.json; `where` is its name in messages. Raises UserError if it is malformed, if its family
    is not in `families`, or if it has an unsupported feature."""
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
    """Return the experts in the contents of a config.json; None if the family is unknown or has no experts."""
    try:
        return parse(raw, "", FAMILIES).experts
    except UserError:
        return None


def packs(raw: Mapping[str, Any]) -> bool:
    """Return whether transformers' model of this config.json is known to run packed. An unknown model may carry state from one
    sequence to the next, for example a recurrent state, and nothing in config.json says so."""
    return raw.get("model_type") in PACKED and not unpackable(raw)


def unpackable(raw: Mapping[str, Any]) -> str:
    """Return why a model of transformers cannot run packed, as far as its config.json shows; "" if it can. Layers that mix
    tokens by more than the attention function would mix packed sequences. Packed attention is a scaled softmax."""
    kind = raw.get("model_type")
    if others := sorted(set(raw.get("layer_types") or ()) - _PACKABLE_LAYERS):
        return f"a {kind} model cannot run packed ({', '.join(others)}); all layers must be full or sliding attention"
    if raw.get("attn_logit_softcapping") is not None:
        return f"a {kind} model cannot run packed (its attention has softcapping); must be a scaled softmax"
    return unread(raw)


def unread(raw: Mapping[str, Any]) -> str:
    """Return why the weights in the folder of this config.json cannot be trained; "" if they can."""
    stored = raw.get(quantized.KEY) or {}
    if isinstance(stored, Mapping) and stored.get("quant_method") == "mxfp4":
        return "quantization_config has quant_method 'mxfp4', which is not trained; must be a folder of bfloat16 weights"
    return quantized.fault_of(raw)
