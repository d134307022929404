"""The sending side of a publication: the policy is gathered into flat buckets, which a thread sends as they become whole."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import TypeVar

import torch
import xxhash
from msgspec import Struct

from runtime.errors import DeadlineExceeded, ServiceFault, SluiceError
from runtime.types import PolicyVersion
from runtime.weights import shared as memory
from runtime.weights.gloo_mesh import drop_frames, reason
from runtime.weights.group import Transfer, WeightGroup
from runtime.weights.plan import TRAILER, Bucket, Manifest, plan_buckets, plan_slots, predecessors

T = TypeVar("T")

# Buckets under way at once: two on the wire, so that it never waits while others are hashed or verified.
DEPTH = 4


class SendResult(Struct, frozen=True):
    """`nbytes` as the transport sent them to each receiver, trailers included.

    `seconds` from the announcement to the last bucket.
    """

    nbytes: int
    seconds: float


class WeightSender:
    """Owns the buffers of those buckets of a manifest that move from it. They outlive epochs: the group is `send`'s argument.

    A version is begun (`begin`), gathered (`fill`), and sent. `send` may come first: a bucket leaves as soon as it is whole.

    With `whole` every bucket has a buffer of its own, so that a version can be sent again, in another epoch, until the next
    is begun. Otherwise buckets share a few: `fill` waits for those that are to leave first, and without a transfer that takes
    them drops what it is given.
    """

    def __init__(self, manifest: Manifest, *, number: int = 0, pin: bool = False, whole: bool = True):
        """`number`: which of the manifest's senders it is. `pin` page-locks the buffers, for copies from an accelerator. Raises
        InvalidMessage for a manifest without a plan."""
        self.buckets = plan_buckets(manifest)
        self._manifest = manifest
        self._whole = whole
        self._own = [(index, bucket) for index, bucket in enumerate(self.buckets) if bucket.root == number]
        own = [bucket for _, bucket in self._own]
        slots = tuple(range(len(own)))
        if not whole:
            slots = plan_slots(_held(manifest, self.buckets, number), manifest.bucket_bytes, DEPTH + 1, number)
        self._before = predecessors(slots)
        self._buffers = _allocate_slots(own, slots, pin)
        self._bucket_of = {entry.tensor: place for place, bucket in enumerate(own) for entry in bucket.entries}
        self._tensors = sorted(self._bucket_of)
        found = tensors_of(manifest, own, self._buffers)
        self._views = [found[tensor] for tensor in self._tensors]
        self._changed = threading.Condition()  # guards what follows
        self._missing = [len(bucket.entries) for bucket in own]  # how many tensors each still lacks
        self._digests: dict[int, int] = {}  # of the buckets of this version that were sent, where it can be sent again
        self.intact = True
        """Whether what the buckets hold is, as far as is known, what was gathered."""
        self._group: WeightGroup | None = None  # of the transfer under way
        self._taken = 0  # how many buckets its receivers have

    def begin(self, timeout: float) -> None:
        """Forget the version that the buckets hold.

        Blocks while a transfer reads them; raises DeadlineExceeded after `timeout` seconds.
        """
        with self._changed:
            self._await_idle("snapshot", timeout)
            self._digests, self.intact = {}, True
            self._missing = [len(bucket.entries) for _, bucket in self._own]

    @torch.no_grad()
    def fill(self, tensors: Iterable[torch.Tensor]) -> None:
        """Take every one of its tensors, in the manifest's order and on any device; they are cast to the manifest's dtypes.

        All are taken from `tensors`, also once the transfer has failed: what yields them may be a collective.
        """
        for place, tensor in enumerate(tensors):
            bucket = self._bucket_of[self._tensors[place]]
            if self._has_room(bucket):
                self._views[place].copy_(tensor)
                with self._changed:
                    self._missing[bucket] -= 1
                    if not self._missing[bucket]:
                        self._changed.notify_all()

    def send(self, group: WeightGroup, version: PolicyVersion, deadline: float) -> Future[SendResult]:
        """Send its buckets, stamped with `version`, from a thread; each must be whole and taken within `deadline` seconds.
        Sender 0's result comes once the parts of all senders are taken, and counts them all.

        Blocks while another transfer ends; raises DeadlineExceeded after `deadline` seconds. On any failure the group is
        aborted, which fails the receivers too; the future raises ServiceFault, phase "transfer", or UserError where the user
        can mend it; of phase "snapshot", where a bucket that is sent again is not what it was.
        """
        with self._changed:
            self._await_idle("transfer", deadline)
            self._group, self._taken = group, 0
        return in_thread(f"send-{version}", lambda: self._send(group, version, deadline))

    def abort(self) -> None:
        """End the transfer under way, if there is one, by leaving its group for good. Idempotent, from any thread."""
        with self._changed:
            group = self._group
        if group is not None:
            group.abort()
            with self._changed:
                self._changed.notify_all()

    def _await_idle(self, phase: str, timeout: float) -> None:
        if not self._changed.wait_for(lambda: self._group is None, timeout):
            raise DeadlineExceeded("sender", phase, "the transfer before still reads the buckets", timeout)

    def _has_room(self, bucket: int) -> bool:
        """Whether its buffer is free, once that is certain: a transfer ends by its own deadline."""
        before = self._before[bucket]
        if before is None:
            return True
        with self._changed:
            self._changed.wait_for(lambda: self._taken > before or self._ended)
            return not self._ended

    @property
    def _ended(self) -> bool:
        """Whether no transfer takes buckets any more."""
        return self._group is None or self._group.aborted

    def _send(self, group: WeightGroup, version: PolicyVersion, deadline: float) -> SendResult:
        before, give_up = group.sent_bytes, time.monotonic() + deadline
        began = time.monotonic()
        try:
            if self._own:
                self._await_whole(0, group, give_up)
                began = time.monotonic()
            group.describe(self._manifest)
            group.bound(deadline)
            group.announce(version)
            self._send_all(group, version, give_up)
            sent = group.settle(group.sent_bytes - before, give_up)
        except RuntimeError as error:
            message = f"{self._where(version)}: {reason(error)}"
            group.report_failure(message)
            group.abort()
            if time.monotonic() >= give_up:
                raise DeadlineExceeded(group.name, "transfer", message, deadline) from error
            raise ServiceFault(group.name, "transfer", message, deadline) from error
        except SluiceError as error:
            group.report_failure(str(error))
            group.abort()
            raise
        finally:
            with self._changed:
                self._group = None
                self._changed.notify_all()
        return SendResult(sent, time.monotonic() - began)

    def _where(self, version: PolicyVersion) -> str:
        """How far it has come."""
        if self._taken == len(self._own):
            return f"version {version}"
        return f"bucket {self._own[self._taken][0]} of {len(self.buckets)} of version {version} was not taken"

    def _send_all(self, group: WeightGroup, version: PolicyVersion, give_up: float) -> None:
        pending: list[Transfer] = []
        for place, ((index, bucket), buffer) in enumerate(zip(self._own, self._buffers, strict=True)):
            if self._missing[place]:
                if self._before[place] is not None:  # its buffer may be that of one under way
                    self._take(pending, 0, give_up)
                self._await_whole(place, group, give_up)
            if not self._whole:
                clear(bucket, buffer)
            self._require_same(index, stamp(bucket, buffer, version), group.name)
            pending.append(group.send(index, buffer))
            self._take(pending, DEPTH - 1, give_up)
        self._take(pending, 0, give_up)

    def _require_same(self, index: int, digest: int, name: str) -> None:
        """A bucket that changed since it was sent first is not certified by a checksum of what it has become."""
        if self._whole and self._digests.setdefault(index, digest) != digest:
            self.intact = False
            message = f"bucket {index} of {len(self.buckets)} has changed in memory since it was gathered"
            raise ServiceFault(name, "snapshot", message)

    def _await_whole(self, index: int, group: WeightGroup, give_up: float) -> None:
        with self._changed:
            there = self._changed.wait_for(lambda: group.aborted or not self._missing[index], give_up - time.monotonic())
        if group.aborted:
            raise RuntimeError("the group was aborted")
        if not there:
            raise RuntimeError("it was not gathered in time")

    def _take(self, pending: list[Transfer], most: int, give_up: float) -> None:
        """Wait until at most `most` are under way."""
        while len(pending) > most:
            wait_until(pending.pop(0), give_up)
            with self._changed:
                self._taken += 1
                self._changed.notify_all()


def _held(manifest: Manifest, buckets: Sequence[Bucket], number: int) -> list[Bucket]:
    """Those whose tensors sender `number` has: who shares a bucket's first tensor shares them all."""
    holders = [manifest.tensors[bucket.entries[0].tensor].held_by for bucket in buckets]
    return [bucket for bucket, held_by in zip(buckets, holders, strict=True) if not held_by or number in held_by]


