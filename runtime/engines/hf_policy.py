"""Loading a Hugging Face causal language model for training on packed sequences, and writing such folders.

`transformers` is imported inside the functions: it takes seconds, and only these roles need it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from runtime.engines import packed_attention
from runtime.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHARD_BYTES = 4 << 30
_PACKABLE_LAYERS = {"full_attention", "sliding_attention"}


def load_policy(path: str) -> Any:
    """The `transformers.PreTrainedModel` of folder `path`, as `load_packed` gives it."""
    return load_packed("AutoModelForCausalLM", path, "model.path")


def load_packed(factory: str, path: str, key: str, new: Collection[str] = (), **options: Any) -> Any:
    """The model of folder `path` by a factory of transformers, float32 on the CPU, without dropout, its attention packed.

    `new` names weights that the folder need not have. `key` is where the configuration names the folder. Raises UserError
    when `path` is no such folder, weights are missing or of other shapes, or the architecture cannot run packed.
    """
    if not (Path(path) / "config.json").is_file():
        raise UserError(f"{key}: {path!r} is not a Hugging Face model folder (it has no config.json)")
    import transformers

    transformers.AttentionInterface.register(packed_attention.NAME, packed_attention.packed_attention)
    try:
        model, report = getattr(transformers, factory).from_pretrained(
            path,
            attn_implementation=packed_attention.NAME,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            **options,
        )
    except KeyError as error:  # some models look attention up in a table of their own
        raise UserError(f"{key}: {path!r} cannot run packed: its attention is not exchangeable") from error
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: weights of other shapes
        raise UserError(f"{key}: {path!r} cannot be loaded: {' '.join(str(error).split())}") from error
    for fault in ("missing_keys", "mismatched_keys"):
        if wrong := set(report[fault]) - set(new):
            names = ", ".join(sorted(map(str, wrong))[:3])
            raise UserError(f"{key}: {path!r}: {len(wrong)} weights are wrong ({fault}: {names} ...)")
    _require_packable(model, path, key)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # the policy must be the one that sampled
    return model.float()


def _require_packable(model: PreTrainedModel, path: str, key: str) -> None:
    """Layers that mix tokens otherwise than by the attention function would mix the packed sequences."""
    kinds = set(getattr(model.config, "layer_types", None) or ()) - _PACKABLE_LAYERS
    if not getattr(model, "_supports_attention_backend", False) or kinds:
        raise UserError(
            f"{key}: {path!r}: a {model.config.model_type} model cannot run packed "
            f"({', '.join(sorted(kinds)) or 'its attention is not exchangeable'}); all layers must be full or sliding attention"
        )


def has_tensor(path: str, name: str) -> bool:
    """Whether the weights in folder `path` have a tensor of this name."""
    return any(name in safe_open(file, framework="pt").keys() for file in sorted(Path(path).glob("*.safetensors")))  # noqa: SIM118


def declared_dtype(path: str) -> torch.dtype:
    """The dtype that the folder's config.json declares for its weights; float32 when it declares none."""
    raw = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    name = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise UserError(f"model.path: {path!r}: config.json declares the dtype {name!r}, which is not one of torch's")
    return dtype


def write_description(source: str, folder: Path, dtype: torch.dtype) -> None:
    """Everything of a model folder but its weights: configuration, tokenizer, chat template."""
    for path in sorted(Path(source).iterdir()):
        if path.suffix in (".json", ".jinja", ".txt", ".model") and not path.name.endswith(".index.json"):
            shutil.copyfile(path, folder / path.name)
    config = folder / "config.json"
    raw: dict[str, Any] = json.loads(config.read_text(encoding="utf-8"))
    raw["dtype" if "dtype" in raw else "torch_dtype"] = str(dtype).removeprefix("torch.")
    config.write_text(json.dumps(raw, indent=2, sort_keys=True) + "\n", encoding="utf-8")


class ShardWriter:
    """Writes tensors that come one by one as safetensors files of at most SHARD_BYTES, named as Hugging Face names them."""

    def __init__(self, folder: Path, stem: str, sizes: Mapping[str, int]):
        """`sizes`: bytes of each tensor, in the order in which they will come."""
        self._folder = folder
        self._stem = stem
        shards: list[list[str]] = [[]]
        used = 0
        for name, size in sizes.items():
            if shards[-1] and used + size > SHARD_BYTES:
                shards.append([])
                used = 0
            shards[-1].append(name)
            used += size
        self._shards = shards
        self._total = sum(sizes.values())

    def write(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Consume `tensors`; no more than one shard is held in memory."""
        stream = iter(tensors)
        count = len(self._shards)
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._shards, 1):
            file = f"{self._stem}.safetensors" if count == 1 else f"{self._stem}-{number:05d}-of-{count:05d}.safetensors"
            held = {name: tensor.contiguous() for name, tensor in (next(stream) for _ in names)}
            save_file(held, self._folder / file, metadata={"format": "pt"})
            weight_map.update(dict.fromkeys(held, file))
        if count > 1:
            index = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
            (self._folder / f"{self._stem}.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
