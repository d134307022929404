"""From shard to shard: how the ranks of a trainer would send the ranks of a rollout their parts, without whole tensors.

`plan` is pure: from what each rank holds and what each rank needs it makes the list of transfers, in which every byte that is
needed is sent once, by the holder that has least to send so far. `SliceExchange` carries it out over a gloo process group, each
transfer with a tag as a bucket has it (`authentication.BucketTags`).

No run does this (ADR 17 says why); the bench `slices` counts what it would save, and tests prove it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from runtime.errors import ServiceFault
from runtime.models.families import Family, Layout, Parameter
from runtime.types import PolicyVersion
from runtime.weights.group import BucketTags
from runtime.weights.plan import TRAILER, Bucket

Bounds = tuple[tuple[int, int], ...]  # (first, last + 1) in every dimension of the whole tensor
Parts = Mapping[str, Bounds]  # of one rank: the part of each tensor that it holds, or needs


@dataclass(frozen=True)
class SliceTransfer:
    """A part of a tensor that goes from one rank to another: `bounds` in the whole, within `held` and within `needed`."""

    source: int
    target: int
    tensor: str
    bounds: Bounds
    held: Bounds
    needed: Bounds

    @property
    def elements(self) -> int:
        return size(self.bounds)

    @property
    def source_slice(self) -> tuple[slice, ...]:
        """Of what `source` holds of the tensor."""
        return _within(self.bounds, self.held)

    @property
    def target_slice(self) -> tuple[slice, ...]:
        """Of what `target` needs of it."""
        return _within(self.bounds, self.needed)


def size(bounds: Bounds) -> int:
    """How many elements lie within."""
    return math.prod(last - first for first, last in bounds)


def _within(bounds: Bounds, outer: Bounds) -> tuple[slice, ...]:
    return tuple(slice(first - start, last - start) for (first, last), (start, _) in zip(bounds, outer, strict=True))


def parts(family: Family, layout: Layout) -> list[Parts]:
    """What each rank of `layout` holds of the Hugging Face tensors: expert ranks of pipeline stages of tensor ranks.

    Padding is not among it; copies of tied embeddings are.
    """
    return [
        {name: bounds for each in parameters for name, bounds in _held(each)}
        for parameters in parameters_of(family, layout)
        if parameters
    ]


def parameters_of(family: Family, layout: Layout) -> Iterator[list[Parameter]]:
    """The parameters of each rank of `layout`, tensor ranks first, expert ranks last."""
    for expert in range(layout.expert):
        for stage in range(layout.pipeline):
            for rank in range(layout.tensor):
                yield family.parameters(layout, tensor_rank=rank, pipeline_rank=stage, expert_rank=expert)


def _held(parameter: Parameter) -> Iterator[tuple[str, Bounds]]:
    for source, index, _ in parameter.blocks(torch.empty(parameter.shape, device="meta")):
        cut = [(part.start, part.stop) for part in index]
        bounds = (*cut, *((0, length) for length in source.shape[len(cut) :]))
        if size(bounds):
            yield source.name, bounds


def plan(held: Sequence[Parts], needed: Sequence[Parts]) -> list[SliceTransfer]:
    """The transfers: every element of `needed` once, from one of the ranks that hold it. Everybody makes the same list.

    The largest are given out first, each to the holder with the fewest elements so far. Sources are numbered as in `held`,
    targets as in `needed`. The parts that are held of a tensor must not overlap unless they are the same. Raises KeyError for
    a tensor that nobody holds, ValueError for one of which a part is missing.
    """
    holders: dict[str, dict[Bounds, list[int]]] = {}
    for source, mine in enumerate(held):
        for tensor, bounds in mine.items():
            holders.setdefault(tensor, {}).setdefault(bounds, []).append(source)
    wanted = []
    for target, its in enumerate(needed):
        for tensor, need in its.items():
            found = [(common, part) for part in holders[tensor] if (common := _common(part, need))]
            if sum(size(common) for common, _ in found) != size(need):
                raise ValueError(f"{tensor}: of {need} a part is held by nobody")
            wanted += [(target, tensor, common, part, need) for common, part in found]
    loads = [0] * len(held)
    chosen = []
    for target, tensor, common, part, need in sorted(wanted, key=lambda each: -size(each[2])):
        source = min(holders[tensor][part], key=lambda each: (loads[each], each))
        loads[source] += size(common)
        chosen.append(SliceTransfer(source, target, tensor, common, part, need))
    return sorted(chosen, key=lambda each: (each.target, each.source))


def _common(one: Bounds, other: Bounds) -> Bounds | None:
    found = tuple((max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(one, other, strict=True))
    return found if all(first < last for first, last in found) else None


# ----------------------------------------------------------------------------------------------------------------------
# Over a process group: rank `source` of the plan is rank `source`, target `target` the rank behind all sources.


class SliceExchange:
    """One member's part in the transfers of `plan`; all members are made with the same."""

    def __init__(self, group: Any, transfers: Sequence[SliceTransfer], sources: int, key: bytes, name: str):
        """`group`: a ProcessGroupGloo of the `sources` and the targets. `name` is this member's, for messages."""
        self._group = group
        self._transfers = list(enumerate(transfers))
        self._sources = sources
        self._tags = BucketTags(key)
        self._name = name
        self.sent_bytes = 0
        """Trailers included."""

    def send(self, source: int, blocks: Mapping[str, torch.Tensor], version: PolicyVersion) -> None:
        """Send what source `source` has to, out of its `blocks`: by name the part of each tensor that it holds."""
        under_way = []
        for number, each in self._transfers:
            if each.source != source:
                continue
            part = blocks[each.tensor][each.source_slice].contiguous().view(-1).view(torch.uint8)
            buffer = torch.empty(part.numel() + TRAILER.size, dtype=torch.uint8)
            buffer[: part.numel()] = part
            self._tags.stamp(number, Bucket((), part.numel()), buffer, version)
            under_way.append((self._group.send([buffer], self._sources + each.target, number), buffer))
            self.sent_bytes += buffer.numel()
        for work, _ in under_way:
            work.wait()

    def receive(self, target: int, blocks: Mapping[str, torch.Tensor], version: PolicyVersion) -> None:
        """Fill `blocks` of target `target`: by name the part of each tensor that it needs. Raises ServiceFault, phase "verify",
        naming the first part that is not what was sent as part of `version`."""
        mine = [(number, each) for number, each in self._transfers if each.target == target]
        for source, group in groupby(mine, key=lambda item: item[1].source):
            for number, each in group:
                part = blocks[each.tensor][each.target_slice]
                nbytes = part.numel() * part.itemsize
                buffer = torch.empty(nbytes + TRAILER.size, dtype=torch.uint8)
                self._group.recv([buffer], source, number).wait()
                _, packed = TRAILER.unpack_from(buffer.numpy().data, nbytes)
                if packed != version.pack() or not self._tags.verify(number, Bucket((), nbytes), buffer):
                    message = f"{each.tensor} {each.bounds} of rank {source}: the checksum is not that of version {version}"
                    raise ServiceFault(self._name, "verify", message)
                part.copy_(buffer[:nbytes].view(part.dtype).view(part.shape))
