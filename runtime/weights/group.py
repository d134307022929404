"""What a transport implements: `WeightGroup`, the connected members of one epoch, and `Link`, which moves one sender's buckets.

`rendezvous` opens a group by the name of its transport.

Nothing moves before the sender announces it (`announce`, `await_announcement`). A receiver may therefore be posted a whole
training step ahead: it occupies no device stream, and deadlines count from the announcement.
"""

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
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
import xxhash

from runtime import timeouts
from runtime.errors import UserError
from runtime.types import PolicyVersion
from runtime.weights.plan import TRAILER, Bucket, GroupAddress, Manifest, aligned

# ---- Authentication
#
# What shows that a value of a store, or a bucket, comes from somebody who has the group's key.
#
# A key is 32 random bytes, another for each group. It reaches the members over gRPC, or in their environment. The
# connections themselves are neither authenticated nor encrypted: gloo, NCCL and HCCL have nothing for it. So whoever
# reaches them can still read what passes, and end a group by what he deletes, overwrites or connects to. What gloo's ranks
# of a trainer tell each other over such a connection carries no tag, nor does what NCCL and HCCL keep in the store.

KEY_BYTES = 32

_NAME_BYTES = 16  # of what a name in the store is hashed to
_TAG_BYTES = 16  # before each value in the store
_TAGGED = struct.Struct("<16sqI")  # xxh3-128 of a bucket, its packed version, its index


def new_key() -> bytes:
    """The key of one group: `KEY_BYTES` random bytes."""
    return secrets.token_bytes(KEY_BYTES)


def derived(key: bytes, purpose: bytes, data: bytes, size: int) -> bytes:
    """BLAKE2b of `data`, `size` bytes, under `key`; independent of that for any other `purpose`, of at most 16 bytes."""
    return hashlib.blake2b(data, key=key, person=purpose, digest_size=size).digest()


class ForgedValue(RuntimeError):
    """A value in a store was not written with the group's key."""


class AuthenticatedStore(dist.Store):
    """A store of torch.distributed whose names are hashed with the group's key, and whose values carry a tag by it.

    A stranger can list the names, delete and overwrite; he can neither foretell a name, nor write a value that is taken, nor
    put one value in the place of another. Counters (`add`) have hashed names, but no tags.

    torch's C++ code calls these methods, of a Python object that it does not keep: whoever hands it over does.
    """

    def __init__(self, inner: Any, key: bytes, prefix: str = ""):
        """`prefix` comes before all names."""
        super().__init__()
        self._inner = inner
        self._key = key
        self._prefix = prefix

    def within(self, prefix: str) -> AuthenticatedStore:
        """The part of this store whose names begin with `prefix` and a slash."""
        return AuthenticatedStore(self._inner, self._key, f"{self._prefix}{prefix}/")

    def unauthenticated(self) -> Any:
        """As torch's own store, under a prefix that nobody foretells: for backends whose threads may not call Python."""
        return dist.PrefixStore(self._name(""), self._inner)

    def set(self, key: str, value: str | bytes) -> None:
        name, content = self._name(key), value.encode() if isinstance(value, str) else bytes(value)
        self._inner.set(name, self._tag(name, content) + content)

    def get(self, key: str) -> bytes:
        """Raises ForgedValue; RuntimeError where it is not there within the store's own timeout."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:  # type: ignore[override]
        """As `get`."""
        names = [self._name(key) for key in keys]
        return [self._verified(*each) for each in zip(keys, names, map(bytes, self._inner.multi_get(names)), strict=True)]

    def await_value(self, key: str, seconds: float) -> bytes:
        """As `get`, once it is there, within `seconds`."""
        self.wait([key], timedelta(seconds=seconds))
        return self.get(key)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:  # type: ignore[override]
        """Until the names are there, whoever wrote them."""
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
            raise ForgedValue(
                f"{self._prefix}{key} in the group's store was written by somebody who does not have the group's key"
            )
        return content


class BucketTags:
    """The tags in the trailers of a group's buckets, 8 bytes each.

    Of the data xxh3-128 is taken, under a seed that the key gives; of that, the version and the bucket's index BLAKE2b, under
    the key: a universal hash and a pseudorandom function, as in UMAC (RFC 4418). xxh3 is as fast as memory, which no
    cryptographic hash is, but nobody has proven it universal: that no change of the data leaves it alike for more than few
    seeds is what tests of it found.
    """

    def __init__(self, key: bytes):
        self._key = key
        self._seed = int.from_bytes(derived(key, b"seed", b"", 8), "little")

    def hasher(self) -> xxhash.xxh3_128:
        """Takes a bucket's data by pieces; its `intdigest` is what `digest` returns."""
        return xxhash.xxh3_128(seed=self._seed)

    def digest(self, bucket: Bucket, buffer: torch.Tensor) -> int:
        """Of everything before the trailer."""
        return xxhash.xxh3_128_intdigest(buffer.numpy()[: bucket.data_bytes].data, seed=self._seed)

    def stamp(self, index: int, bucket: Bucket, buffer: torch.Tensor, version: PolicyVersion) -> int:
        """Write the trailer of bucket `index`; returns the digest."""
        digest, packed = self.digest(bucket, buffer), version.pack()
        TRAILER.pack_into(buffer.numpy().data, bucket.data_bytes, self._tag(digest, packed, index), packed)
        return digest

    def verify(self, index: int, bucket: Bucket, buffer: torch.Tensor, digest: int | None = None) -> bool:
        """Whether the trailer is that of bucket `index`, as it is here. `digest`: its own, where it is known."""
        tag, packed = TRAILER.unpack_from(buffer.numpy().data, bucket.data_bytes)
        found = self.digest(bucket, buffer) if digest is None else digest
        return bool(tag == self._tag(found, packed, index))

    def _tag(self, digest: int, packed: int, index: int) -> int:
        data = _TAGGED.pack(digest.to_bytes(16, "little"), packed, index)
        return int.from_bytes(derived(self._key, b"bucket", data, 8), "little")


