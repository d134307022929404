"""The parts that all transports share: the group's key, the buckets' tags and memory, and `Link`, which passes buckets on."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import math
import mmap
import os
import secrets
import struct
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import xxhash

from runtime.errors import UserError
from runtime.types import PolicyVersion
from runtime.weights.plan import ITEM_BYTES, Bucket, Manifest, Span, TensorSpec, aligned, arena_offsets, run_of

# ---- Authentication
# Tags prove that a value of a store, or a bucket, comes from a process with the group's key.
# Each group has its own key of 32 random bytes. Members receive the key over gRPC, or in their environment. The connections
# are neither authenticated nor encrypted: gloo, NCCL and HCCL offer no such option. A stranger that reaches a connection can
# read the traffic, and can end a group: by a deleted or overwritten value, or by a connection of its own. Two things carry no
# tag: the messages between a trainer's gloo ranks, and the values that NCCL and HCCL keep in the store.

KEY_BYTES = 32

_NAME_BYTES = 16  # of a hashed name in the store
_TAG_BYTES = 16  # before each value in the store
_TAGGED = struct.Struct("<16sqI")  # xxh3-128 of a bucket, its packed version, its index
TAG = struct.Struct("<Qq")  # of a bucket: a hash under the group's key, and the packed version


def new_key() -> bytes:
    return secrets.token_bytes(KEY_BYTES)


def derived(key: bytes, purpose: bytes, data: bytes, size: int) -> bytes:
    """Return BLAKE2b of `data` under `key`, `size` bytes. Each `purpose`, at most 16 bytes, gives an independent hash."""
    return hashlib.blake2b(data, key=key, person=purpose, digest_size=size).digest()


class ForgedValue(RuntimeError):
    """A value in a store was not written with the group's key."""


