"""The publication plan: which tensor lies where in which flat bucket. Pure; sender and receiver derive the same plan.

A bucket is one flat uint8 buffer: the tensors back to back, each aligned to 64 bytes, then a trailer of 16 bytes:
xxh3-64 of everything before the trailer, and the packed policy version, both little-endian.
"""

from __future__ import annotations

import struct

from msgspec import Struct

ALIGNMENT = 64
TRAILER = struct.Struct("<Qq")


class TensorSpec(Struct, frozen=True, array_like=True):
    """One tensor in Hugging Face layout. `start` is the offset of this slice in the global tensor, () for the whole of it."""

    name: str
    dtype: str  # torch's name: "float32", "bfloat16"
    shape: tuple[int, ...]
    start: tuple[int, ...] = ()


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
    timeout: float  # of the rendezvous and of every collective, in seconds
