"""What every conversion of a model folder needs: the Hugging Face side, progress, and room on the disk."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from runtime.errors import UserError
from runtime.json_file import read_object
from runtime.models.families import Family, Parameter, family_for
from runtime.models.families.family import EMBEDDING
from runtime.models.families.parameter import Sliceable
from runtime.models.hf_weights import weight_paths
from runtime.weights.plan import TensorSpec
from runtime.weights.tensor_files import TensorFolder

Show = Callable[[str, int, int], None]  # phase, bytes done, bytes in all
_BUFFER = "rotary_emb.inv_freq"  # which old checkpoints stored; it follows from config.json


class ConversionReport(msgspec.Struct, kw_only=True):
    """`seconds` are of the conversion, without the check."""

    nbytes: int
    files: int
    tensors: int  # Hugging Face's, all of them checked
    seconds: float
    left_out: list[str]  # tensors of the source that the target has no place for
    difference: float | None  # of the logits, where they were compared


@dataclass(frozen=True)
class HfModel:
    """A Hugging Face folder that was found to be a model of `family`."""

    config: dict[str, Any]
    family: Family
    tensors: HfTensors
    left_out: list[str]


def open_hf(source: Path, dtype: torch.dtype | None, value_head: bool) -> HfModel:
    """Raises UserError for a model that is not supported, and for tensors that are missing or too many."""
    config = read_config(source)
    family = family_for(config, str(source / "config.json"), value_head=value_head)
    tensors = TensorFolder(weight_paths(source))
    found = {name: spec.shape for name, spec in tensors.specs.items() if not name.endswith(_BUFFER)}
    family.require_tensors(found, str(source))
    needed = family.tensors()
    return HfModel(config, family, HfTensors(tensors, dtype), [name for name in found if name not in needed])


class HfTensors:
    """A Hugging Face folder's tensors as they are to be stored."""

    def __init__(self, tensors: TensorFolder, dtype: torch.dtype | None):
        self._tensors = tensors
        self._dtype = dtype

    def spec(self, parameter: Parameter) -> TensorSpec:
        """As megatron-core holds it. Raises UserError when what makes it is of several dtypes, and none is asked for."""
        dtypes = {source.name: self._declared(source.name).dtype for source in parameter.sources}
        if self._dtype is None and len(set(dtypes.values())) > 1:
            told = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
            raise UserError(f"{parameter.name} is made of tensors of several dtypes ({told}); --params-dtype makes them one")
        return TensorSpec(parameter.name, dtype_name(self._dtype) if self._dtype else dtypes.popitem()[1], parameter.shape)

    def read(self, name: str) -> Sliceable:
        if name in self._tensors.specs:
            return _Cast(self._tensors.get(name), self._dtype)
        like = self._declared(name)
        return torch.zeros(1, like.shape[1], dtype=self._dtype or getattr(torch, like.dtype))

    def _declared(self, name: str) -> TensorSpec:
        """A critic's head that the folder has not begins at 0, and is like the embedding otherwise."""
        return self._tensors.specs[name if name in self._tensors.specs else EMBEDDING]


class _Cast:
    """A tensor of which the parts that are taken have another dtype."""

    def __init__(self, tensor: Sliceable, dtype: torch.dtype | None):
        self._tensor = tensor
        self._dtype = dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        part: torch.Tensor = self._tensor[index]
        return part if self._dtype is None else part.to(self._dtype)


class ConversionProgress:
    """Counts what was converted, then what was checked."""

    def __init__(self, show: Show, total: int):
        self.total = total
        self._show = show
        self._phase = ""
        self._done = 0

    def add(self, phase: str, nbytes: int) -> None:
        if phase != self._phase:
            self._phase, self._done = phase, 0
        self._done += nbytes
        self._show(phase, self._done, self.total)


def read_config(folder: Path) -> dict[str, Any]:
    """config.json. Raises UserError."""
    path = folder / "config.json"
    if not path.exists():
        raise UserError(f"{folder}: is not a model folder: config.json: No such file or directory")
    return read_object(path, str(path))


def require_new(folder: Path) -> None:
    """Raises UserError when the folder exists."""
    if folder.exists():
        raise UserError(f"{folder}: exists; must be a new folder")


def require_room(folder: Path, nbytes: int) -> None:
    """Raises UserError when the disk of a new folder has no room for it."""
    there = next(parent for parent in folder.absolute().parents if parent.exists())
    free = shutil.disk_usage(there).free
    if free < nbytes:
        raise UserError(f"{folder}: needs {nbytes / 1e9:.1f} GB, of which {free / 1e9:.1f} GB are free")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