# ----------------------------------------------------------------------------------------------------------------------
# The buffers of buckets: those that a trainer publishes, and those of a staged version, which an engine's workers may read.
#
# Buffers that other processes of this machine can map are memory files without a name (memfd). The limit of /dev/shm, which is
# 64 MiB in a container by default, does not apply to them. The kernel frees such a file once the last process that holds it has
# ended, for whatever reason.


AVAILABLE = hasattr(os, "memfd_create")  # on Linux

_FILES: dict[int, int] = {}  # descriptors of the buffers that live, by address

_POPULATE_WRITE = 23  # of madvise, since Linux 5.14


class Location(NamedTuple):
    """Where one tensor lies. Plain values, so that it travels by any codec."""

    name: str
    path: str  # readable by every process of the same user, as long as the buffer lives
    offset: int  # bytes
    dtype: str  # torch's name
    shape: list[int]


def memory_file(nbytes: int) -> torch.Tensor:
    """A zeroed uint8 tensor [nbytes] that `locate` knows. Raises UserError where the system has no memory files."""
    if not AVAILABLE:
        raise UserError("services.rollout.engine: vllm needs Linux, whose memory files carry the weights to its workers")
    descriptor = os.memfd_create("sluice-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, nbytes)
        # The size is sealed: a process that maps the file would be killed when it touches a part that was cut off.
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        buffer = torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)
    except BaseException:
        os.close(descriptor)
        raise
    _FILES[buffer.data_ptr()] = descriptor
    weakref.finalize(buffer.untyped_storage(), _forget, buffer.data_ptr())
    return buffer


def populate(buffer: torch.Tensor) -> None:
    """Have the pages made now of the memory in which `buffer` lies, an arena: writing to a page for the first time takes ten
    times as long as any other. Its bytes stay what they are. Nothing is done where the kernel knows no such order."""
    whole = buffer.untyped_storage()
    # Python's mmap.madvise would hold Python's lock.
    ctypes.CDLL(None).madvise(ctypes.c_void_p(whole.data_ptr()), ctypes.c_size_t(whole.nbytes()), _POPULATE_WRITE)


def _forget(address: int) -> None:
    os.close(_FILES.pop(address))


def arena(sizes: Sequence[int], pin: bool = False) -> list[torch.Tensor]:
    """As `memory_file`, one tensor for each of `sizes`, all in one memory file. `pin` page-locks it for copies by CUDA."""
    ends = list(accumulate(aligned(size) for size in sizes))
    whole = memory_file(max(ends, default=1))
    if pin:
        _page_lock(whole)
    return [whole[end - aligned(size) :][:size] for size, end in zip(sizes, ends, strict=True)]


def _page_lock(buffer: torch.Tensor) -> None:
    """Never run on hardware so far. Raises RuntimeError when CUDA refuses."""
    runtime: Any = torch.cuda.cudart()
    address = buffer.data_ptr()
    torch.cuda.check_error(runtime.cudaHostRegister(address, buffer.numel(), 0))
    # Finalizers run newest first: the lock goes before the memory.
    weakref.finalize(buffer.untyped_storage(), runtime.cudaHostUnregister, address)


