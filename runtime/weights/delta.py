"""Encoding `delta`: of each bucket only what changed since the version before, without loss, over any transport.

A bucket is compared as words of 16 bits, bfloat16's elements, with what was sent before in this epoch. It travels as a header
and a payload: the whole bucket, or the changed words, then one byte each for the
unchanged words between them. A header names the version that a delta starts from and the one that it leads to, each with its
checksum, both of which every bucket's trailer holds: so deltas are a chain, and none is applied to other weights than its own.

Sender and receivers keep a copy of the last version: the model's size once more in host memory on both sides. A sender that is
told what changed (`shard_delta`) keeps none.
"""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from msgspec import Struct, msgpack

from runtime.errors import InvariantViolated, UserError
from runtime.types import PolicyVersion
from runtime.weights.group import Deferred, Link, Transfer, wait_until
from runtime.weights.plan import DTYPES, TRAILER, TensorSpec

# ---- Tensor files
#
# safetensors files, a part of a tensor at a time.
#
# The `safetensors` package writes a file from tensors that all lie in memory, and reads by mapping the file, whose pages
# then count as the process's. Here no more is held than what was asked for. The format: 8 bytes of length, a JSON header
# with dtype, shape and range of each tensor, then the tensors, without gaps.

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


# ---- Shard delta
#
# What changed of the policy, by shard: each rank compares its own part with what was published of it, and only changes
# travel.
#
# Below the gather, that is: no tensor is put together for it. What a rank that sends makes of its buckets is bit for bit
# what gathering whole tensors makes of them. Each rank keeps a copy of its shards as they were published, in the dtype on
# the wire and in host memory: a model's size over all ranks that hold the model once.
#
# All ranks make the same calls in the same order, each of which is a collective over torch's default group.

EXCHANGE_BYTES = 64 << 20  # that one rank sends at once; a single larger change counts as one

Bytes = npt.NDArray[np.uint8]
Span = tuple[tuple[int, int], ...]  # (first, last + 1) in each dimension that is cut, from the first dimension on


@dataclass(frozen=True)
class Shard:
    """A rank's part of a tensor."""

    place: int  # of the tensor, in the manifest
    index: tuple[slice, ...]
    block: torch.Tensor  # whole[index], in the dtype on the wire, on any device


class ShardChange(Struct, frozen=True, array_like=True):
    """What is told of a shard that changed; the payload follows."""

    place: int
    span: Span
    nbytes: int  # of the payload: as `delta.encode` has it, or as many as the shard has, then its words


class TensorChanges:
    """What changed of one tensor since it was published."""

    def __init__(self) -> None:
        self._parts: list[tuple[Span, Bytes]] = []

    def add(self, span: Span, payload: Bytes) -> None:
        self._parts.append((span, payload))

    def apply(self, tensor: torch.Tensor) -> Positions:
        """Bring `tensor`, whole and as it was published, up to date; returns which of its words may have changed, in no order.

        Raises RuntimeError for a payload that does not fit it.
        """
        changed = [np.empty(0, np.int64)]
        for span, payload in self._parts:
            part = tensor[tuple(slice(*bounds) for bounds in span)]
            block = part.contiguous()
            words = _words(block)
            if payload.nbytes == words.nbytes:
                words[:] = payload.view(np.uint16)
                places = np.arange(len(words))
            else:
                places = decode(words, payload)
            changed.append(_in_whole(places, span, tensor))
            if block is not part:
                part.copy_(block)
        return np.concatenate(changed)