class AuthenticatedStore(dist.Store):
    """A torch.distributed store with names hashed by the group's key, and values tagged by it. A stranger can list, delete and
    overwrite, but not predict a name, write a value that passes the check, or move one to another name. Counters (`add`) have
    no tags. torch's C++ code holds no reference to the Python object: the caller of torch keeps it."""

    def __init__(self, inner: Any, key: bytes, prefix: str = ""):
        super().__init__()
        self._inner = inner
        self._key = key
        self._prefix = prefix

    def within(self, prefix: str) -> AuthenticatedStore:
        """Return the part of this store whose names begin with `prefix` and a slash."""
        return AuthenticatedStore(self._inner, self._key, f"{self._prefix}{prefix}/")

    def unauthenticated(self) -> Any:
        """Return a plain torch store under a hashed prefix, for backends whose threads must not call Python."""
        return dist.PrefixStore(self._name(""), self._inner)

    def set(self, key: str, value: str | bytes) -> None:
        name, content = self._name(key), value.encode() if isinstance(value, str) else bytes(value)
        self._inner.set(name, self._tag(name, content) + content)

    def get(self, key: str) -> bytes:
        """Return the value of `key`. Raises ForgedValue for a wrong tag, RuntimeError after the store's own timeout."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:  # type: ignore[override]
        """Return the values of `keys`, with the errors of `get`."""
        names = [self._name(key) for key in keys]
        return [self._verified(*each) for each in zip(keys, names, map(bytes, self._inner.multi_get(names)), strict=True)]

    def await_value(self, key: str, seconds: float) -> bytes:
        """Wait up to `seconds` for `key`, then return its value, with the errors of `get`."""
        self.wait([key], timedelta(seconds=seconds))
        return self.get(key)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:  # type: ignore[override]
        """Block until all `keys` exist. Does not check the tags of their values."""
        self._inner.wait([self._name(key) for key in keys], *([] if timeout is None else [timeout]))

    def check(self, keys: Sequence[str]) -> bool:  # type: ignore[override]
        return bool(self._inner.check([self._name(key) for key in keys]))

    def add(self, key: str, amount: int) -> int:
        return int(self._inner.add(self._name(key), amount))

    def delete_key(self, key: str) -> bool:
        return bool(self._inner.delete_key(self._name(key)))

    def _name(self, key: str) -> str:
        return derived(self._key, b"name", f"{self._prefix}{key}".encode(), _NAME_BYTES).hex()

    def _tag(self, name: str, content: bytes) -> bytes:
        return derived(self._key, b"value", name.encode() + content, _TAG_BYTES)

    def _verified(self, key: str, name: str, value: bytes) -> bytes:
        tag, content = value[:_TAG_BYTES], value[_TAG_BYTES:]
        if not secrets.compare_digest(tag, self._tag(name, content)):
            where = f"{self._prefix}{key} in the group's store"
            raise ForgedValue(f"{where} was written by a process that does not have the group's key")
        return content


class BucketTags:
    """The tags of a group's buckets. The digest is xxh3-128 of the bucket, with a seed derived from the key. The tag has
    BLAKE2b under the key, of digest, version and bucket index. So a universal hash feeds a pseudorandom function, as in UMAC
    (RFC 4418). xxh3 is as fast as memory, but not proven universal: few seeds kept a digest in tests."""

    def __init__(self, key: bytes):
        self._key = key
        self._seed = int.from_bytes(derived(key, b"seed", b"", 8), "little")

    def hasher(self) -> xxhash.xxh3_128:
        """Return a hasher that takes a bucket by pieces. Its `intdigest` equals the result of `digest`."""
        return xxhash.xxh3_128(seed=self._seed)

    def digest(self, bucket: torch.Tensor) -> int:
        """Return the digest of a bucket, uint8."""
        return xxhash.xxh3_128_intdigest(bucket.numpy().data, seed=self._seed)

    def tag(self, index: int, digest: int, version: PolicyVersion) -> bytes:
        """Return the tag of bucket `index` with this digest."""
        packed = version.pack()
        data = _TAGGED.pack(digest.to_bytes(16, "little"), packed, index)
        return TAG.pack(int.from_bytes(derived(self._key, b"bucket", data, 8), "little"), packed)


# ---- The memory of buckets: of the version that a trainer sends, and of a staged version, which an engine's workers may read
# Memory that other processes of this machine can map are memory files without a name (memfd). The limit of /dev/shm, 64 MiB in
# a container by default, does not apply to these files. The kernel frees a file when the last process that holds it ends.


AVAILABLE = hasattr(os, "memfd_create")  # on Linux

_FILES: dict[int, int] = {}  # descriptors of the buffers that live, by address

_POPULATE_WRITE = 23  # of madvise, since Linux 5.14


def memory_file(nbytes: int) -> torch.Tensor:
    """Return a zeroed uint8 tensor [nbytes] in a new memory file. Raises UserError if the system has no memory files."""
    if not AVAILABLE:
        raise UserError("services.rollout.engine: vllm needs Linux, whose memory files carry the weights to its workers")
    descriptor = os.memfd_create("sluice-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, nbytes)
        # Seal the size: a process that maps the file would be killed when it touches a part that was cut off.
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        mapped = mmap.mmap(descriptor, nbytes)
        with suppress(OSError):  # not in every kernel
            mapped.madvise(mmap.MADV_HUGEPAGE)
        buffer = torch.frombuffer(mapped, dtype=torch.uint8)
    except BaseException:
        os.close(descriptor)
        raise
    _FILES[buffer.data_ptr()] = descriptor
    weakref.finalize(buffer.untyped_storage(), _forget, buffer.data_ptr())
    return buffer


def populate(buffer: torch.Tensor) -> None:
    """Allocate the pages of the arena of `buffer`, if the kernel can: the first write to a page takes ten times as long."""
    whole = buffer.untyped_storage()
    # By ctypes, because Python's mmap.madvise would hold the GIL.
    ctypes.CDLL(None).madvise(ctypes.c_void_p(whole.data_ptr()), ctypes.c_size_t(whole.nbytes()), _POPULATE_WRITE)


def _forget(address: int) -> None:
    os.close(_FILES.pop(address))


def arena(sizes: Sequence[int], pin: bool = False) -> list[torch.Tensor]:
    """Return one tensor for each of `sizes`, as `memory_file` does, all in one file. `pin` page-locks it for CUDA's copies."""
    ends = list(accumulate(aligned(size) for size in sizes))
    whole = memory_file(max(ends, default=1))
    if pin:
        page_lock(whole)
    return [whole[end - aligned(size) :][:size] for size, end in zip(sizes, ends, strict=True)]


def page_lock(buffer: torch.Tensor) -> None:
    """Page-lock the memory of `buffer`. Never run on hardware so far. Raises RuntimeError if CUDA refuses."""
    runtime: Any = torch.cuda.cudart()
    address = buffer.data_ptr()
    torch.cuda.check_error(runtime.cudaHostRegister(address, buffer.numel(), 0))
    # Finalizers run newest first: the lock is released before the memory.
    weakref.finalize(buffer.untyped_storage(), runtime.cudaHostUnregister, address)


def in_memory_file(buffer: torch.Tensor) -> torch.Tensor:
    """Return `buffer`, uint8, or a copy in a memory file if `buffer` does not lie in one."""
    if buffer.untyped_storage().data_ptr() in _FILES:
        return buffer
    return memory_file(max(1, buffer.numel()))[: buffer.numel()].copy_(buffer)


