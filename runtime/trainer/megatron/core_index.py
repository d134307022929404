"""The index of torch's distributed checkpoint, `.metadata`: a pickle, of which nothing is run.

torch unpickles it, and whatever a checkpoint has beside tensors. Here `plain_pickle` reads the index, and tensors alone are
read. For an object of torch's there are `Attributes` first; torch's own is made once they are checked.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, Metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner

from runtime.errors import UserError
from runtime.weights import plain_pickle
from runtime.weights.plain_pickle import FAULTS, Attributes, Function, Inert, Malformed, RefusedPickle

INDEX = ".metadata"
_SCALE = 8  # a part of a tensor takes about 85 steps, and 205 bytes: 370,000 parts
_STATES: dict[str, tuple[type, Any]] = {  # each class, and what its attributes are before they are set
    f"{kind.__module__}.{kind.__qualname__}": (kind, () if kind is TensorProperties else {})
    for kind in (
        *(Metadata, MetadataIndex, TensorStorageMetadata, BytesStorageMetadata, ChunkStorageMetadata, StorageMeta),
        *(TensorProperties, _StorageInfo),
    )
}
_UNUSED = {  # what nobody asks for: the layout in memory, and where the checkpoint was written
    *("torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING", "torch.serialization._get_layout"),
    *(f"pathlib.{name}" for name in ("Path", "PosixPath", "PurePath", "PurePosixPath")),
    *(f"pathlib._local.{name}" for name in ("Path", "PosixPath")),  # of Python 3.13
}


class CoreReader(FileSystemReader):
    """torch's reader of a checkpoint's folder, which unpickles nothing. The index is read once."""

    _index: Metadata | None = None

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Raises UserError as `read_index` does."""
        if self._index is None:
            self._index = read_index(Path(self.path) / INDEX)
        return self._index

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        """Raises UserError where an object, which torch would unpickle, is in the place of a tensor."""
        for item in plan.items:
            if item.type is not LoadItemType.TENSOR:
                raise UserError(f"{self.path}: {plain_pickle.told(item.storage_index.fqn)} is not a tensor; it was not read")
        return super().read_data(plan, planner)


def read_index(path: Path) -> Metadata:
    """What torch makes of an index, but for what a tensor's dtype, shape and place in the files do not say.

    Raises UserError when the file is missing or torn, and when it names any class that is not an index's.
    """
    try:
        with path.open("rb") as file:
            found = plain_pickle.load(file.read(_SCALE * plain_pickle.MOST_BYTES + 1), _Names(), _SCALE)
        return _metadata(found)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    except RefusedPickle as error:
        raise UserError(f"{path}: {error}") from error
    except FAULTS as error:
        raise UserError(f"{path}: is not a whole index of a checkpoint: {plain_pickle.line(error)}") from error


class _Names:
    """What an index mentions."""

    def named(self, full: str) -> Any:
        """Raises RefusedPickle."""
        module, _, name = full.rpartition(".")
        if full in _STATES:
            return Function(full, lambda *_: Attributes(full, _STATES[full][1]))
        if full == "torch.Size":
            return Function(full, _sizes)
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return name
        if full in _UNUSED:
            return Function(full, lambda *_: Inert(full))
        raise RefusedPickle(full)

    def outside(self, identity: Any) -> Any:
        raise Malformed(f"it wants {plain_pickle.told(identity)} from outside")


def _metadata(found: Any) -> Metadata:
    top = _state(found, Metadata)
    places = _typed(top["storage_data"], dict)
    stored = {_key(key): _place(place) for key, place in places.items()}
    tensors: dict[str, Any] = {}
    left = len(stored)  # of parts: one list may be that of many tensors, and a short file would have very many
    for name, entry in _typed(top["state_dict_metadata"], dict).items():
        tensors[_typed(name, str)] = tensor = _tensor(entry, left)
        if isinstance(tensor, TensorStorageMetadata):
            left -= len(tensor.chunks)
            if not all(MetadataIndex(name, part.offsets) in stored for part in tensor.chunks):
                raise Malformed(f"it does not say where all of {plain_pickle.told(name)} is")
    return Metadata(tensors, storage_data=stored, storage_meta=StorageMeta(), version=str(top.get("version"))[:20])


def _tensor(entry: Any, most_parts: int) -> TensorStorageMetadata | BytesStorageMetadata:
    """Its parts fill it: none of its elements is left as memory was."""
    if isinstance(entry, Attributes) and _STATES[entry.name][0] is BytesStorageMetadata:
        return BytesStorageMetadata()
    state = _state(entry, TensorStorageMetadata)
    dtype = getattr(torch, _typed(_state(state["properties"], TensorProperties)[0], str))
    size, listed = _typed(state["size"], torch.Size), _typed(state["chunks"], list)
    if len(listed) > most_parts:
        raise Malformed("it has more parts of tensors than places for them")
    parts = [_part(part, size) for part in listed]
    if sum(part.sizes.numel() for part in parts) != size.numel():
        raise Malformed(f"the parts of a tensor {list(size)} do not fill it")
    return TensorStorageMetadata(TensorProperties(dtype=_typed(dtype, torch.dtype)), size, parts)


def _part(part: Any, size: torch.Size) -> ChunkStorageMetadata:
    """Raises Malformed when it lies beyond a tensor of `size`."""
    state = _state(part, ChunkStorageMetadata)
    first, sizes = _typed(state["offsets"], torch.Size), _typed(state["sizes"], torch.Size)
    if len(first) != len(size) or any(start + count > most for start, count, most in zip(first, sizes, size, strict=True)):
        raise Malformed(f"a part {list(sizes)} at {list(first)} lies beyond its tensor {list(size)}")
    return ChunkStorageMetadata(first, sizes)


def _key(key: Any) -> MetadataIndex:
    state = _state(key, MetadataIndex)
    offset = state.get("offset")
    return MetadataIndex(_typed(state["fqn"], str), None if offset is None else _typed(offset, torch.Size))


def _place(place: Any) -> _StorageInfo:
    """In a file of the checkpoint's own folder, as it is: torch could take it from elsewhere, or decompress it."""
    state = _state(place, _StorageInfo)
    name, first, count = _typed(state["relative_path"], str), _typed(state["offset"], int), _typed(state["length"], int)
    if Path(name).name != name or "\0" in name or min(first, count) < 0 or state.get("transform_descriptors") is not None:
        raise Malformed(f"it wants {plain_pickle.told(name)}, from {first} on")
    return _StorageInfo(name, first, count)


def _sizes(sizes: Any = ()) -> torch.Size:
    good = isinstance(sizes, tuple) and len(sizes) <= 64 and all(type(size) is int and size >= 0 for size in sizes)
    if not good or math.prod(max(size, 1) for size in sizes) >= 1 << 63:
        raise Malformed("it has a tensor of no shape")
    return torch.Size(sizes)


def _state(value: Any, kind: type) -> Any:
    """The attributes of what stands for an object of `kind`."""
    if not isinstance(value, Attributes) or _STATES[value.name][0] is not kind:
        raise Malformed(f"it has {plain_pickle.told(value)} in the place of a {kind.__name__}")
    return value.values


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise Malformed(f"it has {plain_pickle.told(value)} in the place of a {kind.__name__}")
    return value
