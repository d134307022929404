"""The model in a checkpoint of the trainer on megatron-core, a tensor at a time; readable without megatron.

trainer.json             of which engine it is
megatron/                torch's distributed checkpoint: whole tensors, of which every rank has written its part
megatron/config.json ... the Hugging Face folder's

Tensors have GPTModel's names without the numbers of layers and experts, which are their first dimensions; or with the layers'
numbers, where layers differ from each other. Norms may have the names that they have where they are one with the matrix behind
them. What the optimizer has is named `optimizer.*`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from runtime.errors import UserError
from runtime.json_file import read_object
from runtime.models.families import Family, Layout
from runtime.models.families.family import HEAD, WORDS, require_same
from runtime.models.families.naming import FUSED
from runtime.trainer.megatron.core_folder import CoreFile, columns
from runtime.trainer.megatron.core_index import CoreReader
from runtime.weights.plan import TensorSpec

FOLDER = "megatron"
TRAINER = "trainer.json"
OPTIMIZER = "optimizer."
OWN = "metadata.json"  # megatron-core's, among the Hugging Face folder's files
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
_EXPERT = re.compile(r"(.*)\.local_experts\.(\d+)\.(.*)")


def is_checkpoint(folder: Path) -> bool:
    return (folder / TRAINER).exists()


class CoreCheckpoint:
    """A checkpoint's folder, or the critic's within it, of which only the headers are read yet."""

    def __init__(self, folder: Path):
        """Raises UserError when the checkpoint is another engine's, or cannot be read."""
        self.path = folder / FOLDER
        _require_engine(folder)
        self._reader = CoreReader(self.path)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self._stored = {
            key: tensor
            for key, tensor in self._metadata.state_dict_metadata.items()
            if isinstance(tensor, TensorStorageMetadata) and not key.startswith(OPTIMIZER)
        }
        self._numbered = any(_LAYER.fullmatch(key) for key in self._stored)
        self.specs: dict[str, TensorSpec] = {}

    @property
    def has_value_head(self) -> bool:
        return HEAD in self._stored and self._stored[HEAD].size[0] == 1

    def require(self, family: Family) -> None:
        """Raises UserError, naming the tensors, when they are not those of `family`'s model."""
        needed: dict[str, tuple[int, ...]] = {}
        for name, shape in _parameters(family):
            key, index = self._place(name)
            before = needed.get(key, ())
            sizes = tuple(max(size, number + 1) for size, number in zip(before or index, index, strict=False))
            needed[key] = (*sizes, *shape)
        found = {key: tuple(tensor.size) for key, tensor in self._stored.items()}
        for key in (WORDS, HEAD):  # rows of padding
            if key in needed and key in found:
                found[key] = (min(found[key][0], needed[key][0]), *found[key][1:])
        require_same(str(self.path), needed, found)
        for name, shape in _parameters(family):
            dtype = self._stored[self._place(name)[0]].properties.dtype
            self.specs[name] = TensorSpec(name, str(dtype).removeprefix("torch."), shape)

    def part(self, part: CoreFile) -> CoreCheckpoint:
        """Where the parameters of `part` are read."""
        return self

    def get(self, name: str) -> torch.Tensor:
        """The parameter, a new tensor. Raises UserError when it cannot be read."""
        (key, index), spec = self._place(name), self.specs[name]
        tensor = torch.empty((*(1,) * len(index), *spec.shape), dtype=getattr(torch, spec.dtype))
        offsets = torch.Size((*index, *(0,) * len(spec.shape)))
        chunk = ChunkStorageMetadata(offsets=offsets, sizes=tensor.size())
        items = create_read_items_for_chunk_list(key, self._stored[key], [chunk])
        planner: Any = _Into(tensor)
        try:
            self._reader.read_data(LoadPlan(items), planner).wait()
        except Exception as error:  # whatever torch raises at what is torn, or wants more than tensors; it advises to trust it
            raise UserError(f"{self.path}: {key} cannot be read: {type(error).__name__}") from error
        return tensor.view(spec.shape)

    def _place(self, name: str) -> tuple[str, tuple[int, ...]]:
        """The stored tensor in which the parameter `name` of Layout() lies, and where in its first dimensions."""
        index: tuple[int, ...] = ()
        if (layer := _LAYER.fullmatch(name)) is not None and not self._numbered:
            name, index = f"decoder.layers.{layer[2]}", (int(layer[1]),)
        for norm, fused in FUSED.items():
            if name.endswith(norm) and (other := name.removesuffix(norm) + fused) in self._stored:
                name = other
        if (expert := _EXPERT.fullmatch(name)) is not None:
            name, index = f"{expert[1]}.experts.{expert[3]}", (*index, int(expert[2]))
        return name, index


class _Into:
    """What torch's reader asks of a planner: where in `tensor` the parts belong that it reads."""

    def __init__(self, tensor: torch.Tensor):
        self._tensor = tensor

    def resolve_tensor(self, item: ReadItem) -> torch.Tensor:
        part = self._tensor
        for dimension, (offset, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            part = part.narrow(dimension, offset, length)
        return part

    def commit_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        """`tensor` is the part itself."""


def _parameters(family: Family) -> Iterator[tuple[str, tuple[int, ...]]]:
    """All, as one rank would have them."""
    for column in columns(family, Layout()):
        for parameter in column.parts[0].parameters:
            yield parameter.name, parameter.shape


def _require_engine(folder: Path) -> None:
    path = folder / TRAINER
    description = read_object(path, str(path))
    if description.get("lora"):
        raise UserError(f"{folder}: holds adapters alone, in PEFT's format; the run's folder model has them merged")
    if "engine" not in description:
        raise UserError(f"{folder}: is a checkpoint of engine torch, whose folder model is a Hugging Face folder already")
    if description["engine"] != "megatron":
        raise UserError(f"{path}: engine is {description['engine']!r}; must be megatron")
