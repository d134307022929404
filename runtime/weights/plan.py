"""The weight sync plan: which sender sends which part of each tensor in which bucket, and over which hops it reaches each
receiver. Pure; all members derive the same plan from the manifest and the group's address.

A bucket is a flat uint8 buffer of one sender: piece after piece, each aligned to 64 bytes. A piece is a part of one tensor. A
receiver keeps the whole tensors in an arena, one after the other, each aligned to 64 bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from msgspec import Struct

from runtime.errors import InvalidMessage, UserError

ALIGNMENT = 64
LEAST_BYTES = 64 << 10  # of a bucket that is made smaller to even out the senders' loads

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
    """The layout of a tensor over the senders: parts of `size` along `dim`, which is 0 or 1; the last part may be smaller."""

    holders: tuple[tuple[int, ...], ...] = ((0,),)  # of each part, the senders that hold it
    dim: int = 0
    size: int = 0  # 0: one part, the whole tensor


class Manifest(Struct, frozen=True):
    """The tensors of a weight sync, their layout over the senders, and the bucket size. Sent once per epoch."""

    tensors: tuple[TensorSpec, ...]
    bucket_bytes: int
    senders: int = 1
    cuts: tuple[Cut, ...] = (Cut(),)
    cut_of: tuple[int, ...] = ()  # of each tensor, the index of its cut; (): all have the first
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
    names: tuple[str, ...] = ()  # the members' names by rank; (): unknown
    machines: tuple[str, ...] = ()  # by rank, as `shared_machines` returns them; (): all ""
    senders: int = 1  # as in the manifest

    def __repr__(self) -> str:
        """Leave out the key: no log may hold the key."""
        return f"GroupAddress({self.label(self.rank)} of epoch {self.epoch} at {self.host}:{self.port})"

    def label(self, rank: int) -> str:
        """Return a member's name for messages: "rank 2 (rollout-1)"."""
        return f"rank {rank}" + (f" ({self.names[rank]})" if rank < len(self.names) else "")


# ---- Buckets


class Piece(Struct, frozen=True, gc=False):  # there may be millions
    """A part of a tensor in a bucket. `tensor` indexes `Manifest.tensors`; `offset` and `nbytes` lie within the bucket."""

    tensor: int
    span: Span
    offset: int
    nbytes: int


class Bucket(NamedTuple):
    """The layout of one bucket. `nbytes` is a multiple of `ALIGNMENT`. `root`: the bucket's sender."""

    pieces: tuple[Piece, ...]
    nbytes: int
    root: int = 0


