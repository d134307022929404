"""What shows that a value of a store, or a bucket, comes from somebody who has the group's key.

A key is 32 random bytes, another for each group. It reaches the members over gRPC, or in their environment. The connections
themselves are neither authenticated nor encrypted: gloo, NCCL and HCCL have nothing for it. So whoever reaches them can still
read what passes, and end a group by what he deletes, overwrites or connects to. What gloo's ranks of a trainer tell each other
over such a connection carries no tag, nor does what NCCL and HCCL keep in the store.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from runtime.types import PolicyVersion
from runtime.weights.plan import TRAILER, Bucket

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
