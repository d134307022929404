"""The weight sync plan: which sender sends which part of each tensor in which bucket, which worker of a rollout takes it, and
over which hops it gets there. Pure; all members derive the same plan from the manifest and the group's address.

A bucket is a flat uint8 buffer of one sender: piece after piece, each aligned to 64 bytes. A piece is a part of one tensor. A
rollout keeps the whole tensors in an arena, one after the other, each aligned to 64 bytes. Its workers share the arena, so a
part that several workers need arrives once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, zip_longest
from typing import NamedTuple

from msgspec import Struct

from runtime.errors import InvalidMessage, UserError

ALIGNMENT = 64
LEAST_BYTES = 64 << 10  # of a bucket or a piece that is made smaller to even out the loads

# A bucket of parts of tensors has at most this share of what a receiver gets, or else `LEAST_SLOT` bytes: a receiver has up to
# nine buffers for such buckets (`receiver.SLOTS`), together a twentieth of what it gets.
SLOT_SHARE = 200
LEAST_SLOT = 1 << 20

DTYPES = {  # by torch's name: bytes of an item, and safetensors' name
    "float64": (8, "F64"),
    "float32": (4, "F32"),
    "bfloat16": (2, "BF16"),
    "float16": (2, "F16"),
    "float8_e4m3fn": (1, "F8_E4M3"),
    "float8_e5m2": (1, "F8_E5M2"),
    "int64": (8, "I64"),
    "int32": (4, "I32"),
    "int16": (2, "I16"),
    "int8": (1, "I8"),
    "uint8": (1, "U8"),
    "bool": (1, "BOOL"),
}
ITEM_BYTES = {name: size for name, (size, _) in DTYPES.items()}

Span = tuple[tuple[int, int], ...]  # (begin, end) in the first dimensions; whole in the others, so () is the whole tensor
_Part = tuple[int, Span, int]  # tensor, span, bytes
_Group = tuple[tuple[int, ...], tuple[int, ...]]  # parts of the same holders and the same workers


class TensorSpec(Struct, frozen=True, array_like=True):
    """One whole tensor in Hugging Face layout."""

    name: str
    dtype: str  # torch's name: "float32", "bfloat16"
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The tensor's size in bytes. Raises InvalidMessage for a dtype that is not in `ITEM_BYTES`."""
        if self.dtype not in ITEM_BYTES:
            raise InvalidMessage(f"tensor {self.name}: dtype {self.dtype!r} is not one of {', '.join(ITEM_BYTES)}")
        return self.row_bytes(0)

    def row_bytes(self, dims: int) -> int:
        """Return the bytes of one element of the first `dims` dimensions."""
        return ITEM_BYTES[self.dtype] * math.prod(self.shape[dims:])


class Cut(Struct, frozen=True, array_like=True):
    """The layout of a tensor over some members: parts of `size` along `dim`, which is 0 or 1; the last part may be smaller."""

    holders: tuple[tuple[int, ...], ...] = ((0,),)  # of each part, the members that hold it
    dim: int = 0
    size: int = 0  # 0: one part, the whole tensor


class Sharding(Struct, frozen=True, array_like=True):
    """The layout of all tensors over `members`: the senders, or the workers of a rollout."""

    members: int = 1
    cuts: tuple[Cut, ...] = (Cut(),)
    cut_of: tuple[int, ...] = ()  # of each tensor, the index of its cut; (): all have the first

    @classmethod
    def of(cls, members: int, cuts: Sequence[Cut]) -> Sharding:
        """Return the layout in which each tensor has its own of `cuts`."""
        number = {cut: index for index, cut in enumerate(dict.fromkeys(cuts))}
        return cls(members, tuple(number), tuple(number[cut] for cut in cuts))

    @classmethod
    def whole(cls, members: int) -> Sharding:
        """Return the layout in which every member has every whole tensor."""
        return cls(members, (Cut((tuple(range(members)),)),))

    def number(self, tensor: int) -> int:
        return self.cut_of[tensor] if self.cut_of else 0

    def cut(self, tensor: int) -> Cut:
        return self.cuts[self.number(tensor)]

    def shown(self, tensor: int) -> str:
        """Return the layout of a tensor for messages."""
        cut = self.cut(tensor)
        return f"{len(cut.holders)} parts of {cut.size} in dimension {cut.dim}" if cut.size else "whole"


