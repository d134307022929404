"""The receiving side of a weight sync. A version is staged whole beside the weights in use.

The receiver outlives epochs: the group is an argument of `receive`. A reception may be posted long before the
sender starts, and two clocks apply. Until the sender's announcement only `abort`, the loss of the sender, or the group's
backstop of hours ends the wait, since a whole training step may lie in it. From the announcement on, everything must have
arrived within `deadline` seconds. A coordinator therefore posts early, keeps its own deadline from the moment at which the
trainer has made the version, and enforces it with `abort`.

The future of a reception raises ServiceFault of phase "announce" (nothing announced) or "transfer" (DeadlineExceeded when
late), both with the group aborted; of phase "verify", naming the buckets, with the group whole; Cancelled after `abort`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch
import xxhash

from runtime.commands import WeightsReceived
from runtime.errors import Cancelled, DeadlineExceeded, InvariantViolated, ServiceFault, SluiceError
from runtime.process import spans
from runtime.process.aio import in_thread
from runtime.process.spans import PUBLICATION
from runtime.types import PolicyVersion
from runtime.weights.authentication import BucketTags
from runtime.weights.gloo_mesh import reason
from runtime.weights.group import Taken, Transfer, WeightGroup, allocate, tensors_of, wait_until
from runtime.weights.plan import TRAILER, Bucket, Manifest, plan_buckets
from runtime.weights.sender import DEPTH, SendBuffers

Tensors = dict[str, torch.Tensor]
BufferOf = Callable[[int], torch.Tensor]

# Buckets that are asked for at once: more than are under way, so that a transport's threads always have one to wait for.
AHEAD = DEPTH + 2


class Reception:
    """To be carried out in a thread: `await_sender`, then `take`. A failure aborts the group, but a wrong checksum does not."""

    def __init__(self, group: WeightGroup, buckets: Sequence[Bucket], version: PolicyVersion, deadline: float):
        self.version = version
        self.tags = group.tags
        self._group = group
        self._buckets = buckets
        self._deadline = deadline  # seconds from the announcement to the last bucket
        self.began = 0.0  # the announcement, on the monotonic clock
        self.waiting = self.copying = self.hashing = 0.0
        """Seconds since then: `WeightsReceived` has what they are."""

    @property
    def give_up(self) -> float:
        """When every bucket must have arrived, on the monotonic clock."""
        return self.began + self._deadline

    def await_sender(self) -> None:
        """Block until the sender's announcement. Raises ServiceFault, phase "announce", or Cancelled."""
        group, version = self._group, self.version
        try:
            group.await_announcement(version)
        except RuntimeError as error:
            if group.aborted:
                raise Cancelled(f"{group.name}: version {version} was withdrawn before its transfer") from error
            group.abort()
            raise ServiceFault(group.name, "announce", f"the sender of version {version} is lost: {reason(error)}") from error
        self.began = time.monotonic()
        group.bound(self._deadline)

    def take(self, buffer_of: BufferOf) -> None:
        """Receive every bucket, also after a bad one: the group stays usable.

        `buffer_of(index)` is where a bucket goes: uint8, of its size.

        Raises ServiceFault of phase "transfer" (DeadlineExceeded when late), or "verify", naming the buckets; Cancelled.
        """
        pending: list[Transfer] = []
        wrong: list[str] = []
        posted = index = 0
        try:
            for index in range(len(self._buckets)):
                while posted < min(index + AHEAD, len(self._buckets)):
                    pending.append(self._group.receive(posted, buffer_of(posted), self._buckets[posted].root))
                    posted += 1
                before = time.monotonic()
                taken = wait_until(pending.pop(0), self.give_up)
                self._account(time.monotonic() - before, taken)
                wrong += self._faults(index, buffer_of(index), taken)
        except RuntimeError as error:
            raise self._failure(index, error) from error
        if wrong:
            raise ServiceFault(self._group.name, "verify", f"version {self.version}: {'; '.join(wrong)}", self._deadline)

    def _account(self, waited: float, taken: Taken | None) -> None:
        """A bucket was there after `waited` seconds, for the last of which the transport was at work on it."""
        worked = 0.0 if taken is None else taken.copy_seconds + taken.hash_seconds
        share = min(1.0, waited / worked) if worked else 0.0
        self.copying += share * taken.copy_seconds if taken else 0.0
        self.hashing += share * taken.hash_seconds if taken else 0.0
        self.waiting += max(0.0, waited - worked)

    def checksum(self, buffer_of: BufferOf) -> str:
        """Of the version that was taken: the same at each member of the group that has the same bytes."""
        trailers = (buffer_of(index)[bucket.data_bytes :].numpy().tobytes() for index, bucket in enumerate(self._buckets))
        return f"epoch {self._group.epoch}: {xxhash.xxh3_64_hexdigest(b''.join(trailers))}"

    def _failure(self, index: int, error: RuntimeError) -> SluiceError:
        group, version = self._group, self.version
        if group.aborted:
            return Cancelled(f"{group.name}: version {version} was withdrawn during its transfer")
        group.abort()
        source = "" if (called := group.called(self._buckets[index].root)) is None else f" from {called}"
        message = f"bucket {index} of {len(self._buckets)} of version {version} did not arrive{source}: {reason(error)}"
        late = time.monotonic() >= self.give_up
        return (DeadlineExceeded if late else ServiceFault)(group.name, "transfer", message, self._deadline)

    def _faults(self, index: int, buffer: torch.Tensor, taken: Taken | None) -> list[str]:
        """`taken`: with the digest of what `buffer` holds, unless it is still to be made."""
        bucket = self._buckets[index]
        where = f"bucket {index} of {len(self._buckets)}"
        before = time.monotonic()
        holds = self._group.tags.verify(index, bucket, buffer, None if taken is None else taken.digest)
        self.hashing += time.monotonic() - before
        if not holds:
            return [f"{where}: the checksum does not match"]
        _, packed = TRAILER.unpack_from(buffer.numpy().data, bucket.data_bytes)
        if packed != self.version.pack():
            return [f"{where} is of version {PolicyVersion.unpack(packed)}"]
        return []


