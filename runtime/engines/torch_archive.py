"""Files of `torch.save`, of which nothing is run: plain values, and tensors that are read when they are asked for.

Such a file is a zip: `data.pkl`, a pickle of the values, and the tensors' memory beside it, not compressed. torch's loading of
weights alone knows protocol 2 of pickle, and MindSpeed-LLM's converter writes protocol 4. So the pickle is read here, with the
standard library's machine for it; but whatever name a pickle mentions stands for something of this module, and never for what
Python knows by it. Nothing is imported, and no name that is not in the tables below is taken.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from runtime.errors import UserError
from runtime.weights import tensor_files
from runtime.weights.plan import ITEM_BYTES

_HEADER = struct.Struct("<26xHH")  # of an entry of a zip, before its name: the lengths of the name, and of what follows it
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
# What Megatron's checkpoints mention, and nobody asks for: the state of generators, buffers of FP8, enumerations among the
# arguments. Each becomes an `Inert`.
_INERT = {
    *(f"builtins.{name}" for name in ("getattr", "dict", "list", "int", "bytearray", "complex", "slice", "range")),
    *("_codecs.encode", "_io.BytesIO", "io.BytesIO", "signal.Signals", "datetime.datetime", "datetime.timedelta"),
    *(f"pathlib.{name}" for name in ("Path", "PosixPath", "PurePath", "PurePosixPath")),
    *("torch.device", "torch._C.Generator", "torch.storage._load_from_bytes", "torch.storage.UntypedStorage"),
    "torch._utils._rebuild_tensor_v3",
}
_INERT_PACKAGES = {"megatron", "mindspeed", "mindspeed_llm", "mindspeed_rl", "numpy", "transformer_engine"}


class Inert:
    """What stands for an object of another program: it takes whatever a pickle says of it, and does nothing."""

    def __new__(cls, *_: Any, **__: Any) -> Any:
        return object.__new__(cls)

    def __init__(self, *arguments: Any, **_: Any):
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, item: Any) -> None: ...

    def extend(self, items: Any) -> None: ...

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {', '.join(map(repr, getattr(self, 'arguments', ())))}>"


class Attributes(Inert):
    """An `argparse.Namespace`."""

    def __init__(self, **values: Any):
        self.values: dict[str, Any] = dict(values)

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, dict):
            raise TypeError("attributes that are no dictionary")
        self.values = dict(state)


class ArchiveTensor:
    """A tensor in the file, or a part of one, of which nothing is read yet. `offset` and `stride` are in elements."""

    def __init__(
        self, path: Path, start: int, size: int, dtype: str, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]
    ):
        """Its memory has `size` elements, from byte `start` of the file on. Raises ValueError when it lies beyond that."""
        self.path = path
        self.dtype = dtype
        self.shape = shape
        self._memory = (start, size)
        self._offset = offset
        self._stride = stride
        if len(shape) != len(stride) or min((offset, *shape, *stride)) < 0 or offset + self._extent > size:
            raise ValueError(f"a tensor {list(shape)} lies beyond its memory")

    @property
    def _extent(self) -> int:
        """Elements from the first to the last."""
        if 0 in self.shape:
            return 0
        return 1 + sum((length - 1) * step for length, step in zip(self.shape, self._stride, strict=True))

    @property
    def elements(self) -> int:
        return torch.Size(self.shape).numel()

    def part(self, first: int, shape: tuple[int, ...], *, transposed: bool = False) -> ArchiveTensor:
        """The elements from `first` on as a tensor of `shape`; `transposed`: of which the file has the transposed matrix.

        Raises UserError where the file does not have the elements one after the other.
        """
        if self._extent != self.elements or list(self._stride) != sorted(self._stride, reverse=True):
            raise UserError(f"{self.path}: a tensor {list(self.shape)} is not contiguous")
        stride = torch.empty(shape[::-1] if transposed else shape, device="meta").stride()
        stride = stride[::-1] if transposed else stride
        return ArchiveTensor(self.path, *self._memory, self.dtype, self._offset + first, shape, stride)

    def __getitem__(self, index: Any) -> torch.Tensor:
        """A new, contiguous tensor, all of which is read first. Raises UserError when the file ends within it."""
        memory = torch.empty(self._extent, dtype=getattr(torch, self.dtype))
        into = tensor_files.memory(memory)
        with self.path.open("rb", buffering=0) as file:
            file.seek(self._memory[0] + self._offset * memory.element_size())
            while into:
                count = file.readinto(into)
                if not count:
                    raise UserError(f"{self.path}: ended within a tensor")
                into = into[count:]
        return memory.as_strided(self.shape, self._stride)[index].contiguous()


def read_archive(path: Path) -> Any:
    """The values of a file, tensors as `ArchiveTensor`.

    Raises UserError when the file is missing, torn or of another format, and when its pickle wants anything but tensors and
    plain values, which it names.
    """
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            return _Values(path, file, archive).load()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    except _Refused as error:
        raise UserError(f"{path}: its pickle wants {error}, which no checkpoint needs; nothing of it was run") from error
    except (zipfile.BadZipFile, pickle.UnpicklingError, EOFError, struct.error) as error:
        raise UserError(f"{path}: is not a whole file of torch.save: {error}") from error
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError) as error:
        raise UserError(f"{path}: is not a whole file of torch.save: {type(error).__name__}: {error}") from error


class _Refused(Exception):
    """A name that is in no table."""


class _Function:
    """A function for a pickle, which may call it, but not change it: it can set attributes of what it is given."""

    __slots__ = ("_work",)
    _work: Callable[..., Any]

    def __init__(self, work: Callable[..., Any]):
        object.__setattr__(self, "_work", work)

    def __setattr__(self, name: str, value: Any) -> None:
        raise pickle.UnpicklingError(f"it sets {name} of a function")

    def __call__(self, *arguments: Any) -> Any:
        return self._work(*arguments)


class _Values(pickle.Unpickler):
    """The pickle of one file."""

    def __init__(self, path: Path, file: Any, archive: zipfile.ZipFile):
        self._path = path
        self._file = file
        self._archive = archive
        self._entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        self._types: dict[str, Any] = {}
        if "data.pkl" not in self._entries:
            raise pickle.UnpicklingError("it has no data.pkl")
        if (order := self._entries.get("byteorder")) is not None and archive.read(order) != b"little":
            raise pickle.UnpicklingError("its bytes are in the order of another machine")
        super().__init__(io.BytesIO(archive.read(self._entries["data.pkl"])))

    def find_class(self, module: str, name: str) -> Any:
        """What a name of a pickle stands for. A fresh one for each file, so that none reaches another's."""
        full = f"{'builtins' if module == '__builtin__' else module}.{name}"
        if full not in self._types:
            self._types[full] = self._stand_in(full)
        return self._types[full]

    def _stand_in(self, full: str) -> Any:
        module, _, name = full.rpartition(".")
        if full in _KNOWN:
            return _Function(_KNOWN[full])
        if full == "collections.OrderedDict":
            return OrderedDict
        if full in ("argparse.Namespace", "types.SimpleNamespace"):
            return type(name, (Attributes,), {})
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return name
        if full in _INERT or full.partition(".")[0] in _INERT_PACKAGES:
            return type(full, (Inert,), {})
        raise _Refused(full)

    def persistent_load(self, identity: Any) -> Any:
        """A tensor's memory: (the file, where in it, elements, dtype). That of a dtype which no model here has is `Inert`."""
        kind, dtype, key, _device, elements = identity
        if kind == "storage" and isinstance(dtype, type) and issubclass(dtype, Inert):
            return dtype()
        if kind != "storage" or dtype not in ITEM_BYTES or not isinstance(elements, int):
            raise pickle.UnpicklingError(f"it wants {kind!r} from outside")
        info = self._entries[f"data/{key}"]
        if info.compress_type != zipfile.ZIP_STORED or info.file_size < elements * ITEM_BYTES[dtype]:
            raise pickle.UnpicklingError(f"data/{key} has {info.file_size} bytes")
        self._file.seek(info.header_offset)
        start = info.header_offset + _HEADER.size + sum(_HEADER.unpack(self._file.read(_HEADER.size)))
        return self._path, start, elements, dtype


def _rebuild_tensor(memory: Any, offset: int, shape: Any, stride: Any, *_: Any) -> ArchiveTensor:
    path, start, elements, dtype = memory
    return ArchiveTensor(path, start, elements, dtype, offset, tuple(shape), tuple(stride))


_KNOWN: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
    "torch._utils._rebuild_parameter_with_state": lambda tensor, *_: tensor,
    "torch._tensor._rebuild_from_type_v2": lambda work, _type, arguments, _state: work(*arguments),
    "torch.Size": lambda sizes=(): tuple(sizes),
    # MindSpeed-LLM's converter saves a model as one of these.
    "collections.defaultdict": lambda *_: {},
    "collections.Counter": lambda *_: {},
    "collections.deque": lambda items=(), *_: list(items),
    "builtins.set": lambda items=(): list(items),
    "builtins.frozenset": lambda items=(): list(items),
}