class Manifest(Struct, frozen=True):
    """The tensors of a weight sync, their layouts, and the bucket size. Sent once per epoch."""

    tensors: tuple[TensorSpec, ...]
    bucket_bytes: int
    source: Sharding = Sharding()  # over the senders, which hold their parts
    target: Sharding = Sharding()  # over the workers of each rollout, which need their parts
    window_bytes: int = 0  # of the tensors that travel, and are staged, together; 0: all
    base: str = ""  # for adapters: the fingerprint of their base weights


class GroupAddress(Struct, frozen=True, kw_only=True):
    """The meeting point of one epoch's members. The first ranks send, the other ranks receive. Rank 0 leads."""

    epoch: int
    world_size: int
    backend: str
    timeout: float  # of the rendezvous, in seconds
    host: str = ""  # host, port and key are empty until rank 0 hosts the group
    port: int = 0
    key: bytes = b""  # of the group
    rank: int = 0
    full_every: int = 0  # of encoding delta; 0: every version is whole
    names: tuple[str, ...] = ()  # of the senders, then of the rollouts' processes; (): unknown
    machines: tuple[str, ...] = ()  # in the same order, as `shared_machines` returns them; (): all ""
    senders: int = 1  # as in the manifest
    workers: int = 1  # of each rollout's process, as in the manifest; the ranks of its workers follow each other

    def __repr__(self) -> str:
        """Leave out the key: no log may hold the key."""
        return f"GroupAddress({self.label(self.rank)} of epoch {self.epoch} at {self.host}:{self.port})"

    def label(self, rank: int) -> str:
        """Return a member's name for messages: "rank 2 (rollout-1)", "rank 3 (rollout-1 worker 1)"."""
        rollout, worker = divmod(rank - self.senders, self.workers)
        place, which = (rank, "") if rank < self.senders else (self.senders + rollout, f" worker {worker}")
        shown = f"{self.names[place]}{which if self.workers > 1 else ''}" if place < len(self.names) else ""
        return f"rank {rank}" + (f" ({shown})" if shown else "")


# ---- Buckets


class Piece(Struct, frozen=True, gc=False):  # there may be millions
    """A part of a tensor in a bucket. `tensor` indexes `Manifest.tensors`; `offset` and `nbytes` lie within the bucket."""

    tensor: int
    span: Span
    offset: int
    nbytes: int


class Bucket(NamedTuple):
    """The layout of one bucket. `nbytes` is a multiple of `ALIGNMENT`. `root`: the bucket's sender. `taker`: of each rollout's
    workers, the one that receives the bucket. `window`: the bucket's, as an index of `windows`."""

    pieces: tuple[Piece, ...]
    nbytes: int
    root: int = 0
    taker: int = 0
    window: int = 0


@lru_cache(maxsize=2)  # the plans of one epoch's manifest, and of a newcomer's
def plan_buckets(manifest: Manifest) -> tuple[Bucket, ...]:
    """Return the buckets in the order in which receivers take them. Each element lies in one bucket, of a sender that holds it,
    for a worker that needs it. Tensors come in the order of `windows`. A bucket has at most `bucket_bytes`, or else the fewest
    rows that are aligned. No sender has more than 1.1 times its fair part and `LEAST_BYTES`, unless its tensors have larger
    rows, or fewer senders hold more; the same holds for workers.

    Raises UserError as `windows`; InvalidMessage for an unknown dtype, a repeated name, an unfit layout, or a count below 1."""
    _check(manifest)
    return tuple(bucket for number, tensors in enumerate(windows(manifest)) for bucket in _buckets(manifest, number, tensors))


def windows(manifest: Manifest) -> list[list[int]]:
    """Return the tensors of each window: those of the whole manifest, as `in_order`, or consecutive ones that fill at most
    `window_bytes` together. Raises UserError if one alone is larger."""
    if not manifest.window_bytes:
        return [in_order(manifest.tensors)]
    found, filled = [list[int]()], 0
    for index, spec in enumerate(manifest.tensors):
        size = aligned(spec.nbytes)
        if size > manifest.window_bytes:
            given, least = 2 * manifest.window_bytes, f"{2 * size}, twice {spec.name}"
            raise UserError(f"weight_sync.staging_bytes: {given}; must be 0 or at least {least}")
        if filled + size > manifest.window_bytes:
            found.append([])
            filled = 0
        found[-1].append(index)
        filled += size
    return found


