"""Read the weights of a Hugging Face model folder: safetensors, without the transformers package."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from runtime.errors import UserError
from runtime.models import quantized
from runtime.models.hf_config import shard_names
from runtime.run_files import read_object

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


def misfit(expected: Mapping[str, Sequence[int]], shapes: Mapping[str, Sequence[int]], optional: str = "") -> str | None:
    """Return what is wrong with weights of the names and `shapes`, in one line. Return None if they are as `expected`; the
    tensor `optional` may be missing."""
    missing = sorted(expected.keys() - shapes.keys() - {optional})
    unknown = sorted(shapes.keys() - expected.keys())
    if missing or unknown:
        faults = [f"{what} {', '.join(names[:4])}" for what, names in (("missing", missing), ("unknown", unknown)) if names]
        return f"{len(missing)} tensors missing, {len(unknown)} unknown: {'; '.join(faults)}"
    for name, shape in shapes.items():
        if tuple(shape) != tuple(expected[name]):
            return f"{name} has shape {list(shape)}, must be {list(expected[name])}"
    return None


class WeightFiles:
    """The safetensors files of a folder: one `model.safetensors`, or the shards of its index. Quantised weights are read as
    float32 (`quantized`)."""

    def __init__(self, folder: str | Path):
        """Read names and shapes. Raises UserError if there are no weights, a shard is missing or torn, or the quantisation is
        unknown."""
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.left_out: list[str] = []
        """The tensors of layers for multi-token prediction, which are not used."""
        raw = _description(folder)
        self.blocks = quantized.blocks_of(raw, f"model {folder}/config.json")
        self._files: dict[Path, list[str]] = {}
        self.scales: dict[str, str] = {}
        """The scales' names, by the names of the quantised weights."""
        dtypes: dict[str, str] = {}
        for path in weight_paths(folder):
            try:
                with safe_open(path, framework="pt") as file:
                    # Without buffers that old checkpoints stored: they follow from config.json.
                    names = [name for name in list(file.keys()) if not name.endswith("rotary_emb.inv_freq")]
                    for name in names:
                        part = file.get_slice(name)
                        self.shapes[name], dtypes[name] = tuple(part.get_shape()), part.get_dtype()
            except (OSError, SafetensorError) as error:
                raise UserError(f"model {path}: cannot be read: {error}") from error
            self._files[path] = names
        self._holders = {name: path for path, names in self._files.items() for name in names}
        if self.blocks is not None:
            for name, dtype in dtypes.items():
                if dtype == "F8_E4M3":
                    self.scales[name] = quantized.scales_of(name, self.shapes, self.blocks, f"model {folder}")
        self._drop(self.scales.values())
        self.left_out = [name for name in self.shapes if name.startswith(predicting_layers(raw))]
        self._drop(self.left_out)
        self.scales = {name: scales for name, scales in self.scales.items() if name in self.shapes}
        if self.left_out:
            left_out = f"{len(self.left_out)} tensors of layers for multi-token prediction are left out"
            log.info("model %s: %s: %s, ...", folder, left_out, self.left_out[0])

    def _drop(self, names: Iterable[str]) -> None:
        gone = set(names)
        self.shapes = {name: shape for name, shape in self.shapes.items() if name not in gone}
        self._files = {path: [name for name in names if name not in gone] for path, names in self._files.items()}

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and tensor, one at a time, so that at most one tensor is in memory twice."""
        with self.slices() as read:
            for path, names in self._files.items():
                with safe_open(path, framework="pt") as file:
                    for name in names:
                        yield name, read(name)[:] if name in self.scales else file.get_tensor(name)

    @contextlib.contextmanager
    def slices(self) -> Iterator[Callable[[str], Any]]:
        """Open the files and yield a function that returns a readable slice of a tensor, by the tensor's name."""
        with contextlib.ExitStack() as stack:
            opened = {path: stack.enter_context(safe_open(path, framework="pt")) for path in self._files}

            def read(name: str) -> Any:
                part = opened[self._holders[name]].get_slice(name)
                if self.blocks is None or name not in self.scales:
                    return part
                scales = opened[self._holders[self.scales[name]]].get_slice(self.scales[name])
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
