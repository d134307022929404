"""The weight sync plan: the bucket, offset and sender of each tensor. Pure; all members derive the same plan.

A bucket is one flat uint8 buffer: tensor after tensor, then a trailer, each aligned to 64 bytes. The trailer has 16 bytes: a
tag by the group's key (`group.BucketTags`), and the packed policy version, both little-endian."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence

from msgspec import Struct, structs

from runtime.errors import InvalidMessage, UserError

ALIGNMENT = 64
TRAILER = struct.Struct("<Qq")

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


class TensorSpec(Struct, frozen=True, array_like=True):
    """One whole tensor in Hugging Face layout."""

    name: str
    dtype: str  # torch's name: "float32", "bfloat16"
    shape: tuple[int, ...]
    held_by: tuple[int, ...] = ()  # the senders that hold the tensor; (): all senders

    @property
    def nbytes(self) -> int:
        """The tensor's size in bytes. Raises InvalidMessage for a dtype that is not in `ITEM_BYTES`."""
        if self.dtype not in ITEM_BYTES:
            raise InvalidMessage(f"tensor {self.name}: dtype {self.dtype!r} is not one of {', '.join(ITEM_BYTES)}")
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


class Manifest(Struct, frozen=True):
    """The tensors of a weight sync, and the bucket size. Sent once per epoch."""

    tensors: tuple[TensorSpec, ...]
    bucket_bytes: int
    senders: int = 1
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
    transport: str = "collective"
    full_every: int = 0  # of encoding delta; 0: every version is whole
    names: tuple[str, ...] = ()  # the members' names by rank; (): unknown
    senders: int = 1  # as in the manifest

    def __repr__(self) -> str:
        """Leave out the key: no log may hold the key."""
        return f"GroupAddress({self.label(self.rank)} of epoch {self.epoch} at {self.host}:{self.port})"

    def label(self, rank: int) -> str:
        """Return a member's name for messages: "rank 2 (rollout-1)"."""
        return f"rank {rank}" + (f" ({self.names[rank]})" if rank < len(self.names) else "")


class BucketEntry(Struct, frozen=True, array_like=True):
    """One tensor's bytes in a bucket. `tensor` indexes `Manifest.tensors`."""

    tensor: int
    offset: int
    nbytes: int


class Bucket(Struct, frozen=True):
    """The layout of one bucket. `data_bytes`: up to the trailer, a multiple of `ALIGNMENT`. `root`: the bucket's sender."""

    entries: tuple[BucketEntry, ...]
    data_bytes: int
    root: int = 0

    @property
    def total_bytes(self) -> int:
        return self.data_bytes + TRAILER.size


def plan_buckets(manifest: Manifest) -> tuple[Bucket, ...]:
    """Return the buckets with their roots, in the order in which receivers take them. Tensors with the same senders share
    buckets of at most `bucket_bytes` of data. Matrices come first, then vectors and scalars, both in the manifest's order. A
    bucket is closed once the next tensor does not fit. A larger tensor has its own bucket.

    A receiver may use the buckets' memory as its weights. No bias or norm lies between the matrices of query, key and value. So
    these adjoin if their sizes are multiples of `ALIGNMENT`, and form one matrix. The same holds for gate and up, and for
    biases. Raises InvalidMessage for an unknown dtype, a repeated name, a holder that is no sender, or a count below 1."""
    _check(manifest)
    all_senders = tuple(range(manifest.senders))
    shared: dict[tuple[int, ...], list[int]] = {}
    for index, spec in sorted(enumerate(manifest.tensors), key=lambda item: len(item[1].shape) < 2):
        shared.setdefault(spec.held_by or all_senders, []).append(index)
    filled = {holders: _fill(manifest, tensors) for holders, tensors in shared.items()}
    return assign(filled, manifest.senders)


def roots(manifest: Manifest) -> list[int]:
    """Return the sender of each of the manifest's tensors."""
    of_tensor = {entry.tensor: bucket.root for bucket in plan_buckets(manifest) for entry in bucket.entries}
    return [of_tensor[index] for index in range(len(of_tensor))]


def _check(manifest: Manifest) -> None:
    for name, value in (("bucket_bytes", manifest.bucket_bytes), ("senders", manifest.senders)):
        if value < 1:
            raise InvalidMessage(f"{name} is {value}, must be at least 1")
    names: set[str] = set()
    for spec in manifest.tensors:
        if spec.name in names:
            raise InvalidMessage(f"tensor {spec.name} occurs twice in the manifest")
        names.add(spec.name)
        if any(not 0 <= holder < manifest.senders for holder in spec.held_by):
            raise InvalidMessage(f"tensor {spec.name} is held by {spec.held_by}, of {manifest.senders} senders")


def _fill(manifest: Manifest, tensors: Sequence[int]) -> list[Bucket]:
    buckets: list[Bucket] = []
    entries: list[BucketEntry] = []
    filled = 0
    for index in tensors:
        nbytes = manifest.tensors[index].nbytes
        if entries and filled + nbytes > manifest.bucket_bytes:
            buckets.append(Bucket(tuple(entries), filled))
            entries, filled = [], 0
        entries.append(BucketEntry(index, filled, nbytes))
        filled = aligned(filled + nbytes)
    buckets.append(Bucket(tuple(entries), filled))
    return buckets


def assign(filled: Mapping[tuple[int, ...], Sequence[Bucket]], senders: int) -> tuple[Bucket, ...]:
    """Assign a root to every bucket of `filled` (by holders, in order); return the buckets in the order in which receivers take
    them. Each bucket goes to the holder with the fewest bytes so far, buckets with few holders first. So senders with the same
    buckets differ by at most one. All senders progress evenly, by bytes, as receivers take a few buckets at a time."""
    loads = [0] * senders
    paced: list[tuple[float, int, Bucket]] = []
    for number, (holders, buckets) in enumerate(sorted(filled.items(), key=lambda item: (len(item[0]), item[0]))):
        total, before = sum(bucket.data_bytes for bucket in buckets), 0
        for bucket in buckets:
            root = min(holders, key=lambda holder: (loads[holder], holder))
            loads[root] += bucket.data_bytes
            paced.append((before / max(1, total), number, structs.replace(bucket, root=root)))
            before += bucket.data_bytes
    return tuple(bucket for _, _, bucket in sorted(paced, key=lambda item: item[:2]))


def aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def resolve_transport(transport: str, backend: str, machines: Mapping[str, str]) -> str:
    """Return the transport that `weight_sync.transport` selects. `machines`: of the trainer and the epoch's rollouts by name,
    "" = unknown. `auto` selects shared memory if all run on one machine, unless `weight_sync.backend` names a backend. Raises
    UserError if `transport` is shared memory and a member is not on that machine."""
    name, machine = next(iter(machines.items()))
    apart = [other for other, where in machines.items() if not where or where != machine]
    if transport == "shared_memory" and apart:
        why = f"shared_memory needs all on one machine, but {', '.join(apart)} may run on another machine than {name}"
        raise UserError(f"weight_sync.transport: {why}; must be auto or collective")
    if transport == "auto":
        return "shared_memory" if backend == "auto" and not apart else "collective"
    return transport