def _buckets(manifest: Manifest, window: int, tensors: Sequence[int]) -> Iterator[Bucket]:
    of_groups = _groups(manifest, tensors)
    loads, takes = [0] * manifest.source.members, [0] * manifest.target.members
    slot = sum(manifest.tensors[index].nbytes for index in tensors) // manifest.target.members // SLOT_SHARE
    paced: list[tuple[float, int, Bucket]] = []
    # Parts with few holders come first: the others even out what these leave uneven.
    for number, (holders, workers) in enumerate(sorted(of_groups, key=lambda group: (*map(len, group), group))):
        of_group = of_groups.pop((holders, workers))
        total = sum(aligned(nbytes) for _, _, nbytes in of_group)
        most, before, choices = manifest.bucket_bytes, 0, max(len(holders), len(workers))
        if choices > 1:  # each gets ten buckets or more: then their loads differ by a tenth at most
            most = min(most, max(LEAST_BYTES, total // (10 * choices)))
        if any(span for _, span, _ in of_group):  # such a bucket does not lie in the arena in one run
            most = min(most, max(LEAST_SLOT, slot))
        for pieces, nbytes in _fill(manifest, of_group, max(most // ALIGNMENT, 1) * ALIGNMENT):
            root = min(holders, key=lambda holder: (loads[holder], holder))
            taker = min(workers, key=lambda worker: (takes[worker], worker))
            loads[root] += nbytes
            takes[taker] += nbytes
            # All senders progress evenly, as receivers take a few buckets at a time.
            paced.append((before / total, number, Bucket(pieces, nbytes, root, taker, window)))
            before += nbytes
    yield from (bucket for _, _, bucket in sorted(paced, key=lambda item: item[:2]))


def _groups(manifest: Manifest, tensors: Sequence[int]) -> dict[_Group, list[_Part]]:
    """Return the parts of `tensors` by their holders and the workers that need them."""
    found: dict[_Group, list[_Part]] = {}
    same: dict[tuple[str, tuple[int, ...], int, int], list[tuple[Span, int, list[_Part]]]] = {}  # many are cut alike
    source, target = manifest.source, manifest.target
    for index in tensors:
        spec = manifest.tensors[index]
        kind = (spec.dtype, spec.shape, source.number(index), target.number(index))
        if kind not in same:
            crossed = crossings(spec, source.cuts[kind[2]], target.cuts[kind[3]])
            same[kind] = [(span, bytes_of(spec, span), found.setdefault(group, [])) for span, group in crossed]
        for span, nbytes, of_group in same[kind]:
            of_group.append((index, span, nbytes))
    return found


def name_of(manifest: Manifest, index: int) -> str:
    """Return bucket `index` and its first tensor, for messages."""
    buckets = plan_buckets(manifest)
    first, *others = dict.fromkeys(manifest.tensors[piece.tensor].name for piece in buckets[index].pieces)
    return f"bucket {index} of {len(buckets)} ({first}{f' and {len(others)} more' if others else ''})"


def in_order(tensors: Sequence[TensorSpec]) -> list[int]:
    """Return the indices of `tensors`: matrices first. So no bias or norm lies between the matrices of query, key and value."""
    return sorted(range(len(tensors)), key=lambda index: len(tensors[index].shape) < 2)


def crossings(spec: TensorSpec, source: Cut, target: Cut) -> Iterator[tuple[Span, _Group]]:
    """Yield the parts of a tensor that have the same holders and the same workers. A holder's part that would fall into pieces
    below `LEAST_BYTES` stays whole, for any of its workers."""
    needs = list(parts(spec, target))
    for held, holders in parts(spec, source):
        pieces = [(span, workers) for part, workers in needs if (span := _common(spec, held, part)) is not None]
        if len(pieces) > 1 and any(bytes_of(spec, span) < LEAST_BYTES for span, _ in pieces):
            pieces = [(held, tuple(sorted({worker for _, workers in pieces for worker in workers})))]
        for span, workers in pieces:
            yield span, (holders, workers)


def parts(spec: TensorSpec, cut: Cut) -> Iterator[tuple[Span, tuple[int, ...]]]:
    """Yield the parts of a tensor, without empty ones, and the holders of each."""
    if not spec.nbytes:
        return
    if not cut.size:
        yield (), cut.holders[0]
        return
    length = spec.shape[cut.dim]
    for begin, holders in zip(range(0, length, cut.size), cut.holders, strict=False):  # the last parts may be empty
        held = (begin, min(begin + cut.size, length))
        yield (held,) if cut.dim == 0 else ((0, spec.shape[0]), held), holders


def _common(spec: TensorSpec, one: Span, other: Span) -> Span | None:
    """Return the common part of two parts of a tensor, or None."""
    if not one or not other:
        return one or other
    pairs = zip_longest(one, other, fillvalue=(0, spec.shape[1] if len(spec.shape) > 1 else 1))
    span = tuple((max(first, begin), min(last, end)) for (first, last), (begin, end) in pairs)
    return span if all(begin < end for begin, end in span) else None


def arena_offsets(tensors: Sequence[TensorSpec], order: Sequence[int] | None = None) -> tuple[dict[int, int], int]:
    """Return the first byte of each tensor in an arena, by index and in order, and the arena's size in bytes. `order`: of those
    that the arena holds; None: all, as `in_order`."""
    order = in_order(tensors) if order is None else order
    ends = list(accumulate(aligned(tensors[index].nbytes) for index in order))
    return dict(zip(order, [0, *ends], strict=False)), ends[-1] if ends else 0


def run_of(manifest: Manifest, bucket: Bucket, offsets: Mapping[int, int]) -> int | None:
    """Return where `bucket` as a whole lies in the arena of `offsets`, or None if it does not lie there in one run."""
    begins = set()
    for each in bucket.pieces:
        spec = manifest.tensors[each.tensor]
        begin = sum(start * spec.row_bytes(dims) for dims, (start, _) in enumerate(each.span, 1))
        end = begin + each.nbytes
        in_rows = len(each.span) < 2 or each.span[1] == (0, spec.shape[1]) or each.span[0][1] - each.span[0][0] == 1
        overwrites = end % ALIGNMENT and end < spec.nbytes  # with the padding after it
        if not in_rows or overwrites:
            return None
        begins.add(offsets[each.tensor] + begin - each.offset)
    found = begins.pop()
    return found if not begins and found % ALIGNMENT == 0 else None


def bytes_of(spec: TensorSpec, span: Span) -> int:
    return math.prod(end - begin for begin, end in span) * spec.row_bytes(len(span))


def _check(manifest: Manifest) -> None:
    sides = {"senders": manifest.source, "workers": manifest.target}
    for name, value in (("bucket_bytes", manifest.bucket_bytes), *((name, side.members) for name, side in sides.items())):
        if value < 1:
            raise InvalidMessage(f"{name} is {value}, must be at least 1")
    for name, side in sides.items():
        if len(side.cut_of) not in (0, len(manifest.tensors)):
            raise InvalidMessage(f"cut_of of the {name} names {len(side.cut_of)} cuts for {len(manifest.tensors)} tensors")
    names: set[str] = set()
    for index, spec in enumerate(manifest.tensors):
        if spec.name in names:
            raise InvalidMessage(f"tensor {spec.name} occurs twice in the manifest")
        names.add(spec.name)
        for name, side in sides.items():
            if not 0 <= side.number(index) < len(side.cuts):
                raise InvalidMessage(f"tensor {spec.name} has cut {side.number(index)} of {len(side.cuts)} over the {name}")
        if faults := [fault for name, side in sides.items() if (fault := _misfit(spec, side, side.cut(index), name))]:
            shown = ", ".join(f"{name} {side.shown(index)}" for name, side in sides.items())
            raise InvalidMessage(f"tensor {spec.name} of {list(spec.shape)} {faults[0]}; its layouts: {shown}")


def _misfit(spec: TensorSpec, side: Sharding, cut: Cut, name: str) -> str | None:
    """Return what is wrong with the layout of a tensor over the members `name`."""
    whole = cut.size == 0 and cut.holders
    in_parts = 0 <= cut.dim < min(2, len(spec.shape)) and cut.size * len(cut.holders) >= spec.shape[cut.dim]
    if spec.nbytes and not (whole or in_parts):  # an empty tensor has no parts
        return f"is not covered by its parts over the {name}"
    wrong = [holder for part in cut.holders for holder in part if not 0 <= holder < side.members]
    if wrong or not all(cut.holders):
        return f"is held by {cut.holders}, of {side.members} {name}"
    return None


def _fill(manifest: Manifest, held: Sequence[_Part], most: int) -> Iterator[tuple[tuple[Piece, ...], int]]:
    """Yield the pieces of one bucket after the other, and the bucket's bytes."""
    pieces: list[Piece] = []
    filled = 0
    for index, part, size in held:
        for span, nbytes in [(part, size)] if size <= most else _chunks(manifest.tensors[index], part, most):
            if pieces and filled + nbytes > most:
                yield tuple(pieces), filled
                pieces, filled = [], 0
            pieces.append(Piece(index, span, filled, nbytes))
            filled = aligned(filled + nbytes)
    if pieces:
        yield tuple(pieces), filled


def _chunks(spec: TensorSpec, span: Span, most: int) -> Iterator[tuple[Span, int]]:
    """Cut `span` into spans of at most `most` bytes by rows, each but the last with a multiple of `ALIGNMENT` bytes. Yields
    each with its bytes."""
    first, end = span[0] if span else (0, spec.shape[0])
    row = bytes_of(spec, span) // (end - first)
    step = ALIGNMENT // math.gcd(ALIGNMENT, row)
    rows = max(step, most // row // step * step)
    for begin in range(first, end, rows):
        count = min(rows, end - begin)
        yield ((begin, begin + count), *span[1:]), count * row


def aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


# ---- Hops


class Hop(NamedTuple):
    """A step on the way of a sender's buckets: one member passes each bucket to others."""

    transport: str  # a key of `sender.LINKS`
    parent: int  # rank
    children: tuple[int, ...]  # ranks; of `collective` there is one


def hops(machines: Sequence[str], senders: int, sender: int, workers: int = 1, taker: int = 0) -> list[Hop]:
    """Return the hops of the buckets of `sender` that worker `taker` of each rollout takes. `machines`: of the senders, then of
    the rollouts, as `shared_machines` returns them.

    Receivers on the sender's machine copy out of its memory. On each other machine one receiver, the head, gets the buckets
    over the network, and the others copy out of its memory. The heads form a chain, so a byte leaves the sender once. All
    chains have the machines in one order, so no two heads wait for each other."""
    of_machine: dict[str | int, list[int]] = {}
    for rollout, machine in enumerate(machines[senders:]):
        rank = senders + rollout * workers + taker
        of_machine.setdefault(machine or rank, []).append(rank)
    found = []
    if machines[sender] in of_machine:
        found.append(Hop("shared_memory", sender, tuple(of_machine.pop(machines[sender]))))
    parent = sender
    for ranks in of_machine.values():
        head = ranks[sender % len(ranks)]  # each receiver of a machine is the head for some of the senders
        found.append(Hop("collective", parent, (head,)))
        if others := tuple(rank for rank in ranks if rank != head):
            found.append(Hop("shared_memory", head, others))
        parent = head
    return found


def transports(machines: Sequence[str], senders: int) -> set[str]:
    """Return the transports over which weights go. `machines`: as for `hops`."""
    return {hop.transport for sender in range(senders) for hop in hops(machines, senders, sender)}


def shared_machines(transport: str, backend: str, machines: Mapping[str, str]) -> tuple[str, ...]:
    """Return for each of `machines` the machine whose memory the member shares; "": none. `machines`: by name; "" = unknown.

    `transport`: `weight_sync.transport`. `auto` shares memory, unless `weight_sync.backend` names a backend. Raises UserError
    if `transport` is shared memory and a member is not on the first member's machine."""
    name, machine = next(iter(machines.items()))
    apart = [other for other, where in machines.items() if not where or where != machine]
    if transport == "shared_memory" and apart:
        why = f"shared_memory needs all on one machine, but {', '.join(apart)} may run on another machine than {name}"
        raise UserError(f"weight_sync.transport: {why}; must be auto or collective")
    shares = transport == "shared_memory" or (transport == "auto" and backend == "auto")
    return tuple(machines.values()) if shares else ("",) * len(machines)
