"""Encoding `delta`: sends only the changes of each bucket since the version before, without loss, over any transport.

A bucket is compared, as words of 16 bits (bfloat16's elements), with the bucket sent before in this epoch. It travels as a
header and a payload: the whole bucket, or the changed words and then one byte each for the unchanged words between them. A
delta's header has two versions with their checksums, as the buckets' trailers do: its start and its result. So deltas form a
chain, and are never applied to other weights. Sender and receivers keep a copy of the last version: the model's size once more
in host memory on both sides. A sender that gets changes from `ShardDelta` keeps no copy."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from msgspec import Struct, msgpack

from runtime.errors import InvariantViolated, UserError
from runtime.types import PolicyVersion
from runtime.weights.group import Link, Transfer
from runtime.weights.plan import DTYPES, TRAILER, TensorSpec

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


# ---- Shard delta
# Finds the policy's changes by shard, without a gather of whole tensors: each rank compares its shards with the last sent
# version, and only changes travel. The resulting buckets equal gathered buckets bit for bit. Each rank keeps a copy of its last
# sent shards, in the dtype on the wire and in host memory: together one model's size over all ranks that hold the model once.
# All ranks make the same calls in the same order. Each call is a collective over torch's default group.

EXCHANGE_BYTES = 64 << 20  # that one rank sends in one exchange, except for a single larger change

Bytes = npt.NDArray[np.uint8]
Span = tuple[tuple[int, int], ...]  # (first, last + 1) in each dimension that is cut, from the first dimension on


@dataclass(frozen=True)
class Shard:
    """A rank's part of a tensor."""

    place: int  # index of the tensor in the manifest
    index: tuple[slice, ...]
    block: torch.Tensor  # whole[index], in the dtype on the wire, on any device


class ShardChange(Struct, frozen=True, array_like=True):
    """A changed shard on its way to the rank that sends its tensor."""

    place: int
    span: Span
    payload: memoryview  # uint8: of `encode`; or of the shard's own size: then its words


class TensorChanges(list[ShardChange]):
    """One tensor's changes since the last sent version."""

    def apply(self, tensor: torch.Tensor) -> Positions:
        """Apply the changes to `tensor`. Returns unordered positions of words that may have changed. Raises RuntimeError."""
        changed = [np.empty(0, np.int64)]
        for change in self:
            span, payload = change.span, np.frombuffer(change.payload, np.uint8)
            part = tensor[tuple(slice(*bounds) for bounds in span)]
            block = part.contiguous()
            words = _words(block)
            if payload.nbytes == words.nbytes:
                words[:] = payload.view(np.uint16)
                positions = np.arange(len(words))
            else:
                positions = decode(words, payload)
            changed.append(_in_whole(positions, span, tensor))
            if block is not part:
                part.copy_(block)
        return np.concatenate(changed)


