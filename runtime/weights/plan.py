"""The publication plan: which tensor lies where in which flat bucket. Pure; sender and receiver derive the same plan.

A bucket is one flat uint8 buffer: the tensors one after the other, each aligned to 64 bytes, then, aligned likewise, a trailer
of 16 bytes: xxh3-64 of everything before the trailer, and the packed policy version, both little-endian.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator

from msgspec import Struct

from runtime.errors import InvalidMessage

ALIGNMENT = 64
TRAILER = struct.Struct("<Qq")

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


class TensorSpec(Struct, frozen=True, array_like=True):
    """One tensor in Hugging Face layout. `start` is the offset of this slice in the global tensor, () for the whole of it."""

    name: str
    dtype: str  # torch's name: "float32", "bfloat16"
    shape: tuple[int, ...]
    start: tuple[int, ...] = ()

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


class GroupAddress(Struct, frozen=True, kw_only=True):
    """Where one epoch's members meet. The sender is rank 0."""

    epoch: int
    host: str
    port: int
    rank: int
    world_size: int
    backend: str
    timeout: float  # of the rendezvous, in seconds
    transport: str = "collective"
    folder: str = ""  # of transport filesystem
    full_every: int = 0  # of transport delta
    names: tuple[str, ...] = ()  # what the members are called, by rank; () where nobody said

    def label(self, rank: int) -> str:
        """How messages call a member: "rank 2 (rollout-1)"."""
        return f"rank {rank}" + (f" ({self.names[rank]})" if rank < len(self.names) else "")


class Entry(Struct, frozen=True, array_like=True):
    """`tensor` indexes `Manifest.tensors`; `offset` and `nbytes` lie within the bucket."""

    tensor: int
    offset: int
    nbytes: int


class Bucket(Struct, frozen=True):
    """`data_bytes` counts up to the trailer, a multiple of `ALIGNMENT`."""

    entries: tuple[Entry, ...]
    data_bytes: int

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
    """Fill buckets of at most `bucket_bytes` of data: matrices first, then vectors and scalars, both in the manifest's order.

    First fit in order: a bucket is closed once the next tensor does not fit. A tensor larger than `bucket_bytes` has a bucket
    of its own. A receiver may use the buckets' memory as its weights: without the biases and norms between them, the matrices
    of query, key and value, or of gate and up, adjoin each other wherever their sizes are multiples of `ALIGNMENT`, and so do
    the biases of query, key and value. They are one matrix, or vector, then.
    Raises InvalidMessage for an unknown dtype, a name that occurs twice, or a bucket size below 1.
    """
    if manifest.bucket_bytes < 1:
        raise InvalidMessage(f"bucket_bytes is {manifest.bucket_bytes}, must be at least 1")
    buckets: list[Bucket] = []
    entries: list[Entry] = []
    names: set[str] = set()
    filled = 0
    for index, spec in sorted(enumerate(manifest.tensors), key=lambda item: len(item[1].shape) < 2):
        if spec.name in names:
            raise InvalidMessage(f"tensor {spec.name} occurs twice in the manifest")
        names.add(spec.name)
        nbytes = spec.nbytes
        if entries and filled + nbytes > manifest.bucket_bytes:
            buckets.append(Bucket(tuple(entries), filled))
            entries, filled = [], 0
        entries.append(Entry(index, filled, nbytes))
        filled = aligned(filled + nbytes)
    if entries:
        buckets.append(Bucket(tuple(entries), filled))
    return tuple(buckets)


def aligned(offset: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-offset // ALIGNMENT) * ALIGNMENT
