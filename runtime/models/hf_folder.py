"""A Hugging Face model folder: the shape of the model in its config.json, and its weights. Loads neither torch nor transformers
until weights are read."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import xxhash

from runtime.errors import UserError
from runtime.models import quantized
from runtime.models.families import FAMILIES, Family, family_for
from runtime.models.families.shape import ExpertShape, ModelShape
from runtime.models.forward import Rope, read_rope
from runtime.run_files import read_object

if TYPE_CHECKING:
    import torch

# ---- Configuration. The shape of a model, by its config.json.


PACKED = (*FAMILIES, "exaone4", "glm4", "granite", "olmo2", "olmo3", "phi3", "seed_oss", "smollm3")
"""Families whose packed sequences in transformers equal each sequence alone, by test. Other families are trained padded."""

_UNTRUE = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack"),
    *(".onnx", ".onnx_data", ".gguf", ".ot", ".npz", ".pkl", ".distcp"),
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


def read_config(folder: str | Path) -> ModelConfig:
    """Parse `folder`/config.json. Raises UserError if it is missing or as `parse`."""
    return parse(read_raw(folder), f"model {Path(folder) / 'config.json'}")


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
    files about them. A link must lead to a file within, or, in the hub's cache, to its blobs: otherwise a foreign folder could
    publish any file of this machine. Raises UserError for other links and for anything that is not a file."""
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


def parse(raw: Mapping[str, Any], where: str) -> ModelConfig:
    """Parse the contents of a config.json; `where` is its name in messages. Raises UserError if it is malformed, of an unknown
    family, or has an unsupported feature."""
    name = raw.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise UserError(f"{where}: model_type {name!r} is not supported; must be one of {', '.join(FAMILIES)}")
    family, raw = FAMILIES[name], {**FAMILIES[name].defaults, **raw}
    try:
        shape = family.supported(raw, where)
        quantized.blocks_of(raw, where)
        fields = {
            **msgspec.structs.asdict(shape),
            "family": name,
            "norm_eps": raw.get("rms_norm_eps", 1e-6),
            "rope": read_rope(raw, where),
            "max_positions": raw.get("max_position_embeddings", 2048),
            "centred_norms": family.centred_norms,
            **family.traits(raw, shape, where),
        }
        config = msgspec.convert(fields, ModelConfig)
    except (msgspec.ValidationError, TypeError) as error:
        raise UserError(f"{where}: {error}") from error
    if config.head_dim % 2:
        raise UserError(f"{where}: head_dim is {config.head_dim}; must be even")
    return config


def experts_of(raw: Mapping[str, Any]) -> ExpertShape | None:
    """Return the experts in the contents of a config.json; None if the family is unknown or has no experts."""
    try:
        return parse(raw, "").experts
    except UserError:
        return None


def count_experts(raw: Mapping[str, Any]) -> int:
    """Return the experts of a layer in the contents of a config.json, also of families that only transformers and vLLM know; 0
    if the model has none."""
    if (experts := experts_of(raw)) is not None:
        return experts.count
    return next((raw[key] for key in ("num_experts", "num_local_experts", "n_routed_experts") if raw.get(key)), 0)


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


# ---- Weights. The weights of a folder: safetensors, without the transformers package.


log = logging.getLogger("sluice")

_PREDICTING = 100  # no model has as many layers for multi-token prediction


def weight_paths(folder: str | Path) -> list[Path]:
    """Return the safetensors files of a model folder. Raises UserError if there are none or their index cannot be read."""
    single, index = Path(folder) / "model.safetensors", Path(folder) / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise UserError(f"model {folder}: has neither model.safetensors nor model.safetensors.index.json")
    return [index.with_name(name) for name in shard_names(index)]