class Staged:
    """A verified version in a set of staging buckets, readable until `release`, or after `adopt` until the next `adopt`."""

    def __init__(
        self, version: PolicyVersion, took: WeightsReceived, buckets: _Set, receiver: WeightReceiver, tags: BucketTags
    ):
        """`took`: where the time went. `tags`: those of the group that it came over."""
        self.version = version
        self.took = took
        self._set = buckets
        self._receiver = receiver
        self._tags = tags
        self._sender: SendBuffers | None = None

    def tensors(self) -> Tensors:
        """Views into the staging buckets by Hugging Face name, for `RolloutEngine.stage`."""
        return self._set.tensors

    def adopt(self) -> None:
        """To be called after the swap: the engine uses these buckets from now on, and the buckets adopted before are free."""
        self._receiver._settle(self, adopted=True)

    def release(self, held: bool = False) -> None:
        """Give the staging buckets back: after a swap that copied them (`held`), or to forget the version. Idempotent."""
        self._receiver._settle(self, adopted=False, held=held)

    def sender(self) -> SendBuffers:
        """What sends the version on, out of the buckets, to any number of groups. Raises RuntimeError, naming the first bucket
        that is not what was received."""
        if self._sender is None:
            buckets, buffers = self._receiver.buckets, self._set.buffers
            for index, (bucket, buffer) in enumerate(zip(buckets, buffers, strict=True)):
                if not self._tags.verify(index, bucket, buffer):
                    raise RuntimeError(f"bucket {index} of {len(buckets)} has changed in memory since it was received")
            self._sender = SendBuffers(self._receiver.manifest, whole=buffers, held=self.version)
        return self._sender