class ShardDelta:
    """One rank's search for changes of its shards."""

    def __init__(self, rank: int, device: torch.device, targets: Sequence[int]):
        """Set the `targets`: for each of the manifest's tensors, the rank that sends it. `device`: NCCL's and HCCL's."""
        self._targets = targets
        self._own = [place for place, target in enumerate(targets) if target == rank]
        self._device = torch.device("cpu") if dist.get_backend() == "gloo" else device
        self._published: dict[tuple[int, Span], Words] = {}
        self._complete = True  # whether the last changes have come to their targets

    def find(self, shards: Iterable[Shard], current: bool) -> Iterator[TensorChanges] | None:
        """Return the changes of each tensor that this rank sends, in the manifest's order. Returns None on all ranks if whole
        tensors must be gathered: some rank's buckets or copy are not `current`, or more than half of its shards would travel.

        `shards`: all ranks together hold each tensor once. `current`: whether this rank's buckets hold the last gathering."""
        current, self._complete = current and self._complete, False
        found: list[ShardChange] = []
        total = moved = 0
        for shard in shards:
            span, words = tuple((part.start, part.stop) for part in shard.index), _words(shard.block)
            payload = self._changed((shard.place, span), words)
            current = current and payload is not None
            total += words.nbytes
            if payload is not None and payload.nbytes:
                found.append(ShardChange(shard.place, span, payload.data))
                moved += payload.nbytes
        exchanges = list(_exchanges(found))
        outdated, dense, count = self._most(not current, 2 * moved > total, len(exchanges))
        if outdated or dense:
            self._complete = True  # the targets get whole tensors
            return None
        changes = {place: TensorChanges() for place in self._own}
        for number in range(count):
            for change in self._exchange(exchanges[number] if number < len(exchanges) else []):
                changes[change.place].append(change)
        self._complete = True
        return iter(changes.values())

    def _changed(self, key: tuple[int, Span], words: Words) -> Bytes | None:
        """Keep a shard's `words`, and return the payload from the last ones to these; None without last ones."""
        before = self._published.get(key)
        if before is None:
            self._published[key] = words.copy()
            return None
        payload = encode(before, words)
        before[:] = words
        return before.view(np.uint8).copy() if payload is None else payload

    def _most(self, *numbers: int) -> list[int]:
        """Return the maximum over all ranks of each of `numbers`."""
        maxima = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        dist.all_reduce(maxima, dist.ReduceOp.MAX)
        return maxima.tolist()

    def _exchange(self, found: Sequence[ShardChange]) -> Iterator[ShardChange]:
        """Send each change to its tensor's target, and yield the changes for this rank."""
        messages: list[list[ShardChange]] = [[] for _ in range(dist.get_world_size())]
        for change in found:
            messages[self._targets[change.place]].append(change)
        encoder, packed, ends = msgpack.Encoder(), bytearray(), [0]
        for message in messages:
            encoder.encode_into(message, packed, -1)  # the payloads' only copy on the host
            ends.append(len(packed))
        sizes = np.diff(ends).tolist()
        sent_sizes = torch.tensor(sizes, device=self._device)
        received_sizes = torch.empty_like(sent_sizes)
        dist.all_to_all_single(received_sizes, sent_sizes)
        sent = torch.frombuffer(packed, dtype=torch.uint8).to(self._device)
        received = torch.empty(int(received_sizes.sum()), dtype=torch.uint8, device=self._device)
        dist.all_to_all_single(received, sent, received_sizes.tolist(), sizes)
        for message in received.cpu().split(received_sizes.tolist()):
            yield from msgpack.decode(message.numpy().data, type=list[ShardChange])


def _exchanges(found: Sequence[ShardChange]) -> Iterator[list[ShardChange]]:
    """Split `found` into parts of at most `EXCHANGE_BYTES`, or of a single change."""
    part: list[ShardChange] = []
    filled = 0
    for change in found:
        if part and filled + change.payload.nbytes > EXCHANGE_BYTES:
            yield part
            part, filled = [], 0
        part.append(change)
        filled += change.payload.nbytes
    if part:
        yield part


