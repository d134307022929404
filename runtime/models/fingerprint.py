"""By what two copies of a model's weights are known to be the same. Loads no torch."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from runtime.errors import UserError
from runtime.json_file import read_object

_BLOCK = 8 << 20  # bytes that are read at once
_READERS = 8  # threads, which wait for the disk, or hash: Python holds none up meanwhile
_MOST_HEADER = 100 << 20  # bytes; the safetensors package's own limit

_Place = tuple[Path, int, int]
"""A file, and from which byte to which."""


def fingerprint(folder: str | Path) -> str:
    """SHA-256, in hexadecimal, of all weights of a Hugging Face folder: of the name, dtype, shape and bytes of every tensor, in
    the order of the names. So it differs where any weight does, and is the same however the tensors are spread over files.

    All bytes are read once, and hashed by eight threads: as fast as the disk gives them, or about 1 GB/s for each core. Raises
    UserError when there are no weights, or a file cannot be read.
    """
    try:
        places = dict(place for path in weight_paths(folder) for place in _tensors(path))
        names = sorted(places)
        with ThreadPoolExecutor(min(_READERS, os.cpu_count() or 1)) as threads:
            digests = list(threads.map(_hashed, map(places.__getitem__, names)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise UserError(f"model {folder}: its weights cannot be read: {error}") from error
    return hashlib.sha256("\n".join(map(" ".join, zip(names, digests, strict=True))).encode()).hexdigest()


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


def _tensors(path: Path) -> Iterator[tuple[str, _Place]]:
    """By name, dtype and shape in one text, where each of a file's tensors lies."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > _MOST_HEADER:
            raise ValueError(f"its header has {length} bytes")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        yield json.dumps([name, entry["dtype"], entry["shape"]]), (path, 8 + length + begin, 8 + length + end)


def _hashed(place: _Place) -> str:
    """Raises ValueError when the file ends before."""
    path, begin, end = place
    found = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        file.seek(begin)
        while begin < end and (block := file.read(min(_BLOCK, end - begin))):
            found.update(block)
            begin += len(block)
    if begin < end:
        raise ValueError(f"{path.name} ends within a tensor")
    return found.hexdigest()
