"""What changed of the policy, by shard: each rank compares its own part with what was published of it, and only changes travel.

Below the gather, that is: no tensor is put together for it. What a rank that sends makes of its buckets is bit for bit what
gathering whole tensors makes of them. Each rank keeps a copy of its shards as they were published, in the dtype on the wire
and in host memory: a model's size over all ranks that hold the model once.

All ranks make the same calls in the same order, each of which is a collective over torch's default group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from msgspec import Struct, msgpack

from runtime.weights.delta import Positions, Words, decode, encode, words_of

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
