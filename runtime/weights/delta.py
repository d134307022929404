"""Encoding `delta`: of each bucket only what changed since the version before, without loss, over any transport.

A bucket is compared as words of 16 bits, bfloat16's elements, with what was sent before in this epoch. It travels as a header
and a payload: the whole bucket, or the changed words, then one byte each for the
unchanged words between them. A header names the version that a delta starts from and the one that it leads to, each with its
checksum, both of which every bucket's trailer holds: so deltas are a chain, and none is applied to other weights than its own.

Sender and receivers keep a copy of the last version: the model's size once more in host memory on both sides. A sender that is
told what changed (`shard_delta`) keeps none.
"""

from __future__ import annotations

import struct
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from runtime.types import PolicyVersion
from runtime.weights.group import Deferred, Link, Transfer
from runtime.weights.plan import TRAILER
from runtime.weights.sender import wait_until

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
