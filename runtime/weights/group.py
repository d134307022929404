"""What all transports share: the group's key, the buckets' buffers and tags, and `Link`, which moves one sender's buckets."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import mmap
import os
import secrets
import struct
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import xxhash

from runtime.errors import UserError
from runtime.types import PolicyVersion
from runtime.weights.plan import TRAILER, Bucket, Manifest, aligned

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
    """The tags in the trailers of a group's buckets, 8 bytes each. The digest is xxh3-128 of the data, with a seed derived from
    the key. The tag is BLAKE2b under the key, of digest, version and bucket index. So a universal hash feeds a pseudorandom
    function, as in UMAC (RFC 4418). xxh3 is as fast as memory, but not proven universal: few seeds kept a digest in tests."""

    def __init__(self, key: bytes):
        self._key = key
        self._seed = int.from_bytes(derived(key, b"seed", b"", 8), "little")

    def hasher(self) -> xxhash.xxh3_128:
        """Return a hasher that takes a bucket's data by pieces. Its `intdigest` equals the result of `digest`."""
        return xxhash.xxh3_128(seed=self._seed)

    def digest(self, bucket: Bucket, buffer: torch.Tensor) -> int:
        """Return the digest of everything before the trailer."""
        return xxhash.xxh3_128_intdigest(buffer.numpy()[: bucket.data_bytes].data, seed=self._seed)

    def stamp(self, index: int, bucket: Bucket, buffer: torch.Tensor, version: PolicyVersion) -> int:
        """Write the trailer of bucket `index`, and return the digest."""
        digest, packed = self.digest(bucket, buffer), version.pack()
        TRAILER.pack_into(buffer.numpy().data, bucket.data_bytes, self._tag(digest, packed, index), packed)
        return digest

    def verify(self, index: int, bucket: Bucket, buffer: torch.Tensor, digest: int | None = None) -> bool:
        """Return whether the trailer fits the data of bucket `index`. `digest`: of that data, if already known."""
        tag, packed = TRAILER.unpack_from(buffer.numpy().data, bucket.data_bytes)
        found = self.digest(bucket, buffer) if digest is None else digest
        return bool(tag == self._tag(found, packed, index))

    def _tag(self, digest: int, packed: int, index: int) -> int:
        data = _TAGGED.pack(digest.to_bytes(16, "little"), packed, index)
        return int.from_bytes(derived(self._key, b"bucket", data, 8), "little")


# ---- The buffers of buckets: of the version that a trainer sends, and of a staged version, which an engine's workers may read
# Buffers that other processes of this machine can map are memory files without a name (memfd). The limit of /dev/shm, 64 MiB in
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
        buffer = torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)
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
        _page_lock(whole)
    return [whole[end - aligned(size) :][:size] for size, end in zip(sizes, ends, strict=True)]


def _page_lock(buffer: torch.Tensor) -> None:
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


# ---- Buckets in buffers


def allocate(buckets: Sequence[Bucket], pin: bool, shared: bool = False) -> list[torch.Tensor]:
    """Return a uint8 buffer per bucket, zeroed, as the checksum covers padding. `shared`: in one file, for other processes."""
    if shared:
        return arena([bucket.total_bytes for bucket in buckets], pin)
    return [torch.zeros(bucket.total_bytes, dtype=torch.uint8, pin_memory=pin) for bucket in buckets]


def tensors_of(manifest: Manifest, buckets: Sequence[Bucket], buffers: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return the tensors of several buckets by manifest index, in the manifest's order, as views into `buffers`."""
    out: dict[int, torch.Tensor] = {}
    for bucket, buffer in zip(buckets, buffers, strict=True):
        for entry in bucket.entries:
            spec = manifest.tensors[entry.tensor]
            flat = buffer[entry.offset : entry.offset + entry.nbytes]
            out[entry.tensor] = flat.view(getattr(torch, spec.dtype)).view(spec.shape)
    return dict(sorted(out.items()))


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
    """A sender, rank 0 of the link, and the receivers. All move the same buckets in the same order, each from one thread."""

    sent_bytes = 0  # rank 0: the bytes sent to each receiver so far

    def set_changed(self, index: int, changed: Any) -> None:  # noqa: B027 - most links send buckets whole
        """Set at rank 0 the changed words of the next bucket, as `DeltaLink.set_changed` does."""

    def send(self, index: int, buffer: torch.Tensor) -> Transfer:
        """Start at rank 0 to send bucket `index`, `buffer` (uint8, host memory), to all receivers. Raises RuntimeError."""
        raise NotImplementedError

    def receive(self, index: int, buffer: torch.Tensor) -> Transfer:
        """Start at a receiver to fill `buffer`, which has the bucket's size. Raises RuntimeError."""
        raise NotImplementedError

    def set_timeout(self, seconds: float) -> None:  # noqa: B027 - most links can be ended at any moment
        """Let buckets that start from now on block a thread for at most `seconds`, even if `abort` cannot end them."""

    @abstractmethod
    def abort(self) -> None:
        """Leave for good, and free the threads that wait for a transfer. Idempotent, from any thread."""
