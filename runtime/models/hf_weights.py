"""Reading the weights of a Hugging Face model folder: safetensors, without the transformers package."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from runtime.errors import UserError
from runtime.json_file import read_object


def weight_paths(folder: str | Path) -> list[Path]:
    """The safetensors files of a model folder. Raises UserError when it has none, or an index that cannot be read."""
    single, index = Path(folder) / "model.safetensors", Path(folder) / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise UserError(f"model {folder}: has neither model.safetensors nor model.safetensors.index.json")
    weight_map = read_object(index, f"model {index}").get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else [""]
    if not all(isinstance(name, str) and name.isprintable() and Path(name).name == name for name in names) or "" in names:
        raise UserError(f"model {index}: not an index of safetensors shards, which are files beside it")
    return [index.with_name(name) for name in sorted(set(names))]


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
