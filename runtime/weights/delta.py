"""Encoding `delta`: sends only the changes of each bucket since the version before, without loss, over any transport.

A sender compares what it copies into a bucket with what is there, the version before, as words of 16 bits (bfloat16's
elements). A bucket travels as a header and a payload: the whole bucket, or the changed words and then one byte each for the
unchanged words between them. A delta's header has the tags of its start and of its result. So deltas form a chain, and are
never applied to other weights. Receivers keep a copy of the last version: the model's size once more in host memory."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch

from runtime.errors import InvariantViolated, UserError
from runtime.types import PolicyVersion
from runtime.weights.group import TAG, Link, Target, Transfer
from runtime.weights.plan import DTYPES, TensorSpec

# ---- Tensor files
# The `safetensors` package needs all tensors of a new file in memory. To read, it maps the file, and the mapped pages count as
# the process's memory. This module holds only the requested part. The format: 8 bytes of length, a JSON header with dtype,
# shape and range of each tensor, then the tensors, without gaps.

_LENGTH = struct.Struct("<Q")
_MOST_HEADER = 100 << 20  # bytes; the package's own limit
_CODES = {name: code for name, (_, code) in DTYPES.items()}
_NAMES = {code: name for name, code in _CODES.items()}


class TensorReader:
    """The tensors of files, by name. A file is open only while it is read: a layout may have more than a process may open."""

    def __init__(self, *paths: Path):
        """Read the headers. Raises UserError if a file is missing, incomplete or no safetensors, or a name occurs twice."""
        self.path = next(iter(paths), Path())  # of the first file
        self.specs: dict[str, TensorSpec] = {}
        self._places: dict[str, tuple[Path, int]] = {}  # by tensor: its file, and its first byte there
        for path in paths:
            try:
                with path.open("rb") as file:
                    found = _read_header(file)
            except OSError as error:
                raise UserError(f"{path}: cannot be read: {error.strerror}") from error
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
                raise UserError(f"{path}: is not a whole safetensors file: {error}") from error
            for spec, start in found:
                if spec.name in self.specs:
                    raise UserError(f"{path}: has {spec.name}, as another file of the folder does")
                self.specs[spec.name], self._places[spec.name] = spec, (path, start)

    def get(self, name: str) -> StoredTensor:
        """Return the tensor, without reading its data."""
        return StoredTensor(self.specs[name], *self._places[name])


def _read_header(file: BinaryIO) -> list[tuple[TensorSpec, int]]:
    """Return each tensor, and its first byte in the file."""
    size = os.fstat(file.fileno()).st_size
    (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
    data = _LENGTH.size + length
    if length > min(_MOST_HEADER, size):
        raise ValueError(f"its header has {length} bytes")
    header: dict[str, Any] = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header is no object")
    header.pop("__metadata__", None)
    found, end = [], 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        if entry["dtype"] not in _NAMES:
            raise ValueError(f"{name} is of the dtype {entry['dtype']}")
        spec = TensorSpec(name, _NAMES[entry["dtype"]], tuple(entry["shape"]))
        start, stop = entry["data_offsets"]
        if start != end or stop != start + spec.nbytes:
            raise ValueError(f"{name} lies at {start} to {stop}")
        found.append((spec, data + start))
        end = stop
    if data + end != size:
        raise ValueError(f"it has {size} bytes instead of {data + end}")
    return found


class StoredTensor:
    """A tensor in a file, read when indexed: by rows `[a:b]`, or by columns `[:, a:b]`. The latter reads all rows."""

    def __init__(self, spec: TensorSpec, path: Path, start: int):
        self._spec, self._path, self._start = spec, path, start

    def __getitem__(self, index: slice | tuple[slice, ...]) -> torch.Tensor:
        """Return a new, contiguous tensor. Raises InvariantViolated for a row step other than 1."""
        spec = self._spec
        rows, *columns = index if isinstance(index, tuple) else (index,)
        start, stop, step = rows.indices(spec.shape[0])
        if step != 1:
            raise InvariantViolated(f"{spec.name}: is read with a step of {step} between rows; must be 1")
        tensor = torch.empty((max(0, stop - start), *spec.shape[1:]), dtype=getattr(torch, spec.dtype))
        into = memory(tensor)
        with self._path.open("rb", buffering=0) as file:
            file.seek(self._start + start * _row_bytes(spec))
            while into:
                count = file.readinto(into)
                if not count:
                    raise UserError(f"{self._path}: ended within {spec.name}")
                into = into[count:]
        return tensor[:, columns[0]].contiguous() if columns else tensor


class TensorWriter:
    """A file whose tensors are written in any order, and by rows. A context manager; the file is whole after the block."""

    def __init__(self, path: Path, specs: Iterable[TensorSpec]):
        """Write the header. `specs`: all of the file's tensors."""
        # Wide dtypes first, as in the package: then each tensor lies at a multiple of its item size.
        ordered = sorted(specs, key=lambda spec: -getattr(torch, spec.dtype).itemsize)
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
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
        """Close the file. Raises InvariantViolated if a tensor was not written exactly once."""
        self._file.close()
        if error is None and (wrong := [name for name, count in self._missing.items() if count]):
            raise InvariantViolated(f"{self._file.name}: {len(wrong)} tensors were not written once: {', '.join(wrong[:10])}")

    def write(self, name: str, tensor: torch.Tensor, row: int = 0) -> None:
        """Write the tensor, or some of its rows from `row` on. Raises InvariantViolated for another dtype or shape."""
        spec = self.specs[name]
        if str(tensor.dtype) != f"torch.{spec.dtype}" or tuple(tensor.shape[1:]) != spec.shape[1:]:
            raise InvariantViolated(f"{name}: {tensor.dtype} {list(tensor.shape)} written as {spec.dtype} {list(spec.shape)}")
        data = memory(tensor.contiguous())
        self._missing[name] -= len(data)
        self._file.seek(self._starts[name] + row * _row_bytes(spec))
        while data:
            data = data[self._file.write(data) :]