class _Set:
    """Buffers for a whole version."""

    def __init__(self, receiver: WeightReceiver, shared: bool):
        self.buffers = allocate(receiver.buckets, pin=False, shared=shared)
        found = tensors_of(receiver.manifest, receiver.buckets, self.buffers)
        self.tensors: Tensors = {receiver.manifest.tensors[place].name: tensor for place, tensor in found.items()}


class WeightReceiver:
    """Owns the staging buckets of one manifest. One reception at a time.

    Allocates `sets` copies; an engine that generates from the staging buckets needs two.
    """

    def __init__(self, manifest: Manifest, *, sets: int = 1, shared: bool = False):
        """Buckets that are `shared` can be mapped by other processes.

        Each set is allocated when the first version arrives for it. By the time the second one is, the engine has freed its
        initial weights: so there are never more than two copies. Raises InvalidMessage for a manifest without a plan.
        """
        self.manifest = manifest
        self.buckets = plan_buckets(manifest)
        self._lock = threading.Lock()  # guards what follows
        self._group: WeightGroup | None = None  # while a reception is under way
        self._new_set = lambda: _Set(self, shared)
        self._most = sets
        self._free: list[_Set] = []
        self._made = 0
        self._adopted: _Set | None = None
        self._staged: Staged | None = None
        self.held: Staged | None = None
        """The version that the engine has, as long as buckets hold it too."""

    def abort(self) -> None:
        """End the reception under way, if there is one, by leaving its group for good; a staged version stays."""
        with self._lock:
            if self._group is not None:
                self._group.abort()

    def receive(self, group: WeightGroup, version: PolicyVersion, deadline: float) -> Future[Staged]:
        """Receive `version` into a set that is not in use. The version staged before has to be released or adopted first."""
        with self._lock:
            if self._staged is not None:
                raise InvariantViolated(f"{group.name}: cannot receive {version}: {self._staged.version} is still staged")
            if not self._free and self._made == self._most:
                raise InvariantViolated(f"{group.name}: cannot receive {version}: every set of buckets is in use")
            if self._group is not None:
                raise InvariantViolated(f"{group.name}: cannot receive {version}: another version is being received")
            group.describe(self.manifest)
            self._group = group
            reception = Reception(group, self.buckets, version, deadline)
            return in_thread(f"receive-{version}", lambda: self._until_done(reception))

    def _until_done(self, reception: Reception) -> Staged:
        try:
            return self._receive(reception)
        finally:
            with self._lock:
                self._group = None

    def _receive(self, reception: Reception) -> Staged:
        if not self._free:
            self._free.append(self._new_set())
            self._made += 1
        step = reception.version.step
        with spans.log.span("await sender", PUBLICATION, step=step):
            reception.await_sender()
        buckets = self._free[-1]
        if self.held is not None and self.held._set is buckets:
            self.held = None
        with spans.log.span("receive", PUBLICATION, step=step):
            reception.take(buckets.buffers.__getitem__)
        took = WeightsReceived(reception.waiting, reception.copying, reception.hashing)
        at = reception.began
        for phase in ("wait", "copy", "hash"):
            seconds = getattr(took, f"{phase}_seconds")
            spans.log.add(phase, at, at := at + seconds, PUBLICATION, step=step)  # as if one had come after the other
        now, found = time.monotonic(), reception.checksum(buckets.buffers.__getitem__)
        spans.log.add("verified", now, now, PUBLICATION, step=step, detail=found)
        with self._lock:
            self._free.remove(buckets)
            self._staged = Staged(reception.version, took, buckets, self, reception.tags)
            return self._staged

    def _settle(self, staged: Staged, adopted: bool, held: bool = True) -> None:
        with self._lock:
            if self._staged is not staged:
                return
            self._staged = None
            if held:
                self.held = staged
            unused: _Set | None = staged._set
            if adopted:
                unused, self._adopted = self._adopted, unused
            if unused is not None:
                self._free.append(unused)