def in_memory_file(buffer: torch.Tensor) -> torch.Tensor:
    """`buffer`, uint8, or a copy where it does not lie in a memory file."""
    if buffer.untyped_storage().data_ptr() in _FILES:
        return buffer
    return memory_file(buffer.numel()).copy_(buffer)


def file_of(buffer: torch.Tensor) -> tuple[int, int]:
    """The descriptor of the memory file in which `buffer` lies, uint8, and its offset there."""
    return _FILES[buffer.untyped_storage().data_ptr()], int(buffer.storage_offset())


def locate(tensors: Mapping[str, torch.Tensor]) -> tuple[list[Location], list[torch.Tensor]]:
    """Where `tensors` lie, and copies of those that were not in shared memory: keep the copies until they have been read."""
    copies = []
    locations = []
    for name, tensor in tensors.items():
        descriptor = _FILES.get(tensor.untyped_storage().data_ptr())
        offset = int(tensor.storage_offset()) * tensor.itemsize
        if descriptor is None or not tensor.is_contiguous():
            flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
            copy = memory_file(max(1, flat.numel()))
            copy[: flat.numel()].copy_(flat)
            copies.append(copy)
            descriptor, offset = _FILES[copy.data_ptr()], 0
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
        locations.append(Location(name, path, offset, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)))
    return locations, copies


class Mapped:
    """Buffers of another process, mapped here while the tensors made of them live."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def tensor(self, location: Location) -> torch.Tensor:
        """A view of the other process's memory. Raises OSError when that process has given it up."""
        buffer = self._buffers.get(location.path)
        if buffer is None:
            descriptor = os.open(location.path, os.O_RDWR)
            try:
                buffer = torch.frombuffer(mmap.mmap(descriptor, 0), dtype=torch.uint8)
            finally:
                os.close(descriptor)
            self._buffers[location.path] = buffer
        dtype: torch.dtype = getattr(torch, location.dtype)
        nbytes = math.prod(location.shape) * dtype.itemsize
        return buffer[location.offset : location.offset + nbytes].view(dtype).view(location.shape)


# ----------------------------------------------------------------------------------------------------------------------
# Buckets in buffers.


def allocate(buckets: Sequence[Bucket], pin: bool, shared: bool = False) -> list[torch.Tensor]:
    """One zeroed uint8 buffer per bucket, trailer included. Zeroed, because the checksum covers the padding.

    `shared` ones lie in one memory file, which other processes can map.
    """
    if shared:
        return arena([bucket.total_bytes for bucket in buckets], pin)
    return [torch.zeros(bucket.total_bytes, dtype=torch.uint8, pin_memory=pin) for bucket in buckets]