def memory(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _row_bytes(spec: TensorSpec) -> int:
    return spec.nbytes // max(1, spec.shape[0]) if spec.shape else spec.nbytes


# ---- Deltas of buckets

Words = npt.NDArray[np.uint16]
Positions = npt.NDArray[np.int64]  # of words, from 0

FULL, DELTA = 0, 1
HEADER = struct.Struct("<BQ16s16s")  # kind, bytes of the payload, tags of the version before and of this version
ENTRY_BYTES = 3
WIDEST = 255  # unchanged words that one byte can skip


def entries(changed: Positions, new: Words) -> npt.NDArray[np.uint8] | None:
    """Encode a change to `new` [words] by the positions of its words, ascending: uint8 [3 · entries], the entries' new words,
    then their gaps.

    An entry's gap counts the words since the entry before. Entries with an unchanged word divide gaps of more than `WIDEST`
    words. Returns None if the result would not be smaller than `new`."""
    gaps = np.diff(changed, prepend=-1) - 1
    fillers = gaps // (WIDEST + 1)
    steps = np.full(len(gaps) + int(fillers.sum()), WIDEST, dtype=np.uint8)
    steps[np.cumsum(fillers + 1) - 1] = gaps % (WIDEST + 1)
    return np.concatenate([new[_positions(steps)].view(np.uint8), steps]) if ENTRY_BYTES * len(steps) < new.nbytes else None


def decode(words: Words, payload: npt.NDArray[np.uint8]) -> Positions:
    """Apply `payload` to `words` in place, and return the positions in it. Raises RuntimeError if it does not fit `words`."""
    count, odd = divmod(len(payload), ENTRY_BYTES)
    positions = _positions(payload[2 * count :])
    if odd or (count and positions[-1] >= len(words)):
        raise RuntimeError(f"a delta of {len(payload)} bytes does not fit {len(words)} words")
    words[positions] = payload[: 2 * count].view(np.uint16)
    return positions


def _positions(steps: npt.NDArray[np.uint8]) -> Positions:
    return np.cumsum(steps.astype(np.int64) + 1) - 1


def words_of(tensor: torch.Tensor) -> Words:
    """Return a contiguous tensor in host memory, of an even number of bytes, as flat words, without a copy."""
    array: Any = tensor.view(-1).view(torch.uint8).numpy()
    return array.view(np.uint16)  # type: ignore[no-any-return]


def _name(tag: bytes) -> str:
    digest, packed = TAG.unpack(tag)
    return f"version {PolicyVersion.unpack(packed)} (checksum {digest:016x})"


FULL_EVERY = 50  # of so many versions of an epoch one is sent whole


class DeltaLink(Link):
    """A link that sends deltas over `inner`, in one order: a bucket's header, its payload, then the next bucket's."""

    def __init__(self, inner: Link, full_every: int):
        """Wrap `inner`. Of an epoch's versions one of every `full_every` is sent whole, beginning with the first."""
        self._inner, self._full_every = inner, full_every
        self._next: tuple[bytes, Positions | None]  # of `describe`
        self._counts: dict[int, int] = {}  # by bucket, the versions sent in this epoch
        self._tags: dict[int, bytes] = {}  # by bucket, of the last version
        self._last: dict[int, Words] = {}  # by bucket, at a receiver: the words of the last version

    def describe(self, tag: bytes, changed: Positions | None) -> None:
        """Set the tag of the next bucket, and in ascending order the words that changed since its last send; None: any."""
        self._next = tag, changed

    def send(self, index: int, buffer: torch.Tensor) -> Transfer:
        parts = [part for part in self.encode(index, buffer) if len(part)]
        pending = [self._inner.send(index, part) for part in parts]
        self.sent_bytes = self._inner.sent_bytes

        def wait(give_up: float, parts: Sequence[torch.Tensor] = parts) -> None:  # keeps the parts alive
            for transfer in pending:
                transfer(give_up)

        return wait

    def encode(self, index: int, buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return header and payload of the bucket `index` in `buffer`. The payload is `buffer` itself to send it whole."""
        (tag, changed), count = self._next, self._counts.get(index, 0)
        changes = entries(changed, words_of(buffer)) if changed is not None and count % self._full_every else None
        payload = buffer if changes is None else torch.from_numpy(changes)
        base = self._tags.get(index, bytes(TAG.size))
        header = HEADER.pack(FULL if changes is None else DELTA, payload.nbytes, base, tag)
        self._counts[index], self._tags[index] = count + 1, tag
        return torch.frombuffer(bytearray(header), dtype=torch.uint8), payload

    def receive(self, index: int, target: Target) -> Transfer:
        """Post nothing before the transfer is waited for: only the header says which payload follows."""
        assert target.run is not None
        return partial(self._take, index, target.run)

    def _take(self, index: int, buffer: torch.Tensor, give_up: float) -> None:
        """Fill `buffer`. Raises RuntimeError for a delta that starts from another version."""
        header = torch.empty(HEADER.size, dtype=torch.uint8)
        self._inner.receive(index, Target.of(header))(give_up)
        kind, nbytes, base, tag = HEADER.unpack(header.numpy().tobytes())
        if kind == FULL:
            self._inner.receive(index, Target.of(buffer))(give_up)
            self._last.setdefault(index, np.empty_like(words_of(buffer)))[:] = words_of(buffer)
        else:
            mine = self._tags.get(index)
            if mine != base:
                has = "none" if mine is None else _name(mine)
                raise RuntimeError(f"the delta of bucket {index} starts from {_name(base)}, and this member has {has}")
            payload = torch.empty(min(nbytes, buffer.nbytes), dtype=torch.uint8)
            if nbytes:
                self._inner.receive(index, Target.of(payload))(give_up)
            decode(self._last[index], payload.numpy())
            words_of(buffer)[:] = self._last[index]
        self._tags[index] = tag

    def set_timeout(self, seconds: float) -> None:
        self._inner.set_timeout(seconds)

    def abort(self) -> None:
        self._inner.abort()
