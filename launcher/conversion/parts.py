"""The shared parts of all conversions of model folders: the Hugging Face side, progress, and room on the disk."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch

from runtime.errors import InvariantViolated, UserError
from runtime.models import quantized
from runtime.models.families import Family, Parameter, family_for
from runtime.models.families.family import EMBEDDING
from runtime.models.families.parameter import Sliceable
from runtime.models.forward import dtype_of
from runtime.models.hf_folder import WeightFiles, predicting_layers, read_raw, weight_paths
from runtime.weights.delta import TensorReader
from runtime.weights.plan import TensorSpec

Show = Callable[[str, int, int], None]  # phase, bytes done, bytes in all
Progress = Callable[[str, int], None]  # phase, further bytes done


class ConversionReport(msgspec.Struct, kw_only=True):
    """The result of a conversion. `seconds`: without the check."""

    nbytes: int
    files: int
    tensors: int  # Hugging Face's; all were checked
    seconds: float
    left_out: list[str]  # tensors of the source without a place in the target
    difference: float | None  # of the logits, if they were compared


class HfModel(msgspec.Struct, frozen=True):
    """A Hugging Face folder that was checked to be a model of `family`."""

    config: dict[str, Any]
    family: Family
    tensors: HfTensors
    left_out: list[str]


def open_hf(source: Path, dtype: torch.dtype | None, value_head: bool) -> HfModel:
    """Open a Hugging Face folder. Raises UserError for an unsupported model, and missing or unknown tensors."""
    config = read_raw(source)
    family = family_for(config, str(source / "config.json"), value_head=value_head)
    tensors, files = TensorReader(*weight_paths(source)), WeightFiles(source)
    family.require_tensors(files.shapes, str(source))
    needed = family.tensors()
    left_out = [name for name in files.shapes if name not in needed]
    if files.left_out:
        beyond = ", ".join(f"{name}*" for name in predicting_layers(config))
        left_out.append(f"{len(files.left_out)} tensors of multi-token prediction ({beyond})")
    return HfModel(config, family, HfTensors(tensors, files, dtype, config), left_out)


class HfTensors:
    """The tensors as they are to be stored. A quantised tensor gets the requested dtype, else that of config.json."""

    def __init__(self, tensors: TensorReader, files: WeightFiles, dtype: torch.dtype | None, config: Mapping[str, Any]):
        self._tensors, self._files, self._dtype = tensors, files, dtype
        declared = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
        self.specs = {
            name: msgspec.structs.replace(tensors.specs[name], dtype=declared) if name in files.scales else tensors.specs[name]
            for name in files.shapes
        }

    def spec(self, parameter: Parameter) -> TensorSpec:
        """Return megatron-core's specification. Raises UserError if sources differ in dtype and none was requested."""
        dtypes = {source.name: self._declared(source.name).dtype for source in parameter.sources}
        if self._dtype is None and len(set(dtypes.values())) > 1:
            listed = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
            raise UserError(f"{parameter.name} is made of tensors of several dtypes ({listed}); --params-dtype makes them one")
        asked = self._asked(parameter.sources[0].name)
        return TensorSpec(parameter.name, dtype_name(asked) if asked else dtypes.popitem()[1], parameter.shape)

    def read(self, name: str) -> Sliceable:
        if name not in self.specs:
            like = self._declared(name)
            return torch.zeros(1, like.shape[1], dtype=self._dtype or getattr(torch, like.dtype))
        stored, asked = self._tensors.get(name), self._asked(name)
        if self._files.blocks is None or name not in self._files.scales:
            return stored if asked is None else _Cast(stored, asked)
        scales = self._tensors.get(self._files.scales[name])
        whole = quantized.Dequantized(stored, scales, self.specs[name].shape, self._files.blocks)
        return _Cast(whole, asked or getattr(torch, self.specs[name].dtype))

    def _asked(self, name: str) -> torch.dtype | None:
        return None if self._dtype is None else dtype_of(name, self._dtype)

    def _declared(self, name: str) -> TensorSpec:
        """Return the stored specification. A critic's head missing from the folder is like the embedding, and begins at 0."""
        return self.specs[name if name in self.specs else EMBEDDING]


class _Cast:
    """A tensor whose slices are cast to another dtype."""

    def __init__(self, tensor: Sliceable, dtype: torch.dtype):
        self._tensor, self._dtype = tensor, dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._tensor[index].to(self._dtype)


def counted(show: Show, total: int) -> Progress:
    """Return what adds up the bytes of each phase, and shows them."""
    done: Counter[str] = Counter()

    def add(phase: str, nbytes: int) -> None:
        done[phase] += nbytes
        show(phase, done[phase], total)

    return add


def require_new(folder: Path) -> None:
    """Raise UserError if the folder exists."""
    if folder.exists():
        raise UserError(f"{folder}: exists; must be a new folder")


def require_room(folder: Path, nbytes: int) -> None:
    """Raise UserError if the disk of a new folder has no room for it."""
    there = next(parent for parent in folder.absolute().parents if parent.exists())
    free = shutil.disk_usage(there).free
    if free < nbytes:
        raise UserError(f"{folder}: needs {nbytes / 1e9:.1f} GB, but only {free / 1e9:.1f} GB are free")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- Check that both folders hold the same, bit for bit

AT_ONCE = 16 << 20  # bytes compared at once


class ParameterReader(Protocol):
    """Reads a rank's parameters by name."""

    @property
    def path(self) -> Path: ...

    @property
    def specs(self) -> Mapping[str, TensorSpec]: ...

    def get(self, name: str) -> Sliceable: ...


def require_same_bits(
    pieces: Iterable[tuple[Parameter, ParameterReader]], read: Callable[[str], Sliceable], checked: Callable[[str, int], None]
) -> None:
    """Check that the blocks of every piece of every rank equal the Hugging Face tensors, bit for bit. Calls `checked` with the
    phase and the bytes of each piece. Raises UserError if ranks that should hold the same do not, and InvariantViolated for any
    other difference, since the conversion has not written such a piece."""
    for parameter, reader in pieces:
        if (wrong := _first_difference(parameter, reader, read)) is not None:
            where = f"{reader.path}: {parameter.name}"
            if parameter.copy or (parameter.split is None and parameter.tensor_rank > 0):
                raise UserError(f"{where} differs from another rank's part of {wrong}")
            raise InvariantViolated(f"{where} does not give {wrong} again")
        checked("checking", reader.specs[parameter.name].nbytes)


def _first_difference(parameter: Parameter, reader: ParameterReader, read: Callable[[str], Sliceable]) -> str | None:
    """Return the name of the first source that differs from the parameter's block."""
    for source, index, block in parameter.blocks(reader.get(parameter.name)[:]):
        step = max(1, AT_ONCE * block.shape[0] // max(1, block.nbytes))
        for start in range(0, block.shape[0], step):
            first = index[0].start + start
            part = (slice(first, min(first + step, index[0].stop)), *index[1:])
            if not _same_bits(block[start : start + step], read(source.name)[part]):
                return source.name
    return None


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether dtype, shape and bits are equal. Equal bits of NaN are equal here."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))