def allocate(buckets: Sequence[Bucket], pin: bool, shared: bool = False) -> list[torch.Tensor]:
    """One zeroed uint8 buffer per bucket, trailer included. Zeroed, because the checksum covers the padding.

    `shared` ones lie in one memory file, which other processes can map.
    """
    if shared:
        return memory.arena([bucket.total_bytes for bucket in buckets], pin)
    return [torch.zeros(bucket.total_bytes, dtype=torch.uint8, pin_memory=pin) for bucket in buckets]


def _allocate_slots(buckets: Sequence[Bucket], slots: Sequence[int], pin: bool) -> list[torch.Tensor]:
    """Each bucket's buffer, which is that of its slot as far as the bucket reaches."""
    largest: dict[int, Bucket] = {}
    for bucket, slot in zip(buckets, slots, strict=True):
        largest[slot] = max(largest.get(slot, bucket), bucket, key=lambda each: each.data_bytes)
    buffers = dict(zip(largest, allocate(list(largest.values()), pin, memory.AVAILABLE), strict=True))
    return [buffers[slot][: bucket.total_bytes] for bucket, slot in zip(buckets, slots, strict=True)]


def views(manifest: Manifest, buckets: Sequence[Bucket], buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The manifest's tensors, in its order, as views into `buffers`."""
    found = tensors_of(manifest, buckets, buffers)
    return [found[index] for index in range(len(found))]


def tensors_of(manifest: Manifest, buckets: Sequence[Bucket], buffers: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """`tensors_in`, of several buckets."""
    out: dict[int, torch.Tensor] = {}
    for bucket, buffer in zip(buckets, buffers, strict=True):
        out.update(tensors_in(manifest, bucket, buffer))
    return out


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


def checksum(bucket: Bucket, buffer: torch.Tensor) -> int:
    """xxh3-64 of everything before the trailer."""
    return xxhash.xxh3_64_intdigest(buffer.numpy()[: bucket.data_bytes].data)


def stamp(bucket: Bucket, buffer: torch.Tensor, version: PolicyVersion) -> int:
    """Write the trailer; returns the checksum in it."""
    digest = checksum(bucket, buffer)
    TRAILER.pack_into(buffer.numpy().data, bucket.data_bytes, digest, version.pack())
    return digest


def wait_until(transfer: Transfer, give_up: float) -> int | None:
    """`transfer.wait` until the monotonic time `give_up`. Raises RuntimeError."""
    # torch reads a timeout of 0 as none at all.
    return transfer.wait(max(give_up - time.monotonic(), 0.001))


def in_thread(name: str, work: Callable[[], T]) -> Future[T]:
    """Run `work` in a thread of its own, which ends with it."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    threading.Thread(target=_complete, args=(future, work), name=name, daemon=True).start()
    return future


def _complete(future: Future[T], work: Callable[[], T]) -> None:
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001 - it is the caller's, through the future
        drop_frames(error)
        future.set_exception(error)
    else:
        future.set_result(result)
    del future, work  # the error's traceback holds this frame