@lru_cache(maxsize=2)  # the plans of one epoch's manifest, and of a newcomer's
def plan_buckets(manifest: Manifest) -> tuple[Bucket, ...]:
    """Return the buckets in the order in which receivers take them. Each element lies in one bucket, of a sender that holds it.
    Matrices come first, then vectors and scalars, in the manifest's order. A bucket has at most `bucket_bytes`, or else the
    fewest rows that are aligned. No sender has more than 1.1 times its fair part and `LEAST_BYTES`, unless its tensors have
    larger rows, or fewer senders hold more.

    Raises InvalidMessage for an unknown dtype, a repeated name, a layout that does not fit, or a count below 1."""
    _check(manifest)
    held = _by_holders(manifest)
    loads = [0] * manifest.senders
    paced: list[tuple[float, int, Bucket]] = []
    # Parts with few holders come first: the others even out what these leave uneven.
    for number, holders in enumerate(sorted(held, key=lambda holders: (len(holders), holders))):
        of_group = held.pop(holders)
        total = sum(aligned(nbytes) for _, _, nbytes in of_group)
        most, before = manifest.bucket_bytes, 0
        if len(holders) > 1:  # each gets ten buckets or more: then their loads differ by a tenth at most
            most = min(most, max(LEAST_BYTES, total // (10 * len(holders))))
        for pieces, nbytes in _fill(manifest, of_group, max(most // ALIGNMENT, 1) * ALIGNMENT):
            root = min(holders, key=lambda holder: (loads[holder], holder))
            loads[root] += nbytes
            # All senders progress evenly, as receivers take a few buckets at a time.
            paced.append((before / total, number, Bucket(pieces, nbytes, root)))
            before += nbytes
    return tuple(bucket for _, _, bucket in sorted(paced, key=lambda item: item[:2]))


def _by_holders(manifest: Manifest) -> dict[tuple[int, ...], list[_Part]]:
    held: dict[tuple[int, ...], list[_Part]] = {}
    same: dict[tuple[str, tuple[int, ...], int], list[tuple[Span, int, list[_Part]]]] = {}  # many tensors are cut alike
    for index in in_order(manifest.tensors):
        spec = manifest.tensors[index]
        kind = (spec.dtype, spec.shape, manifest.cut_of[index] if manifest.cut_of else 0)
        if kind not in same:
            found = parts(manifest, index)
            same[kind] = [(span, _bytes_of(spec, span), held.setdefault(holders, [])) for span, holders in found]
        for span, nbytes, of_group in same[kind]:
            of_group.append((index, span, nbytes))
    return held


def in_order(tensors: Sequence[TensorSpec]) -> list[int]:
    """Return the indices of `tensors`: matrices first. So no bias or norm lies between the matrices of query, key and value."""
    return sorted(range(len(tensors)), key=lambda index: len(tensors[index].shape) < 2)


def parts(manifest: Manifest, index: int) -> Iterator[tuple[Span, tuple[int, ...]]]:
    """Yield the parts of a tensor, without empty ones, and the holders of each."""
    spec, cut = manifest.tensors[index], manifest.cuts[manifest.cut_of[index] if manifest.cut_of else 0]
    if not spec.nbytes:
        return
    if not cut.size:
        yield (), cut.holders[0]
        return
    length = spec.shape[cut.dim]
    for begin, holders in zip(range(0, length, cut.size), cut.holders, strict=False):  # the last parts may be empty
        held = (begin, min(begin + cut.size, length))
        yield (held,) if cut.dim == 0 else ((0, spec.shape[0]), held), holders


def arena_offsets(tensors: Sequence[TensorSpec]) -> tuple[dict[int, int], int]:
    """Return the first byte of each tensor in an arena, by index and in order, and the arena's size in bytes."""
    order = in_order(tensors)
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


def _bytes_of(spec: TensorSpec, span: Span) -> int:
    return math.prod(end - begin for begin, end in span) * spec.row_bytes(len(span))


def _check(manifest: Manifest) -> None:
    for name, value in (("bucket_bytes", manifest.bucket_bytes), ("senders", manifest.senders)):
        if value < 1:
            raise InvalidMessage(f"{name} is {value}, must be at least 1")
    if len(manifest.cut_of) not in (0, len(manifest.tensors)):
        raise InvalidMessage(f"cut_of names {len(manifest.cut_of)} cuts for {len(manifest.tensors)} tensors")
    names: set[str] = set()
    for index, spec in enumerate(manifest.tensors):
        if spec.name in names:
            raise InvalidMessage(f"tensor {spec.name} occurs twice in the manifest")
        names.add(spec.name)
        _check_cut(spec, manifest, manifest.cut_of[index] if manifest.cut_of else 0)


def _check_cut(spec: TensorSpec, manifest: Manifest, number: int) -> None:
    if not 0 <= number < len(manifest.cuts):
        raise InvalidMessage(f"tensor {spec.name} has cut {number} of {len(manifest.cuts)}")
    cut = manifest.cuts[number]
    whole = cut.size == 0 and cut.holders
    in_parts = 0 <= cut.dim < min(2, len(spec.shape)) and cut.size * len(cut.holders) >= spec.shape[cut.dim]
    if spec.nbytes and not (whole or in_parts):  # an empty tensor has no parts
        where = f"cut into {len(cut.holders)} parts of {cut.size} in dimension {cut.dim}"
        raise InvalidMessage(f"tensor {spec.name} of {list(spec.shape)} is {where}, which does not cover it")
    wrong = [holder for part in cut.holders for holder in part if not 0 <= holder < manifest.senders]
    if wrong or not all(cut.holders):
        raise InvalidMessage(f"tensor {spec.name} is held by {cut.holders}, of {manifest.senders} senders")


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
    row = _bytes_of(spec, span) // (end - first)
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


def hops(machines: Sequence[str], senders: int, sender: int) -> list[Hop]:
    """Return the hops of the buckets of `sender`. `machines`: by rank, as `shared_machines` returns them.

    Receivers on the sender's machine copy out of its memory. On each other machine one receiver, the head, gets the buckets
    over the network, and the others copy out of its memory. The heads form a chain, so a byte leaves the sender once. All
    chains have the machines in one order, so no two heads wait for each other."""
    of_machine: dict[str | int, list[int]] = {}
    for rank in range(senders, len(machines)):
        of_machine.setdefault(machines[rank] or rank, []).append(rank)
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