def file_of(buffer: torch.Tensor) -> tuple[int, int]:
    """Return the descriptor of the memory file in which `buffer`, uint8, lies, and the buffer's offset in the file."""
    return _FILES[buffer.untyped_storage().data_ptr()], int(buffer.storage_offset())


# ---- Tensors in memory


class Shard(NamedTuple):
    """A sender's part of a tensor: `block == whole[span]`, of any dtype and on any device. `tensor`: index in the manifest."""

    tensor: int
    span: Span
    block: torch.Tensor


def indexed(tensor: torch.Tensor, span: Span) -> torch.Tensor:
    """Return the view of the part `span` of `tensor`."""
    return tensor[tuple(slice(*bounds) for bounds in span)] if span else tensor


def allocate(sizes: Sequence[int], pin: bool, shared: bool) -> list[torch.Tensor]:
    """Return a uint8 buffer of each size, zeroed, as digests cover padding. `shared`: in one file, for other processes."""
    if shared:
        return arena(sizes, pin)
    return [torch.zeros(size, dtype=torch.uint8, pin_memory=pin) for size in sizes]


def typed(buffer: torch.Tensor, spec: TensorSpec, shape: Sequence[int]) -> torch.Tensor:
    """Return the first bytes of `buffer`, uint8, as a tensor of `shape` with the dtype of `spec`."""
    nbytes = ITEM_BYTES[spec.dtype] * math.prod(shape)
    return buffer[:nbytes].view(getattr(torch, spec.dtype)).view(tuple(shape))


def tensors_of(specs: Sequence[TensorSpec], whole: torch.Tensor, order: Sequence[int] | None = None) -> dict[int, torch.Tensor]:
    """Return the tensors in the arena `whole`, uint8, by index in `specs`, as views. `order`: as for `arena_offsets`."""
    offsets, _ = arena_offsets(specs, order)
    return {index: typed(whole[begin:], specs[index], specs[index].shape) for index, begin in offsets.items()}


Bytes = npt.NDArray[np.uint8]


class Target(NamedTuple):
    """Memory for a bucket of `nbytes`. `parts`: each with its first byte in the bucket, [bytes] or [rows, bytes of a row].
    There may be padding between them. `run`: the whole bucket if it lies in one run, else None."""

    nbytes: int
    parts: Sequence[tuple[int, Bytes]]
    run: torch.Tensor | None

    @classmethod
    def of(cls, buffer: torch.Tensor) -> Target:
        """Return the memory `buffer`, uint8 [bytes]."""
        return cls(buffer.numel(), [(0, buffer.numpy())], buffer)


def targets_of(
    manifest: Manifest, buckets: Sequence[Bucket], whole: torch.Tensor, order: Sequence[int] | None = None
) -> list[Target]:
    """Return where each bucket belongs in the arena `whole`, uint8. `order`: as for `arena_offsets`."""
    offsets, _ = arena_offsets(manifest.tensors, order)
    tensors = tensors_of(manifest.tensors, whole, order)
    found = []
    for bucket in buckets:
        begin = run_of(manifest, bucket, offsets)
        if begin is not None:
            found.append(Target.of(whole[begin : begin + bucket.nbytes]))
        else:
            parts = [(each.offset, _bytes(indexed(tensors[each.tensor], each.span))) for each in bucket.pieces]
            found.append(Target(bucket.nbytes, parts, None))
    return found


def _bytes(part: torch.Tensor) -> Bytes:
    """Return a contiguous part of a tensor as [bytes], and a part by columns as [rows, bytes of a row]."""
    contiguous = part.is_contiguous()
    array: Bytes = part.flatten(0 if contiguous else 1).view(torch.uint8).numpy()
    return array


_PIECE = 256 << 10  # bytes copied and then hashed: a piece and its copy fit into a core's own cache


