"""Reads files of `torch.save` without running any of their code: plain values, and tensors that are read on demand. Such a file
is a zip, not compressed: `data.pkl`, a pickle of the values, and the tensors' memory beside it. torch's loading of weights
alone knows only protocol 2 of pickle, and MindSpeed-LLM's converter writes protocol 4. `plain_pickle` reads both. A name in a
pickle stands for an entry in the tables below, never for the object of that name in Python. Nothing is imported, and other
names are refused."""

from __future__ import annotations

import math
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from runtime.errors import UserError
from runtime.weights import delta, plain_pickle
from runtime.weights.plain_pickle import FAULTS, Attributes, Function, Malformed, Opaque, RefusedPickle, excerpt, line
from runtime.weights.plan import ITEM_BYTES

_LIMIT = 1 << 63
_MOST_DIMENSIONS = 64  # of a tensor, in torch
_HEADER = struct.Struct("<26xHH")  # of a zip's entry, before its name: the lengths of the name and of the extra field after it
_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}
# Names in Megatron's checkpoints that no conversion needs: the state of generators, buffers of FP8, enumerations among the
# arguments. Each becomes an `Opaque`.
_INERT = {
    *(f"builtins.{name}" for name in ("getattr", "dict", "list", "int", "bytearray", "complex", "slice", "range")),
    *("_codecs.encode", "_io.BytesIO", "io.BytesIO", "signal.Signals", "datetime.datetime", "datetime.timedelta"),
    *(f"pathlib.{name}" for name in ("Path", "PosixPath", "PurePath", "PurePosixPath")),
    *("torch.device", "torch._C.Generator", "torch.storage._load_from_bytes", "torch.storage.UntypedStorage"),
    "torch._utils._rebuild_tensor_v3",
}
_INERT_PACKAGES = {"megatron", "mindspeed", "mindspeed_llm", "mindspeed_rl", "numpy", "transformer_engine"}


class ArchiveTensor:
    """A tensor in the file, or a part of a tensor; its data is not read yet. `offset` and `stride` are in elements."""

    def __init__(self, memory: ArchiveMemory, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]):
        """Check that the tensor lies within `memory`. Raises ValueError if not."""
        self.path, self.dtype, self.shape = memory.path, memory.dtype, shape
        self._memory, self._offset, self._stride = memory, offset, stride
        if len(shape) != len(stride) or min((offset, *shape, *stride)) < 0 or offset + self._extent > memory.elements:
            raise ValueError(f"a tensor {list(shape)} lies beyond its memory")
        if math.prod(max(length, 1) for length in shape) >= _LIMIT or max(stride, default=0) >= _LIMIT:
            raise ValueError(f"a tensor {list(shape)} has more elements than there are numbers")

    @property
    def _extent(self) -> int:
        """Elements from the first to the last in memory."""
        if 0 in self.shape:
            return 0
        return 1 + sum((length - 1) * step for length, step in zip(self.shape, self._stride, strict=True))

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def part(self, first: int, shape: tuple[int, ...], *, transposed: bool = False) -> ArchiveTensor:
        """Return the elements from `first` on as a tensor of `shape`; `transposed`: the file has the transposed matrix. Raises
        UserError if the file does not have the elements one after the other."""
        if self._extent != self.elements or list(self._stride) != sorted(self._stride, reverse=True):
            raise UserError(f"{self.path}: a tensor {list(self.shape)} is not contiguous")
        stride = torch.empty(shape[::-1] if transposed else shape, device="meta").stride()
        stride = stride[::-1] if transposed else stride
        return ArchiveTensor(self._memory, self._offset + first, shape, stride)

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return a new, contiguous tensor. The whole tensor is read first. Raises UserError if the file ends within the tensor,
        or its elements share memory, as their number has no bound then."""
        if self.elements > (size := self._memory.elements):
            raise UserError(f"{self.path}: a tensor {list(self.shape)} has {self.elements} elements in the memory of {size}")
        memory = torch.empty(self._extent, dtype=getattr(torch, self.dtype))
        into = delta.memory(memory)
        with self.path.open("rb", buffering=0) as file:
            file.seek(self._memory.start + self._offset * memory.element_size())
            while into:
                count = file.readinto(into)
                if not count:
                    raise UserError(f"{self.path}: ended within a tensor")
                into = into[count:]
        return memory.as_strided(self.shape, self._stride)[index].contiguous()


def read_archive(path: Path) -> Any:
    """Return the values of a file, tensors as `ArchiveTensor`. Raises UserError if the file is missing, torn or of another
    format, or its pickle wants anything but tensors and plain values; the message names the unwanted value."""
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            return _Archive(path, file, archive).load()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    except RefusedPickle as error:
        raise UserError(f"{path}: {error}") from error
    except (zipfile.BadZipFile, struct.error, *FAULTS) as error:  # zipfile raises RuntimeError for unknown features
        raise UserError(f"{path}: is not a whole file of torch.save: {line(error)}") from error


class ArchiveMemory(msgspec.Struct, frozen=True):
    """The memory of a tensor in the file: `elements` of a dtype, from byte `start` on."""

    path: Path
    start: int
    elements: int
    dtype: str


class _Archive:
    """One open file."""

    def __init__(self, path: Path, file: Any, archive: zipfile.ZipFile):
        self._path = path
        self._file = file
        self._archive = archive
        self._size = os.fstat(file.fileno()).st_size
        self._entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        for info in archive.infolist():
            # torch.save does neither. A small compressed file may hold any amount of data.
            if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
                raise Malformed(f"{excerpt(info.filename)} is compressed or encrypted")
        if "data.pkl" not in self._entries:
            raise Malformed("it has no data.pkl")
        if "byteorder" in self._entries and self._entry("byteorder", 16) != b"little":
            raise Malformed("its bytes are in the order of another machine")

    def load(self) -> Any:
        return plain_pickle.load(self._entry("data.pkl", plain_pickle.MOST_BYTES), self)

    def _entry(self, name: str, most: int) -> bytes:
        info = self._entries[name]
        if info.file_size > most:
            raise Malformed(f"{name} has {info.file_size} bytes; must be at most {most}")
        return self._archive.read(info)

    def named(self, full: str) -> Any:
        """Return the meaning of a name in a pickle. Raises RefusedPickle."""
        module, _, name = full.rpartition(".")
        if full in _KNOWN:
            return Function(full, _KNOWN[full])
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        # Not by getattr: torch imports parts of itself for it.
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return name
        if full in _INERT or full.partition(".")[0] in _INERT_PACKAGES:
            return Function(full, lambda *_: Opaque(full))
        raise RefusedPickle(full)

    def outside(self, identity: Any) -> ArchiveMemory | Opaque:
        """Return a tensor's memory for a persistent identity; `Opaque` if no supported model uses its dtype."""
        if not isinstance(identity, tuple) or len(identity) != 5:
            raise Malformed(f"it wants {excerpt(identity)} from outside")
        kind, dtype, key, _device, elements = identity
        if kind == "storage" and isinstance(dtype, Function):
            return Opaque(dtype.name)
        known = isinstance(dtype, str) and dtype in ITEM_BYTES and isinstance(key, str)
        if kind != "storage" or not known or not isinstance(elements, int) or elements < 0:
            raise Malformed(f"it wants {excerpt(kind)} from outside")
        info = self._entries.get(f"data/{key}")
        if info is None:
            raise Malformed(f"it has no {excerpt(f'data/{key}')}")
        if info.file_size < elements * ITEM_BYTES[dtype]:
            raise Malformed(f"data/{key} has {info.file_size} bytes")
        self._file.seek(info.header_offset)
        start = info.header_offset + _HEADER.size + sum(_HEADER.unpack(self._file.read(_HEADER.size)))
        if start + info.file_size > self._size:
            raise Malformed(f"data/{key} lies beyond its end")
        return ArchiveMemory(self._path, start, elements, dtype)


