"""Bulk data of groups that does not pass through the coordinator: blobs, held by the agents of two nodes.

::

    rollout ── put ──► its node's agent ── the same put ──► the next node's agent
       │ the blob's name, in the group's payload
       ▼
    coordinator ── payload ──► trainer, reference ── read: some rows, some columns ──► one of the two agents

A blob is a matrix of bytes and never changes. Its name is a hash of its bytes. An agent keeps a blob until no step can train on
its group any more: `until` is the group's deadline (`coordinator.staleness`). If no agent holds a blob any more, its group is
generated again."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import xxhash
from msgspec import Struct

from runtime.errors import BlobLost, InvalidMessage, StorageFull
from runtime.types import Blob, Command, Holder

ADDRESS = "SLUICE_BLOBS"  # variable: the address of the node's agent, set by the agent
PIECE = 16 << 20  # bytes of one message at most
_RANGE = 2  # numbers of a range of rows: the first, and the end


class PutBlob(Command[list[Holder]], frozen=True, kw_only=True):
    """Keep a part of a blob of `size` bytes: `data`, from `offset` on. The answer names who holds the part."""

    digest: bytes
    size: int
    offset: int
    until: int  # the last step that may need it
    data: bytes
    copies: int = 2  # agents that are to hold it


class ReadBlob(Command[bytes], frozen=True, kw_only=True):
    """Return the columns `begin` to `end` of some rows of a blob whose rows have `width` bytes, row by row."""

    digest: bytes
    width: int
    begin: int
    end: int
    ranges: np.ndarray  # int64 [2 · n]: the first row of each range, and its end


def digest_of(data: bytes | memoryview) -> bytes:
    return xxhash.xxh3_128_digest(data)


class BlobPart(NamedTuple):
    """The columns `begin` to `end`, in bytes, of `rows` (int64 [n], ascending) of a blob."""

    blob: Blob
    begin: int
    end: int
    rows: np.ndarray


class Agents:
    """The agents around this process, from which other threads than the event loop's read blobs."""

    reader: Callable[[Sequence[BlobPart]], list[np.ndarray]] | None = None  # set as a service starts

    def read(self, parts: Sequence[BlobPart]) -> list[np.ndarray]:
        """Return each part's bytes, uint8 [n, end - begin]. Blocks. Raises BlobLost."""
        if not parts:
            return []
        if self.reader is None:
            raise BlobLost("agents", "read", f"no agent around this process holds blob {parts[0].blob.digest.hex()}")
        return self.reader(parts)


agents = Agents()


def ranges_of(rows: np.ndarray) -> np.ndarray:
    """Return the runs of neighbours among `rows` (int64 [n], ascending), as in ReadBlob."""
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    first, last = rows[np.append(0, breaks)], rows[np.append(breaks, len(rows)) - 1]
    return np.stack((first, last + 1), 1).ravel() if len(rows) else rows


class _Held(Struct):
    data: np.ndarray  # uint8
    missing: set[int]  # offsets of the pieces that have not come yet
    until: int


class BlobStore:
    """The blobs of one agent: in memory up to `most` bytes, beyond that in unnamed temporary files."""

    def __init__(self, most: int):
        self._most = most
        self._held: dict[bytes, _Held] = {}
        self._resident = 0  # bytes in memory
        self._expired = -1  # blobs until this step are not needed any more

    def put(self, part: PutBlob) -> None:
        """Keep a part. Raises InvalidMessage if it does not fit its blob or the whole has another hash; StorageFull."""
        held = self._held.get(part.digest)
        if held is not None and not held.missing:
            held.until = max(held.until, part.until)
            return
        begin, end, size = part.offset, part.offset + len(part.data), part.size
        if begin % PIECE or end != min(begin + PIECE, size) or (held is not None and held.data.nbytes != size):
            raise InvalidMessage(f"blob {part.digest.hex()}: bytes {begin} to {end} of {size} are no piece of it")
        if held is None:
            held = self._held[part.digest] = _Held(self._room(size), set(range(0, max(1, size), PIECE)), part.until)
        held.data[begin:end] = np.frombuffer(part.data, np.uint8)
        held.missing.discard(begin)
        if not held.missing and digest_of(held.data.data) != part.digest:
            self._forget(part.digest)
            raise InvalidMessage(f"blob {part.digest.hex()}: its bytes have another hash")

    def _room(self, size: int) -> np.ndarray:
        if self._resident + size <= self._most:
            self._resident += size
            return np.empty(size, np.uint8)
        with tempfile.TemporaryFile() as file:
            try:
                os.posix_fallocate(file.fileno(), 0, max(1, size))  # a write to a mapping without room would end the process
            except OSError as error:
                raise StorageFull(tempfile.gettempdir()) from error
            return np.frombuffer(mmap.mmap(file.fileno(), max(1, size)), np.uint8, size)

    def read(self, asked: ReadBlob) -> bytes:
        """Return what is asked for. Raises BlobLost if the blob is not held whole, InvalidMessage for rows that it lacks."""
        held = self._held.get(asked.digest)
        if held is None or held.missing:
            raise BlobLost("agent", "read", f"blob {asked.digest.hex()} is not here")
        bounds = asked.ranges.reshape(-1, _RANGE)
        fits = asked.width > 0 and held.data.nbytes % asked.width == 0 and 0 <= asked.begin <= asked.end <= asked.width
        if not fits or (len(bounds) and (bounds.min() < 0 or bounds.max() > held.data.nbytes // asked.width)):
            raise InvalidMessage(f"blob {asked.digest.hex()}: its {held.data.nbytes} bytes have no such rows and columns")
        table = held.data.reshape(-1, asked.width)[:, asked.begin : asked.end]
        return b"".join(table[first:end].tobytes() for first, end in bounds.tolist())

    def expire(self, step: int) -> None:
        """Forget the blobs that no step from `step` on needs."""
        if step - 1 > self._expired:
            self._expired = step - 1
            for digest in [digest for digest, held in self._held.items() if held.until < step]:
                self._forget(digest)

    def clear(self) -> None:
        self._held, self._resident, self._expired = {}, 0, -1

    def _forget(self, digest: bytes) -> None:
        data = self._held.pop(digest).data
        self._resident -= data.nbytes * data.flags.owndata


def pieces(data: bytes, until: int, digest: bytes) -> list[PutBlob]:
    """Return the messages that put `data`."""
    cuts = range(0, max(1, len(data)), PIECE)
    return [
        PutBlob(digest=digest, size=len(data), offset=begin, until=until, data=data[begin : begin + PIECE]) for begin in cuts
    ]
