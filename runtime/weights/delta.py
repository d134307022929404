"""Transport `delta`: of each bucket only what changed since the version before, without loss, for slow links between sites.

A bucket is compared as words of 16 bits, bfloat16's elements, with what was sent before in this epoch. It travels as a header
and a payload, each a broadcast of the link beneath: the whole bucket, or the changed words, then one byte each for the
unchanged words between them. A header names the version that a delta starts from and the one that it leads to, each with its
checksum, both of which every bucket's trailer holds: so deltas are a chain, and none is applied to other weights than its own.

Sender and receivers keep a copy of the last version: the model's size once more in host memory on both sides.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from runtime.types import PolicyVersion
from runtime.weights import collective
from runtime.weights.link import Link, Transfer
from runtime.weights.plan import TRAILER, GroupAddress
from runtime.weights.sender import wait_until

Words = npt.NDArray[np.uint16]

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
    if ENTRY_BYTES * np.count_nonzero(changed) >= new.nbytes:
        return None
    gaps = np.diff(np.flatnonzero(changed), prepend=-1) - 1
    fillers = gaps // (WIDEST + 1)
    steps = np.full(len(gaps) + int(fillers.sum()), WIDEST, dtype=np.uint8)
    steps[np.cumsum(fillers + 1) - 1] = gaps % (WIDEST + 1)
    return np.concatenate([new[_positions(steps)].view(np.uint8), steps]) if ENTRY_BYTES * len(steps) < new.nbytes else None


def decode(words: Words, payload: npt.NDArray[np.uint8]) -> None:
    """Apply `payload` to `words` in place. Raises RuntimeError when it is none of these words."""
    entries, odd = divmod(len(payload), ENTRY_BYTES)
    positions = _positions(payload[2 * entries :])
    if odd or (entries and positions[-1] >= len(words)):
        raise RuntimeError(f"a delta of {len(payload)} bytes does not fit {len(words)} words")
    words[positions] = payload[: 2 * entries].view(np.uint16)


def _positions(steps: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
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


class _Sending:
    """The broadcasts of one bucket, which are all under way."""

    def __init__(self, parts: list[Transfer]):
        self._parts = parts

    def wait(self, timeout: float) -> None:
        give_up = time.monotonic() + timeout
        for part in self._parts:
            wait_until(part, give_up)


class _Receiving:
    """One bucket, of which nothing is asked for before `wait`: the header says what follows it."""

    def __init__(self, link: DeltaLink, index: int, buffer: torch.Tensor):
        self._link, self._index, self._buffer = link, index, buffer

    def wait(self, timeout: float) -> None:
        self._link.take(self._index, self._buffer, time.monotonic() + timeout)


class DeltaLink(Link):
    """Over `inner`. Broadcasts keep one order on all members: a bucket's header, its payload, then the next bucket's."""

    def __init__(self, inner: Link, full_every: int):
        """`full_every`: of how many versions one is sent whole, the epoch's first being one."""
        self._inner = inner
        self._full_every = full_every
        self._last: dict[int, Words] = {}  # by bucket: a copy of the version before
        self._sent: dict[int, int] = {}  # by bucket: versions in this epoch

    def send(self, index: int, buffer: torch.Tensor) -> Transfer:
        new, old = words_of(buffer), self._last.get(index)
        count = self._sent.get(index, 0)
        kind, payload, base = FULL, buffer, bytes(TRAILER.size)
        if old is not None and count % self._full_every:
            changes = encode(old, new)
            if changes is not None:
                kind, payload, base = DELTA, torch.from_numpy(changes), _trailer(old)
        self._keep(index, new)
        self._sent[index] = count + 1
        header = bytearray(HEADER.pack(kind, payload.nbytes, base, _trailer(new)))
        parts = [self._inner.send(index, torch.frombuffer(header, dtype=torch.uint8))]
        if payload.nbytes:
            parts.append(self._inner.send(index, payload))
        self.sent_bytes = self._inner.sent_bytes
        return _Sending(parts)

    def receive(self, index: int, buffer: torch.Tensor) -> Transfer:
        return _Receiving(self, index, buffer)

    def take(self, index: int, buffer: torch.Tensor, give_up: float) -> None:
        """Fill `buffer` with bucket `index` until the monotonic time `give_up`. Raises RuntimeError."""
        header = torch.empty(HEADER.size, dtype=torch.uint8)
        wait_until(self._inner.receive(index, header), give_up)
        kind, nbytes, base, trailer = HEADER.unpack(header.numpy().data)
        new, old = words_of(buffer), self._last.get(index)
        if kind == FULL:
            wait_until(self._inner.receive(index, buffer), give_up)
            self._keep(index, new)
            return
        if old is None or _trailer(old) != base:
            mine = "none" if old is None else _name(_trailer(old))
            raise RuntimeError(f"the delta of bucket {index} starts from {_name(base)}, and this member has {mine}")
        payload = torch.empty(min(nbytes, buffer.nbytes), dtype=torch.uint8)
        if nbytes:
            wait_until(self._inner.receive(index, payload), give_up)
        decode(old, payload.numpy())
        if _trailer(old) != trailer:
            raise RuntimeError(f"the delta of bucket {index} leads to {_name(_trailer(old))} instead of {_name(trailer)}")
        new[:] = old

    def bound(self, seconds: float) -> None:
        self._inner.bound(seconds)

    def abort(self) -> None:
        self._inner.abort()

    def _keep(self, index: int, words: Words) -> None:
        if index in self._last:
            self._last[index][:] = words
        else:
            self._last[index] = words.copy()


def connect(store: Any, address: GroupAddress, labels: Sequence[str], name: str, interface: str) -> Link:
    """Blocks until everybody is connected. Raises ServiceFault, phase "rendezvous"."""
    return DeltaLink(collective.connect(store, address, labels, name, interface), address.full_every)