class ShardDelta:
    """One rank's."""

    def __init__(self, rank: int, device: torch.device, targets: Sequence[int]):
        """`targets`: for each of the manifest's tensors, the rank that sends it. `device`: what NCCL and HCCL exchange from."""
        self._targets = targets
        self._own = [place for place, target in enumerate(targets) if target == rank]
        self._device = torch.device("cpu") if dist.get_backend() == "gloo" else device
        self._published: dict[tuple[int, Span], Words] = {}
        self._complete = True  # whether what was found the last time has come to its targets

    def find(self, shards: Iterable[Shard], current: bool) -> Iterator[TensorChanges] | None:
        """What changed of each tensor that this rank sends, in the manifest's order. None on all ranks where whole tensors have
        to be gathered: some rank's buckets or copy are not `current`, or more than half of its shards would travel.

        `shards`: all ranks' together are each tensor once. `current`: whether this rank's buckets hold what was gathered last.
        """
        current, self._complete = current and self._complete, False
        found: list[tuple[ShardChange, Bytes]] = []
        total = moved = 0
        for shard in shards:
            span, words = tuple((part.start, part.stop) for part in shard.index), _words(shard.block)
            payload = self._changed((shard.place, span), words)
            current = current and payload is not None
            total += words.nbytes
            if payload is not None and payload.nbytes:
                found.append((ShardChange(shard.place, span, payload.nbytes), payload))
                moved += payload.nbytes
        exchanges = list(_exchanges(found))
        outdated, dense, count = self._most(not current, 2 * moved > total, len(exchanges))
        if outdated or dense:
            self._complete = True  # whole tensors come to them
            return None
        changes = {place: TensorChanges() for place in self._own}
        for number in range(count):
            for change, payload in self._exchange(exchanges[number] if number < len(exchanges) else []):
                changes[change.place].add(change.span, payload)
        self._complete = True
        return iter(changes.values())

    def _changed(self, key: tuple[int, Span], words: Words) -> Bytes | None:
        """Publish a shard's `words`; the payload that leads to them, None where nothing was published before."""
        before = self._published.get(key)
        if before is None:
            self._published[key] = words.copy()
            return None
        payload = encode(before, words)
        before[:] = words
        return before.view(np.uint8).copy() if payload is None else payload

    def _most(self, *numbers: int) -> list[int]:
        """Each of `numbers`, as it is where it is greatest."""
        told = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        dist.all_reduce(told, dist.ReduceOp.MAX)
        return told.tolist()

    def _exchange(self, found: Sequence[tuple[ShardChange, Bytes]]) -> Iterator[tuple[ShardChange, Bytes]]:
        """Send each change to its tensor's target; what has this rank as its target."""
        messages: list[list[Bytes]] = []
        for target in range(dist.get_world_size()):
            there = [each for each in found if self._targets[each[0].place] == target]
            messages.append(_packed(there) if there else [])
        sizes = [sum(part.nbytes for part in message) for message in messages]
        told = torch.tensor(sizes, device=self._device)
        heard = torch.empty_like(told)
        dist.all_to_all_single(heard, told)
        parts = [np.empty(0, np.uint8), *(part for message in messages for part in message)]
        sent = torch.from_numpy(np.concatenate(parts)).to(self._device)
        received = torch.empty(int(heard.sum()), dtype=torch.uint8, device=self._device)
        dist.all_to_all_single(received, sent, heard.tolist(), sizes)
        for message in received.cpu().split(heard.tolist()):
            yield from _unpacked(message.numpy())


def _exchanges(found: Sequence[tuple[ShardChange, Bytes]]) -> Iterator[list[tuple[ShardChange, Bytes]]]:
    """`found` in parts of at most `EXCHANGE_BYTES`, or of one change."""
    part: list[tuple[ShardChange, Bytes]] = []
    filled = 0
    for change, payload in found:
        if part and filled + payload.nbytes > EXCHANGE_BYTES:
            yield part
            part, filled = [], 0
        part.append((change, payload))
        filled += payload.nbytes
    if part:
        yield part


def _packed(changes: Sequence[tuple[ShardChange, Bytes]]) -> list[Bytes]:
    """A message: the length of its table in 8 bytes, little-endian, the table, and the payloads."""
    table = msgpack.encode([change for change, _ in changes])
    head = len(table).to_bytes(8, "little") + table
    return [np.frombuffer(head, np.uint8), *(payload for _, payload in changes)]


def _unpacked(message: Bytes) -> Iterator[tuple[ShardChange, Bytes]]:
    if not len(message):
        return
    end = 8 + int.from_bytes(message[:8].tobytes(), "little")
    for change in msgpack.decode(message[8:end].tobytes(), type=list[ShardChange]):
        yield change, message[end : end + change.nbytes]
        end += change.nbytes


