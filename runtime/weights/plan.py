"""The publication plan: which tensor lies where in which flat bucket, and who sends it. Pure; all members derive the same.

A bucket is one flat uint8 buffer: the tensors one after the other, each aligned to 64 bytes, then, aligned likewise, a trailer
of 16 bytes: a tag by the group's key (`authentication.BucketTags`), and the packed policy version, both little-endian.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct, structs

from runtime.errors import InvalidMessage, UserError

ALIGNMENT = 64
TRAILER = struct.Struct("<Qq")

DTYPES = {  # by torch's name: bytes of an item, and what safetensors calls it
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
    held_by: tuple[int, ...] = ()  # the senders that can send it; () for all of them

    @property
    def nbytes(self) -> int:
        """Raises InvalidMessage for a dtype that is not in `ITEM_BYTES`."""
        if self.dtype not in ITEM_BYTES:
            raise InvalidMessage(f"tensor {self.name}: dtype {self.dtype!r} is not one of {', '.join(ITEM_BYTES)}")
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


class Manifest(Struct, frozen=True):
    """What one publication carries. Sent once per epoch."""

    tensors: tuple[TensorSpec, ...]
    bucket_bytes: int
    senders: int = 1
    base: str = ""  # of adapters: the fingerprint of the weights that they belong to


class GroupAddress(Struct, frozen=True, kw_only=True):
    """Where one epoch's members meet. The first ranks are the senders, the others receive. Rank 0 leads."""

    epoch: int
    world_size: int
    backend: str
    timeout: float  # of the rendezvous, in seconds
    host: str = ""  # "", as the port and the key: before it is hosted
    port: int = 0
    key: bytes = b""  # of the group
    rank: int = 0
    transport: str = "collective"
    folder: str = ""  # of transport files
    full_every: int = 0  # of encoding delta; 0: every version is whole
    names: tuple[str, ...] = ()  # what the members are called, by rank; () where nobody said
    senders: int = 1  # how many, of the manifest's number

    def __repr__(self) -> str:
        """Without the key, which no log is to hold."""
        return f"GroupAddress({self.label(self.rank)} of epoch {self.epoch} at {self.host}:{self.port})"

    def label(self, rank: int) -> str:
        """How messages call a member: "rank 2 (rollout-1)"."""
        return f"rank {rank}" + (f" ({self.names[rank]})" if rank < len(self.names) else "")


class BucketEntry(Struct, frozen=True, array_like=True):
    """`tensor` indexes `Manifest.tensors`; `offset` and `nbytes` lie within the bucket."""

    tensor: int
    offset: int
    nbytes: int


class Bucket(Struct, frozen=True):
    """`data_bytes` counts up to the trailer, a multiple of `ALIGNMENT`. `root` is the sender that it moves from."""

    entries: tuple[BucketEntry, ...]
    data_bytes: int
    root: int = 0

    @property
    def total_bytes(self) -> int:
        return self.data_bytes + TRAILER.size

    @property
    def padding(self) -> Iterator[slice]:
        """What lies between the tensors, which the checksum covers too."""
        end = 0
        for entry in self.entries:
            yield slice(end, entry.offset)
            end = entry.offset + entry.nbytes
        yield slice(end, self.data_bytes)


def plan_buckets(manifest: Manifest) -> tuple[Bucket, ...]:
    """The buckets, in the order in which receivers take them, each with its root.

    Tensors that the same senders hold share buckets of at most `bucket_bytes` of data: matrices first, then vectors and
    scalars, both in the manifest's order. First fit in order: a bucket is closed once the next tensor does not fit. A tensor
    larger than `bucket_bytes` has a bucket of its own. A receiver may use the buckets' memory as its weights: without the
    biases and norms between them, the matrices of query, key and value, or of gate and up, adjoin each other wherever their
    sizes are multiples of `ALIGNMENT`, and so do the biases of query, key and value. They are one matrix, or vector, then.

    Raises InvalidMessage for an unknown dtype, a name that occurs twice, a holder that is no sender, or a bucket size or number
    of senders below 1.
    """
    _check(manifest)
    everybody = tuple(range(manifest.senders))
    shared: dict[tuple[int, ...], list[int]] = {}
    for index, spec in sorted(enumerate(manifest.tensors), key=lambda item: len(item[1].shape) < 2):
        shared.setdefault(spec.held_by or everybody, []).append(index)
    filled = {holders: _fill(manifest, tensors) for holders, tensors in shared.items()}
    return assign(filled, manifest.senders)


def roots(manifest: Manifest) -> list[int]:
    """Of each of its tensors, the sender that it moves from."""
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
    """Every bucket with its root, in the order in which receivers take them. `filled`: by who holds them, in their order.

    Each bucket goes to the holder that has the fewest bytes so far, so that senders which hold the same differ by one bucket at
    most. Buckets that few senders hold are assigned first. In the order of the result all senders progress evenly, by bytes:
    receivers take a few buckets at a time, and each sender should have some of those.
    """
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
    """The next multiple of `ALIGNMENT`."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def resolve_transport(transport: str, backend: str, machines: Mapping[str, str]) -> str:
    """The transport that `publication.transport` stands for.

    `machines` says by name where the trainer and the epoch's rollouts run, "" = unknown. `auto` is shared memory where that is
    one machine, unless `publication.backend` asks for a collective of some kind. Raises UserError for shared memory that
    not everybody reaches.
    """
    name, machine = next(iter(machines.items()))
    apart = [other for other, where in machines.items() if not where or where != machine]
    if transport == "shared_memory" and apart:
        raise UserError(
            f"publication.transport: shared_memory needs all on one machine, and {', '.join(apart)} cannot be seen to share "
            f"that of {name}; must be auto or collective"
        )
    if transport == "auto":
        return "shared_memory" if backend == "auto" and not apart else "collective"
    return transport