def _tensor(memory: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> ArchiveTensor | Opaque:
    if isinstance(memory, Opaque):
        return memory
    if not isinstance(memory, ArchiveMemory) or not isinstance(offset, int):
        raise Malformed("it has a tensor without memory")
    return ArchiveTensor(memory, offset, _sizes(shape), _sizes(stride))


def _sizes(sizes: Any = ()) -> tuple[int, ...]:
    if not isinstance(sizes, tuple) or len(sizes) > _MOST_DIMENSIONS or not all(type(size) is int for size in sizes):
        raise Malformed("it has a tensor of no shape")
    return sizes


def _same(tensor: Any, *_: Any) -> ArchiveTensor | Opaque:
    if not isinstance(tensor, (ArchiveTensor, Opaque)):
        raise Malformed(f"it has {excerpt(tensor)} as a parameter")
    return tensor


def _of_type(work: Any, _type: Any, arguments: Any, _state: Any) -> Any:
    return _same(plain_pickle.called(work, arguments))


def _listed(items: Any = (), *_: Any) -> list[Any]:
    """Return the list itself, not a copy: a pickle can ask for many copies of one list."""
    if items and not isinstance(items, list):
        raise Malformed(f"it makes a set of {excerpt(items)}")
    return items or []


# No function here returns an object that can open files, or keeps its arguments.
_KNOWN: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": _same,
    "torch._utils._rebuild_parameter_with_state": _same,
    "torch._tensor._rebuild_from_type_v2": _of_type,
    "torch.Size": _sizes,
    "argparse.Namespace": lambda *_: Attributes("argparse.Namespace", {}),
    "types.SimpleNamespace": lambda *_: Attributes("types.SimpleNamespace", {}),
    # MindSpeed-LLM's converter saves a model in a defaultdict.
    **{f"collections.{name}": lambda *_: {} for name in ("OrderedDict", "defaultdict", "Counter")},
    **dict.fromkeys(("collections.deque", "builtins.set", "builtins.frozenset"), _listed),
}
