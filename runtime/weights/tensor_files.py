"""safetensors files, a part of a tensor at a time.

The `safetensors` package writes a file from tensors that all lie in memory, and reads by mapping the file, whose pages then
count as the process's. Here no more is held than what was asked for. The format: 8 bytes of length, a JSON header
with dtype, shape and range of each tensor, then the tensors, without gaps.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from runtime.errors import InvariantViolated, UserError
from runtime.weights.plan import DTYPES, TensorSpec

_LENGTH = struct.Struct("<Q")
_MOST_HEADER = 100 << 20  # bytes; the package's own limit
_CODES = {name: code for name, (_, code) in DTYPES.items()}
_NAMES = {code: name for name, code in _CODES.items()}


class TensorReader:
    """A file's tensors, by name. It is open only while it is read: a layout may have more files than a process may open."""

    def __init__(self, path: Path):
        """Reads the header. Raises UserError when there is no such file, or when it is torn or of another format."""
        self.path = path
        self.specs: dict[str, TensorSpec] = {}
        self.metadata: dict[str, str] = {}
        self._starts: dict[str, int] = {}
        try:
            with path.open("rb") as file:
                self._read_header(file)
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
            raise UserError(f"{path}: is not a whole safetensors file: {error}") from error

    def _read_header(self, file: BinaryIO) -> None:
        size = os.fstat(file.fileno()).st_size
        (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
        data = _LENGTH.size + length
        if length > min(_MOST_HEADER, size):
            raise ValueError(f"its header has {length} bytes")
        header: dict[str, Any] = json.loads(file.read(length))
        if not isinstance(header, dict):
            raise ValueError("its header is no object")
        self.metadata = header.pop("__metadata__", {})
        if not all(isinstance(value, str) for value in self.metadata.values()):
            raise TypeError("its metadata are not strings")
        end = 0
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            if entry["dtype"] not in _NAMES:
                raise ValueError(f"{name} is of the dtype {entry['dtype']}")
            spec = TensorSpec(name, _NAMES[entry["dtype"]], tuple(entry["shape"]))
            start, stop = entry["data_offsets"]
            if start != end or stop != start + spec.nbytes:
                raise ValueError(f"{name} lies at {start} to {stop}")
            self.specs[name], self._starts[name], end = spec, data + start, stop
        if data + end != size:
            raise ValueError(f"it has {size} bytes instead of {data + end}")

    def get(self, name: str) -> StoredTensor:
        """The tensor, of which nothing is read yet."""
        return StoredTensor(self, self.specs[name])

    def rows(self, spec: TensorSpec, start: int, stop: int) -> torch.Tensor:
        """Rows of a tensor; a new one."""
        tensor = torch.empty((max(0, stop - start), *spec.shape[1:]), dtype=getattr(torch, spec.dtype))
        self._read(spec.name, start * _row_bytes(spec), memory(tensor))
        return tensor

    def read_into(self, name: str, tensor: torch.Tensor) -> None:
        """Fill `tensor`, contiguous and of the stored dtype and shape."""
        self._read(name, 0, memory(tensor))

    def _read(self, name: str, offset: int, into: memoryview) -> None:
        with self.path.open("rb", buffering=0) as file:
            file.seek(self._starts[name] + offset)
            while into:
                count = file.readinto(into)
                if not count:
                    raise UserError(f"{self.path}: ended within {name}")
                into = into[count:]


class TensorFolder:
    """The tensors of several files, by name."""

    def __init__(self, paths: Iterable[Path]):
        """Reads the headers. Raises UserError as `TensorReader` does, and when two files have a tensor of one name."""
        self.specs: dict[str, TensorSpec] = {}
        self._readers: dict[str, TensorReader] = {}
        for path in paths:
            reader = TensorReader(path)
            if twice := self.specs.keys() & reader.specs.keys():
                raise UserError(f"{path}: has {min(twice)}, as another file of the folder does")
            self.specs.update(reader.specs)
            self._readers.update(dict.fromkeys(reader.specs, reader))

    def get(self, name: str) -> StoredTensor:
        """The tensor, of which nothing is read yet."""
        return self._readers[name].get(name)


class StoredTensor:
    """Read as it is indexed: by rows `[a:b]`, or by columns `[:, a:b]`, for which all of its rows are read."""

    def __init__(self, file: TensorReader, spec: TensorSpec):
        self._file = file
        self._spec = spec

    def __getitem__(self, index: slice | tuple[slice, ...]) -> torch.Tensor:
        """A new, contiguous tensor. Raises InvariantViolated for a step between rows."""
        rows, *columns = index if isinstance(index, tuple) else (index,)
        start, stop, step = rows.indices(self._spec.shape[0])
        if step != 1:
            raise InvariantViolated(
                f"{self._spec.name}: is read with a step of {step} between rows, of which this is not capable"
            )
        tensor = self._file.rows(self._spec, start, stop)
        return tensor[:, columns[0]].contiguous() if columns else tensor


class TensorWriter:
    """A file whose tensors are written in any order, and by rows. A context manager; whole when it ends well."""

    def __init__(self, path: Path, specs: Iterable[TensorSpec], metadata: Mapping[str, str] | None = None):
        """Writes the header: `specs` are all of the file's tensors, `metadata` what it says besides."""
        # Wide ones first, as the package does it: then each lies at a multiple of its item's size.
        ordered = sorted(specs, key=lambda spec: -getattr(torch, spec.dtype).itemsize)
        header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
        end = 0
        for spec in ordered:
            offsets = [end, end + spec.nbytes]
            header[spec.name] = {"dtype": _CODES[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets}
            end = offsets[1]
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _LENGTH.size)
        self.specs = {spec.name: spec for spec in ordered}
        self._starts = {name: _LENGTH.size + len(text) + header[name]["data_offsets"][0] for name in self.specs}
        self._missing = {name: spec.nbytes for name, spec in self.specs.items()}
        self._file = path.open("wb", buffering=0)
        self._file.write(_LENGTH.pack(len(text)) + text)

    def __enter__(self) -> TensorWriter:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Raises InvariantViolated when a tensor was not written once in whole."""
        self._file.close()
        if error is None and (wrong := [name for name, count in self._missing.items() if count]):
            raise InvariantViolated(f"{self._file.name}: {len(wrong)} tensors were not written once: {', '.join(wrong[:10])}")

    def write(self, name: str, tensor: torch.Tensor, row: int = 0) -> None:
        """The tensor, or some of its rows from `row` on. Raises InvariantViolated for another dtype or shape."""
        spec = self.specs[name]
        if str(tensor.dtype) != f"torch.{spec.dtype}" or tuple(tensor.shape[1:]) != spec.shape[1:]:
            raise InvariantViolated(f"{name}: {tensor.dtype} {list(tensor.shape)} written as {spec.dtype} {list(spec.shape)}")
        data = memory(tensor.contiguous())
        self._missing[name] -= len(data)
        self._file.seek(self._starts[name] + row * _row_bytes(spec))
        while data:
            data = data[self._file.write(data) :]


def memory(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _row_bytes(spec: TensorSpec) -> int:
    return spec.nbytes // max(1, spec.shape[0]) if spec.shape else spec.nbytes