def _in_whole(positions: Positions, span: Span, tensor: torch.Tensor) -> Positions:
    """Map `positions` in the part `span` (rows or columns) of `tensor` to positions in the whole tensor."""
    scale = tensor.itemsize // 2
    row = tensor.numel() // tensor.shape[0] * scale  # words
    first, width = 0, row
    if len(span) == 2:
        column = row // tensor.shape[1]
        first, width = span[1][0] * column, (span[1][1] - span[1][0]) * column
    return (span[0][0] + positions // width) * row + first + positions % width


def _words(block: torch.Tensor) -> Words:
    """Return `block` as flat words of 16 bits, without a copy if `block` is contiguous in host memory."""
    return words_of(block.detach().cpu().contiguous().view(-1).view(torch.uint8))


Words = npt.NDArray[np.uint16]
Positions = npt.NDArray[np.int64]  # of words, from 0

FULL, DELTA = 0, 1
HEADER = struct.Struct("<BQ16s16s")  # kind, bytes of the payload, trailers of the version before and of this version
ENTRY_BYTES = 3
WIDEST = 255  # unchanged words that one byte can skip


def encode(old: Words, new: Words) -> npt.NDArray[np.uint8] | None:
    """Encode the change from `old` to `new`, both [words]: uint8 [3 · entries], the entries' new words, then their gaps.

    An entry's gap counts the words since the entry before. Entries with an unchanged word divide gaps of more than `WIDEST`
    words. Returns None if the result would not be smaller than `new`."""
    changed = old != new
    return None if ENTRY_BYTES * np.count_nonzero(changed) >= new.nbytes else entries(np.flatnonzero(changed), new)


def entries(changed: Positions, new: Words) -> npt.NDArray[np.uint8] | None:
    """Encode as `encode` does, for known positions of changed words: `changed`, ascending."""
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


def words_of(buffer: torch.Tensor) -> Words:
    """Return a bucket as words, without a copy. A bucket's size is even: its data are aligned, its trailer has 16 bytes."""
    array: Any = buffer.numpy()
    return array.view(np.uint16)  # type: ignore[no-any-return]


def _trailer(words: Words) -> bytes:
    return words[-TRAILER.size // 2 :].tobytes()


def _name(trailer: bytes) -> str:
    digest, packed = TRAILER.unpack(trailer)
    return f"version {PolicyVersion.unpack(packed)} (checksum {digest:016x})"


FULL_EVERY = 50  # of so many versions of an epoch one is sent whole


class DeltaLink(Link):
    """A link that sends deltas over `inner`, in one order: a bucket's header, its payload, then the next bucket's."""

    def __init__(self, inner: Link, full_every: int):
        """Wrap `inner`. Of an epoch's versions one of every `full_every` is sent whole, beginning with the first."""
        self._inner, self._full_every = inner, full_every
        self._last: dict[int, Words] = {}  # each bucket's last words; of a sender only where it was given no changes
        self._given: dict[int, Positions | None] = {}  # of `set_changed`
        self._sent: dict[int, tuple[int, bytes]] = {}  # by bucket: versions in this epoch, and the last version's trailer

    def set_changed(self, index: int, changed: Positions | None) -> None:
        """Set the words of bucket `index` that may have changed since its last send; None: any. Then no copy is kept."""
        self._given[index] = changed

    def encode(self, index: int, buffer: torch.Tensor) -> tuple[bytes, torch.Tensor]:
        """Return header and payload of the bucket `index` in `buffer`. The payload is `buffer` itself to send it whole."""
        new = words_of(buffer)
        count, before = self._sent.get(index, (0, b""))
        self._sent[index] = count + 1, _trailer(new)
        changes = self._changes(index, new, may=count % self._full_every > 0)
        if changes is None:
            return HEADER.pack(FULL, buffer.nbytes, bytes(TRAILER.size), _trailer(new)), buffer
        return HEADER.pack(DELTA, changes.nbytes, before, _trailer(new)), torch.from_numpy(changes)

    def _changes(self, index: int, new: Words, may: bool) -> npt.NDArray[np.uint8] | None:
        """Return a bucket's payload, or None to send it whole. `may`: whether a delta is allowed."""
        if index in self._given:
            self._last.pop(index, None)
            changed = self._given.pop(index)
            trailer = np.arange(len(new) - TRAILER.size // 2, len(new))
            return entries(np.concatenate([changed, trailer]), new) if may and changed is not None else None
        old = self._last.get(index)
        changes = encode(old, new) if may and old is not None else None
        self._keep(index, new)
        return changes

    def _keep(self, index: int, words: Words) -> None:
        if index in self._last:
            self._last[index][:] = words
        else:
            self._last[index] = words.copy()

    def send(self, index: int, buffer: torch.Tensor) -> Transfer:
        header, payload = self.encode(index, buffer)
        parts = [torch.frombuffer(bytearray(header), dtype=torch.uint8), *([payload] if len(payload) else [])]
        pending = [(self._inner.send(index, part), part) for part in parts]  # keeps the parts alive
        self.sent_bytes = self._inner.sent_bytes

        def wait(give_up: float) -> None:
            for transfer, _ in pending:
                transfer(give_up)

        return wait

    def receive(self, index: int, buffer: torch.Tensor) -> Transfer:
        """Post nothing before the transfer is waited for: only the header says which payload follows."""
        return partial(self._take, index, buffer)

    def _take(self, index: int, buffer: torch.Tensor, give_up: float) -> None:
        """Fill `buffer`. Raises RuntimeError for a delta that starts from another version, or leads to another."""
        header = torch.empty(HEADER.size, dtype=torch.uint8)
        self._inner.receive(index, header)(give_up)
        kind, nbytes, base, trailer = HEADER.unpack(header.numpy().tobytes())
        if kind == FULL:
            self._inner.receive(index, buffer)(give_up)
            self._keep(index, words_of(buffer))
            return
        old = self._last.get(index)
        if old is None or _trailer(old) != base:
            mine = "none" if old is None else _name(_trailer(old))
            raise RuntimeError(f"the delta of bucket {index} starts from {_name(base)}, and this member has {mine}")
        payload = torch.empty(min(nbytes, buffer.nbytes), dtype=torch.uint8)
        if nbytes:
            self._inner.receive(index, payload)(give_up)
        decode(old, payload.numpy())
        if _trailer(old) != trailer:
            raise RuntimeError(f"the delta of bucket {index} leads to {_name(_trailer(old))} instead of {_name(trailer)}")
        words_of(buffer)[:] = old

    def set_timeout(self, seconds: float) -> None:
        self._inner.set_timeout(seconds)

    def abort(self) -> None:
        self._inner.abort()