def copy_and_hash(source: Bytes, parts: Sequence[tuple[int, Bytes]], hasher: Any, check: Callable[[], None]) -> BucketReceipt:
    """Copy a bucket, uint8 [bytes], to the `parts` of a `Target`. Returns a receipt with the digest, by `hasher`. Each piece is
    hashed while in the processor's cache, which saves a pass over memory. `check` comes before each piece, and may raise."""
    began, hashing, end = time.monotonic(), 0.0, 0
    for offset, target in parts:
        hasher.update(source[end:offset].data)
        end = offset + target.size
        block = source[offset:end].reshape(target.shape)
        step = max(1, _PIECE // max(1, target[:1].size))
        for start in range(0, len(target), step):
            check()
            piece = slice(start, start + step)
            np.copyto(target[piece], block[piece])
            copied = time.monotonic()
            # What has arrived is hashed, except by columns, which a hasher cannot take.
            hasher.update((target if target.ndim == 1 else block)[piece].data)
            hashing += time.monotonic() - copied
    hasher.update(source[end:].data)
    return BucketReceipt(int(hasher.intdigest()), time.monotonic() - began - hashing, hashing)


def digest_of(target: Target, hasher: Any) -> int:
    """Return the digest, by `hasher`, of the bucket in `target`, whose padding is taken as zero."""
    end = 0
    for offset, part in target.parts:
        hasher.update(bytes(offset - end))
        hasher.update(np.ascontiguousarray(part).data)
        end = offset + part.size
    hasher.update(bytes(target.nbytes - end))
    return int(hasher.intdigest())


# ---- Links


class BucketReceipt(NamedTuple):
    """A filled bucket's digest (`BucketTags.digest`), and the seconds that its copy and its hash took."""

    digest: int
    copy_seconds: float
    hash_seconds: float


Transfer = Callable[[float], BucketReceipt | None]
"""A bucket under way. Called with a time of time.monotonic, it returns when the buffer may be reused (sender) or is filled
(receiver), with a receipt if the receiver's transport copied and hashed the bucket itself. Raises RuntimeError, at that time at
the latest."""


class Link(ABC):
    """A member that passes buckets on, rank 0 of the link, and members that get them. All move the same buckets in the same
    order, each from one thread."""

    sent_bytes = 0  # rank 0: the bytes sent to each other member so far
    scatters = False  # whether `receive` takes targets that are not one run

    def describe(self, tag: bytes, changed: Any) -> None:  # noqa: B027 - most links send buckets whole
        """Set at rank 0 the tag and the changed words of the next bucket, as `DeltaLink.describe` does."""

    def send(self, index: int, buffer: torch.Tensor) -> Transfer:
        """Start at rank 0 to send bucket `index`, `buffer` (uint8, host memory), to all others. Raises RuntimeError."""
        raise NotImplementedError

    def receive(self, index: int, target: Target) -> Transfer:
        """Start at another member to fill `target`, of the bucket's size. Raises RuntimeError."""
        raise NotImplementedError

    def set_timeout(self, seconds: float) -> None:  # noqa: B027 - most links can be ended at any moment
        """Let buckets that start from now on block a thread for at most `seconds`, even if `abort` cannot end them."""

    @abstractmethod
    def abort(self) -> None:
        """Leave for good, and free the threads that wait for a transfer. Idempotent, from any thread."""


# Buckets that a member passes on at once. Their memory is used again only after that.
FORWARDS = 2


class Relay(Link):
    """A member's place on the way of a sender's buckets: receives each from its parent, and passes each on to its children."""

    def __init__(self, parent: Link | None, children: Sequence[Link], forwards: deque[tuple[Transfer, torch.Tensor]]):
        """Make the place. `parent`: None at the sender. `forwards`: what is under way to children, of all senders together."""
        self._parent, self._children, self._forwards = parent, children, forwards
        self.scatters = parent is not None and parent.scatters

    def send(self, index: int, buffer: torch.Tensor) -> Transfer:
        pending = [child.send(index, buffer) for child in self._children]
        self.sent_bytes = max((child.sent_bytes for child in self._children), default=0)

        def wait(give_up: float) -> None:
            for transfer in pending:
                transfer(give_up)

        return wait

    def receive(self, index: int, target: Target) -> Transfer:
        assert self._parent is not None
        arrived = self._parent.receive(index, target)
        return partial(self._pass_on, index, target.run, arrived) if self._children else arrived

    def _pass_on(self, index: int, buffer: torch.Tensor | None, arrived: Transfer, give_up: float) -> BucketReceipt | None:
        receipt = arrived(give_up)
        assert buffer is not None  # only links that scatter get no run, and members behind these have no children
        self._forwards.append((self.send(index, buffer), buffer))
        settle(self._forwards, FORWARDS, give_up)
        return receipt

    def set_timeout(self, seconds: float) -> None:
        for link in self._links:
            link.set_timeout(seconds)

    def abort(self) -> None:
        for link in self._links:
            link.abort()

    @property
    def _links(self) -> list[Link]:
        return [*([self._parent] if self._parent is not None else []), *self._children]


def settle(pending: deque[tuple[Transfer, torch.Tensor]], most: int, give_up: float) -> None:
    """Wait until at most `most` transfers are under way."""
    while len(pending) > most:
        pending.popleft()[0](give_up)