def _in_whole(places: Positions, span: Span, tensor: torch.Tensor) -> Positions:
    """Positions in the part `span` of `tensor`, rows or columns, as positions in the whole of it."""
    scale = tensor.itemsize // 2
    row = tensor.numel() // tensor.shape[0] * scale  # words
    first, width = 0, row
    if len(span) == 2:
        column = row // tensor.shape[1]
        first, width = span[1][0] * column, (span[1][1] - span[1][0]) * column
    return (span[0][0] + places // width) * row + first + places % width


def _words(block: torch.Tensor) -> Words:
    """`block` as words of 16 bits, flat; without a copy where it lies contiguous in host memory."""
    return words_of(block.detach().cpu().contiguous().view(-1).view(torch.uint8))


Words = npt.NDArray[np.uint16]
Positions = npt.NDArray[np.int64]  # of words, from 0 on

FULL, DELTA = 0, 1
HEADER = struct.Struct("<BQ16s16s")  # kind, bytes of the payload, trailers of the version before and of this one
ENTRY_BYTES = 3
WIDEST = 255  # unchanged words that one byte can leave out


def encode(old: Words, new: Words) -> npt.NDArray[np.uint8] | None:
    """What turns `old` into `new`, both [words]: uint8 [3 · entries], the entries' new words, then their gaps.

    An entry's gap counts the words since the entry before. Where more than `WIDEST` words are unchanged, entries that change
    nothing fill in. None where that would not be smaller than `new` is.
    """
    changed = old != new
    return None if ENTRY_BYTES * np.count_nonzero(changed) >= new.nbytes else entries(np.flatnonzero(changed), new)


def entries(changed: Positions, new: Words) -> npt.NDArray[np.uint8] | None:
    """As `encode`, where it is known which words may have changed: `changed`, ascending."""
    gaps = np.diff(changed, prepend=-1) - 1
    fillers = gaps // (WIDEST + 1)
    steps = np.full(len(gaps) + int(fillers.sum()), WIDEST, dtype=np.uint8)
    steps[np.cumsum(fillers + 1) - 1] = gaps % (WIDEST + 1)
    return np.concatenate([new[_positions(steps)].view(np.uint8), steps]) if ENTRY_BYTES * len(steps) < new.nbytes else None


def decode(words: Words, payload: npt.NDArray[np.uint8]) -> Positions:
    """Apply `payload` to `words` in place; returns which it names. Raises RuntimeError when it is none of these words."""
    count, odd = divmod(len(payload), ENTRY_BYTES)
    positions = _positions(payload[2 * count :])
    if odd or (count and positions[-1] >= len(words)):
        raise RuntimeError(f"a delta of {len(payload)} bytes does not fit {len(words)} words")
    words[positions] = payload[: 2 * count].view(np.uint16)
    return positions


def _positions(steps: npt.NDArray[np.uint8]) -> Positions:
    return np.cumsum(steps.astype(np.int64) + 1) - 1


def words_of(buffer: torch.Tensor) -> Words:
    """A bucket as words, without a copy. A bucket's size is even, its data being aligned and its trailer 16 bytes."""
    array: Any = buffer.numpy()
    return array.view(np.uint16)  # type: ignore[no-any-return]


def _trailer(words: Words) -> bytes:
    return words[-TRAILER.size // 2 :].tobytes()


def _name(trailer: bytes) -> str:
    digest, packed = TRAILER.unpack(trailer)
    return f"version {PolicyVersion.unpack(packed)} (checksum {digest:016x})"


class DeltaEncoder:
    """The sender's: what each bucket held in the version before, unless it is told what changed since."""

    def __init__(self, full_every: int):
        """`full_every`: of how many versions one is sent whole, the epoch's first being one."""
        self._full_every = full_every
        self._last: dict[int, Words] = {}
        self._told: dict[int, Positions | None] = {}
        self._sent: dict[int, tuple[int, bytes]] = {}  # by bucket: versions in this epoch, and the last one's trailer

    def tell(self, index: int, changed: Positions | None) -> None:
        """Which words of bucket `index` may have changed since it was sent last; None: any. No copy is kept of it then."""
        self._told[index] = changed

    def encode(self, index: int, buffer: torch.Tensor) -> tuple[bytes, npt.NDArray[np.uint8] | None]:
        """Header and payload of bucket `index`, which `buffer` holds with its trailer; None where it is to be sent whole."""
        new = words_of(buffer)
        count, before = self._sent.get(index, (0, b""))
        self._sent[index] = count + 1, _trailer(new)
        changes = self._changes(index, new, may=count % self._full_every > 0)
        if changes is None:
            return HEADER.pack(FULL, buffer.nbytes, bytes(TRAILER.size), _trailer(new)), None
        return HEADER.pack(DELTA, changes.nbytes, before, _trailer(new)), changes

    def _changes(self, index: int, new: Words, may: bool) -> npt.NDArray[np.uint8] | None:
        """The payload of a bucket that `may` be sent as one."""
        if index in self._told:
            self._last.pop(index, None)
            told = self._told.pop(index)
            trailer = np.arange(len(new) - TRAILER.size // 2, len(new))
            return entries(np.concatenate([told, trailer]), new) if may and told is not None else None
        old = self._last.get(index)
        changes = encode(old, new) if may and old is not None else None
        _keep(self._last, index, new)
        return changes


class DeltaDecoder:
    """A receiver's."""

    def __init__(self) -> None:
        self._last: dict[int, Words] = {}

    def keep(self, index: int, buffer: torch.Tensor) -> None:
        """Bucket `index` came whole."""
        _keep(self._last, index, words_of(buffer))

    def require(self, index: int, header: bytes) -> int:
        """Bytes of the payload; -1: the bucket comes whole. Raises RuntimeError for a delta of another version."""
        kind, nbytes, base, _ = HEADER.unpack(header)
        if kind == FULL:
            return -1
        old = self._last.get(index)
        if old is None or _trailer(old) != base:
            mine = "none" if old is None else _name(_trailer(old))
            raise RuntimeError(f"the delta of bucket {index} starts from {_name(base)}, and this member has {mine}")
        return int(nbytes)

    def apply(self, index: int, header: bytes, payload: npt.NDArray[np.uint8], buffer: torch.Tensor) -> None:
        """Fill `buffer` with the bucket. After `require`. Raises RuntimeError for a payload that leads to another version."""
        old, trailer = self._last[index], HEADER.unpack(header)[3]
        decode(old, payload)
        if _trailer(old) != trailer:
            raise RuntimeError(f"the delta of bucket {index} leads to {_name(_trailer(old))} instead of {_name(trailer)}")
        words_of(buffer)[:] = old


def _keep(last: dict[int, Words], index: int, words: Words) -> None:
    if index in last:
        last[index][:] = words
    else:
        last[index] = words.copy()


class DeltaLink(Link):
    """Over `inner`, on which all members keep one order: a bucket's header, its payload, then the next bucket's."""

    def __init__(self, inner: Link, full_every: int):
        """`full_every`: as `DeltaEncoder`."""
        self._inner = inner
        self._encoder = DeltaEncoder(full_every)
        self._decoder = DeltaDecoder()

    def tell(self, index: int, changed: Positions | None) -> None:
        self._encoder.tell(index, changed)

    def send(self, index: int, buffer: torch.Tensor) -> Transfer:
        header, changes = self._encoder.encode(index, buffer)
        parts = [self._send(index, np.frombuffer(header, np.uint8))]
        if changes is None:
            parts.append((self._inner.send(index, buffer), buffer))
        elif len(changes):
            parts.append(self._send(index, changes))
        self.sent_bytes = self._inner.sent_bytes

        def wait(timeout: float) -> None:
            give_up = time.monotonic() + timeout
            for part, _ in parts:  # with the memory that it leaves from
                wait_until(part, give_up)

        return Deferred(wait)

    def _send(self, index: int, part: npt.NDArray[np.uint8]) -> tuple[Transfer, torch.Tensor]:
        buffer = self._inner.buffer(len(part))
        np.copyto(buffer.numpy(), part)
        return self._inner.send(index, buffer), buffer

    def receive(self, index: int, buffer: torch.Tensor) -> Transfer:
        """Nothing is asked for before it is waited for: the header says what follows it."""
        return Deferred(self._take, index, buffer)

    def _take(self, index: int, buffer: torch.Tensor, timeout: float) -> None:
        give_up = time.monotonic() + timeout
        received = torch.empty(HEADER.size, dtype=torch.uint8)
        wait_until(self._inner.receive(index, received), give_up)
        header = received.numpy().tobytes()
        nbytes = self._decoder.require(index, header)
        if nbytes < 0:
            wait_until(self._inner.receive(index, buffer), give_up)
            self._decoder.keep(index, buffer)
            return
        payload = torch.empty(min(nbytes, buffer.nbytes), dtype=torch.uint8)
        if nbytes:
            wait_until(self._inner.receive(index, payload), give_up)
        self._decoder.apply(index, header, payload.numpy(), buffer)

    def bound(self, seconds: float) -> None:
        self._inner.bound(seconds)

    def abort(self) -> None:
        self._inner.abort()