def tensors_of(manifest: Manifest, buckets: Sequence[Bucket], buffers: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """`tensors_in` of several buckets, in the manifest's order."""
    out: dict[int, torch.Tensor] = {}
    for bucket, buffer in zip(buckets, buffers, strict=True):
        out.update(tensors_in(manifest, bucket, buffer))
    return dict(sorted(out.items()))


def tensors_in(manifest: Manifest, bucket: Bucket, buffer: torch.Tensor) -> dict[int, torch.Tensor]:
    """The tensors of one bucket, by their place in the manifest, as views into `buffer`."""
    out = {}
    for entry in bucket.entries:
        spec = manifest.tensors[entry.tensor]
        flat = buffer[entry.offset : entry.offset + entry.nbytes]
        out[entry.tensor] = flat.view(getattr(torch, spec.dtype)).view(spec.shape)
    return out


def clear(bucket: Bucket, buffer: torch.Tensor) -> None:
    """Zero the padding, which another bucket may have used."""
    for gap in bucket.padding:
        buffer[gap] = 0


# ----------------------------------------------------------------------------------------------------------------------


class Taken(NamedTuple):
    """What a transport did to fill a bucket: its digest (`BucketTags.digest`), and the seconds of the copy and of the hash."""

    digest: int
    copy_seconds: float
    hash_seconds: float


class Transfer(Protocol):
    """A bucket under way."""

    def wait(self, timeout: float) -> Taken | None:
        """Return when the buffer may be reused (sender) or is filled (receiver). Raises RuntimeError, also after `timeout`.

        A receiver gets what the transport knows of the bucket if it copied and hashed it itself, else None.
        """


class Deferred(partial[None]):
    """A bucket under way, as the call that waits for it, which lacks the timeout of `Transfer.wait` alone."""

    def wait(self, timeout: float) -> None:
        self(timeout)


class Link(ABC):
    """A sender, rank 0 of the link, and the receivers. All move the same buckets in the same order, each from one thread."""

    sent_bytes = 0
    """Rank 0: what went to each receiver so far."""

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Memory, uint8 [nbytes], out of which rank 0 can send."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def tell(self, index: int, changed: Any) -> None:  # noqa: B027 - most links send buckets whole
        """Rank 0: as `DeltaEncoder.tell`, of the bucket that is sent next."""

    @abstractmethod
    def send(self, index: int, buffer: torch.Tensor) -> Transfer:
        """Rank 0: start to move bucket `index`, `buffer` (uint8, host memory), to all others. Raises RuntimeError."""

    @abstractmethod
    def receive(self, index: int, buffer: torch.Tensor) -> Transfer:
        """The others: start to fill `buffer`, which has the bucket's size. Raises RuntimeError."""

    def bound(self, seconds: float) -> None:  # noqa: B027 - most links can be ended at any moment
        """A bucket that starts to move from now on blocks a thread for at most `seconds`, even if `abort` cannot end it."""

    @abstractmethod
    def abort(self) -> None:
        """Leave for good: threads that wait for a transfer are freed. Idempotent, from any thread."""


class WeightGroup(ABC):
    """The first ranks send, each its own buckets, and the others receive them all; rank 0 leads. Every member makes the same
    calls in the same order, from one thread."""

    sent_bytes = 0
    """A sender: what went from here to each receiver so far."""

    def __init__(self, address: GroupAddress, name: str):
        self.name = name
        self.epoch = address.epoch
        self.rank = address.rank
        self.world_size = address.world_size
        self.tags = BucketTags(address.key)
        self.aborted = False

    def describe(self, manifest: Manifest) -> None:  # noqa: B027 - most transports move bytes, whatever they are
        """What the buckets hold, before they are sent or received."""

    @abstractmethod
    def announce(self, version: PolicyVersion) -> None:
        """The senders: the transfer of `version` begins, which rank 0 tells the receivers."""

    @abstractmethod
    def await_announcement(self, version: PolicyVersion) -> None:
        """The receivers: block until `announce`, `abort`, or the loss of rank 0. Raises RuntimeError for the latter two."""

    def tell(self, index: int, changed: Any) -> None:  # noqa: B027 - of use to deltas alone
        """Its root: as `DeltaEncoder.tell`, of the bucket that is sent next."""

    @abstractmethod
    def send(self, index: int, buffer: torch.Tensor) -> Transfer:
        """Its root: start to move bucket `index`, `buffer` (uint8, host memory). Raises RuntimeError, as does its `wait`."""

    @abstractmethod
    def receive(self, index: int, buffer: torch.Tensor, root: int) -> Transfer:
        """The receivers: start to fill `buffer`, which has the bucket's size. Raises RuntimeError, as does its `wait`.

        Where the group has one sender, that is the root of all buckets.
        """

    def settle(self, nbytes: int, give_up: float) -> int:
        """The senders: say that the receivers have this sender's part of the transfer, which is `nbytes`.

        Rank 0 blocks until the receivers have the parts of all senders, at most until the monotonic time `give_up`, and returns
        the bytes of all parts. Raises RuntimeError, which names the sender and says what became of its part.
        """
        return nbytes

    def report_failure(self, message: str) -> None:  # noqa: B027 - a sender that is alone has nobody to tell
        """The senders except rank 0: tell rank 0 that this sender's part has failed."""

    def called(self, root: int) -> str | None:
        """The name of sender `root` for messages; None when there is only one sender."""
        return None

    def bound(self, seconds: float) -> None:  # noqa: B027 - most transports can be ended at any moment
        """A bucket that starts to move from now on blocks a thread for at most `seconds`, even if `abort` cannot end it."""

    @abstractmethod
    def abort(self) -> None:
        """Leave for good: threads blocked here fail at once, the peers as soon as they see it. Idempotent, from any thread.

        A group also ends in order by this, but only once every receiver has verified the last transfer: a bucket that has
        arrived may still fail when its connection closes. A process should leave its groups before it exits.
        """


class PendingGroup(ABC):
    """A rendezvous that is open until `connect` returns or fails, `abort` is called, or this object is dropped."""

    address: GroupAddress
    """Rank 0's address; each other member gets it with its own rank in it."""

    @abstractmethod
    def connect(self) -> WeightGroup:
        """Block until every member is there; once only.

        Raises ServiceFault, phase "rendezvous", with the ranks that did not come within the address's timeout.
        """

    @abstractmethod
    def abort(self) -> None:
        """Make `connect` fail here, and from rank 0 also at every member that has come. Idempotent, from any thread."""


def wait_until(transfer: Transfer, give_up: float) -> Taken | None:
    """`transfer.wait` until the monotonic time `give_up`. Raises RuntimeError."""
    return transfer.wait(max(give_up - time.monotonic(), timeouts.TORCH_LEAST))