class WeightFiles:
    """The safetensors files of a folder: one `model.safetensors`, or the shards of its index. Quantised weights are read as
    float32 (`quantized`)."""

    def __init__(self, folder: str | Path):
        """Read names and shapes. Raises UserError if there are no weights, a shard is missing or torn, or the quantisation is
        unknown."""
        from safetensors import SafetensorError, safe_open

        self.shapes: dict[str, tuple[int, ...]] = {}
        raw = _description(folder)
        self.blocks = quantized.blocks_of(raw, f"model {folder}/config.json")
        self._holders: dict[str, Path] = {}  # the file of each tensor
        dtypes: dict[str, str] = {}
        for path in weight_paths(folder):
            try:
                with safe_open(path, framework="pt") as file:
                    # Without buffers that old checkpoints stored: they follow from config.json.
                    for name in (name for name in list(file.keys()) if not name.endswith("rotary_emb.inv_freq")):
                        part = file.get_slice(name)
                        self.shapes[name], dtypes[name] = tuple(part.get_shape()), part.get_dtype()
                        self._holders[name] = path
            except (OSError, SafetensorError) as error:
                raise UserError(f"model {path}: cannot be read: {error}") from error
        self.scales: dict[str, str] = {}
        """The scales' names, by the names of the quantised weights."""
        if self.blocks is not None:
            for name in (name for name, dtype in dtypes.items() if dtype == "F8_E4M3"):
                self.scales[name] = quantized.scales_of(name, self.shapes, self.blocks, f"model {folder}")
        for name in self.scales.values():
            del self.shapes[name]
        self.left_out = [name for name in self.shapes if name.startswith(predicting_layers(raw))]
        """The tensors of layers for multi-token prediction, which are not used."""
        for name in self.left_out:
            del self.shapes[name]
            self.scales.pop(name, None)
        if self.left_out:
            left_out = f"{len(self.left_out)} tensors of layers for multi-token prediction are left out"
            log.info("model %s: %s: %s, ...", folder, left_out, self.left_out[0])

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and tensor, one at a time, so that at most one tensor is in memory twice."""
        with self._opened() as files, self.slices() as read:
            for name in self.shapes:
                yield name, read(name)[:] if name in self.scales else files[self._holders[name]].get_tensor(name)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[dict[Path, Any]]:
        from safetensors import safe_open

        with contextlib.ExitStack() as stack:
            yield {path: stack.enter_context(safe_open(path, framework="pt")) for path in {*self._holders.values()}}

    @contextlib.contextmanager
    def slices(self) -> Iterator[Callable[[str], Any]]:
        """Open the files and yield a function that returns a readable slice of a tensor, by the tensor's name."""
        with self._opened() as files:

            def read(name: str) -> Any:
                part = files[self._holders[name]].get_slice(name)
                if self.blocks is None or name not in self.scales:
                    return part
                scales = files[self._holders[self.scales[name]]].get_slice(self.scales[name])
                return quantized.Dequantized(part, scales, self.shapes[name], self.blocks)

            yield read


def fingerprint(folder: str | Path) -> str:
    """Return a hash of a model's weights: of each name, shape and first row, in whatever files. Raises UserError as
    `WeightFiles`."""
    files, digest = WeightFiles(folder), xxhash.xxh3_64()
    with files.slices() as read:
        for name, shape in sorted(files.shapes.items()):
            digest.update(f"{name} {shape} ".encode())
            digest.update(read(name)[:1].float().numpy().tobytes() if shape else b"")
    return digest.hexdigest()


def _description(folder: str | Path) -> dict[str, Any]:
    path = Path(folder) / "config.json"
    return read_object(path, f"model {path}") if path.is_file() else {}


def predicting_layers(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the prefixes of the tensors of layers for multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2), by
    config.json: the layers after the model's; Qwen3-Next names them separately. They predict further tokens from a layer's
    output, and change no logits."""
    layers, count = raw.get("num_hidden_layers"), raw.get("num_nextn_predict_layers")
    if type(layers) is not int or type(count) is not int or not 0 < count < _PREDICTING:
        return ("mtp.",)
    return tuple(f"model.layers.{layers + index}." for index in range(count))
