"""The sending side of a publication: the policy is gathered into flat buckets, which a thread sends as they become whole."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from msgspec import Struct

from runtime.errors import Cancelled, DeadlineExceeded, ServiceFault, SluiceError
from runtime.process import spans
from runtime.process.spans import PUBLICATION
from runtime.types import PolicyVersion
from runtime.weights.authentication import BucketTags
from runtime.weights.gloo_mesh import drop_frames, reason
from runtime.weights.group import AVAILABLE, Transfer, WeightGroup, allocate, populate, tensors_of, wait_until
from runtime.weights.plan import Manifest, plan_buckets

if TYPE_CHECKING:
    from runtime.weights.delta import Positions, TensorChanges

T = TypeVar("T")

# Buckets under way at once: two on the wire, so that it never waits while others are hashed or verified.
DEPTH = 4


class SendResult(Struct, frozen=True):
    """`nbytes` as the transport sent them to each receiver, trailers included.

    `seconds` from the announcement to the last bucket. `gather_seconds`: that filling this sender's buckets took.
    """

    nbytes: int
    seconds: float
    gather_seconds: float = 0.0


class WeightSender:
    """Owns the buffers of the buckets that this sender sends. They outlive epochs: the group is `send`'s argument.

    A version is begun (`begin`), gathered (`fill`), and sent. `send` may come first: a bucket leaves as soon as it is whole.

    Every bucket has a buffer of its own, so that a version can be sent again, in another epoch, until the next is begun.
    """

    def __init__(
        self,
        manifest: Manifest,
        *,
        number: int = 0,
        pin: bool = False,
        told: bool = False,
        whole: Sequence[torch.Tensor] = (),
    ):
        """`number`: which of the manifest's senders it is. `pin` page-locks the buffers, for copies from an accelerator.
        `told`: where it is not filled with whole tensors, it is with changes, so that no transport has to look for them.
        `whole`: the buffers of a version that is there, which this sender sends alone. Raises InvalidMessage for a manifest
        without a plan."""
        self.buckets = plan_buckets(manifest)
        self._manifest = manifest
        self._own = [(index, bucket) for index, bucket in enumerate(self.buckets) if whole or bucket.root == number]
        own = [bucket for _, bucket in self._own]
        self._buffers = list(whole) or allocate(own, pin, AVAILABLE)
        if own and AVAILABLE and not pin and not whole:
            in_thread("populate-buckets", lambda: populate(self._buffers[0]))
        entries = sorted((entry.tensor, place, entry.offset) for place, bucket in enumerate(own) for entry in bucket.entries)
        self._views = list(tensors_of(manifest, own, self._buffers).values())  # of its tensors, in the manifest's order
        self._places = [(place, offset) for _, place, offset in entries]  # where each lies: which bucket, and where in that
        self._told = told
        self._words: list[list[Positions] | None] = [None] * len(own)  # which words of each bucket changed; None: any may have
        self._changed = threading.Condition()  # guards what follows
        self._missing = [0 if whole else len(bucket.entries) for bucket in own]  # how many tensors each still lacks
        self._digests: dict[int, int] = {}  # of this version's buckets, from their first send, by `_first`
        self._first: BucketTags | None = None
        self.filled = False
        """Whether the buckets hold all of what was gathered last."""
        self.intact = True
        """False once a bucket is found to have changed since it was gathered."""
        self._group: WeightGroup | None = None  # of the transfer under way
        self._taken = 0  # how many buckets its receivers have
        self._gather_seconds = 0.0  # so far, of this version

    def begin(self, timeout: float) -> None:
        """Forget the version that the buckets hold.

        Blocks while a transfer reads them; raises DeadlineExceeded after `timeout` seconds.
        """
        self.filled = False
        with self._changed:
            self._await_idle("snapshot", timeout)
            self._digests, self._first, self.intact = {}, None, True
            self._missing = [len(bucket.entries) for _, bucket in self._own]
            self._words = [[] for _ in self._own]

    @torch.no_grad()
    def fill(self, tensors: Iterable[torch.Tensor | TensorChanges]) -> None:
        """Copy this sender's tensors, in the manifest's order and on any device; they are cast to the manifest's dtypes. Or
        change those of the version before.

        All of `tensors` is taken even after the transfer has failed, because the other ranks may take part in each of them.
        """
        began = time.monotonic()
        for place, tensor in enumerate(tensors):
            bucket, offset = self._places[place]
            if isinstance(tensor, torch.Tensor):
                self._views[place].copy_(tensor)
                self._words[bucket] = None
            else:
                changed = tensor.apply(self._views[place]) + offset // 2
                if (words := self._words[bucket]) is not None:
                    words.append(changed)
            with self._changed:
                self._gather_seconds = time.monotonic() - began
                self._missing[bucket] -= 1
                if not self._missing[bucket]:
                    self._changed.notify_all()
        self.filled = True

    def send(self, group: WeightGroup, version: PolicyVersion, deadline: float) -> Future[SendResult]:
        """Send its buckets, stamped with `version`, from a thread; each must be whole and taken within `deadline` seconds.
        Sender 0's future ends once the receivers have the parts of all senders, and its result counts all parts.

        Blocks while another transfer ends; raises DeadlineExceeded after `deadline` seconds. On any failure the group is
        aborted, which fails the receivers too. The future raises ServiceFault: of phase "transfer", or of phase "snapshot"
        when a bucket that is sent again has changed. It raises UserError where the user can mend the failure.
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
            with spans.log.span("send", PUBLICATION, step=version.step):
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
        return SendResult(sent, time.monotonic() - began, self._gather_seconds)

    def _where(self, version: PolicyVersion) -> str:
        """For messages: how far the transfer of `version` has come."""
        if self._taken == len(self._own):
            return f"version {version}"
        return f"bucket {self._own[self._taken][0]} of {len(self.buckets)} of version {version} was not taken"

    def _send_all(self, group: WeightGroup, version: PolicyVersion, give_up: float) -> None:
        pending: list[Transfer] = []
        first = self._first = self._first or group.tags
        for place, ((index, bucket), buffer) in enumerate(zip(self._own, self._buffers, strict=True)):
            self._await_whole(place, group, give_up)
            digest = group.tags.stamp(index, bucket, buffer, version)
            if first is not group.tags:  # whose seed is another
                digest = first.digest(bucket, buffer)
            self._require_same(index, digest, group.name)
            if self._told:
                words = self._words[place]
                group.tell(index, None if words is None else np.sort(np.concatenate(words)))
            pending.append(group.send(index, buffer))
            self._take(pending, DEPTH - 1, give_up)
        self._take(pending, 0, give_up)

    def _require_same(self, index: int, digest: int, name: str) -> None:
        """A bucket whose contents changed since the first send is not sent again."""
        if self._digests.setdefault(index, digest) != digest:
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


class SendingMember:
    """A rank of the trainer that sends weights, as a member of the weight sync's group: it joins an epoch, sends, and leaves.

        event loop ── open, connect, resend, leave ──┐
                                                     ├──► SendingMember ──► WeightSender ──► the epoch's group
        engine's thread ── gather ───────────────────┘

    Joining, leaving and sending the buckets once more must not wait for the engine, so the event loop calls these. The engine's
    thread gathers the weights, behind the commands that make them. Every rank has to take part in that, so this member gathers
    even when it cannot send. All methods may be called from any thread.
    """

    def __init__(
        self,
        sender: WeightSender,
        name: str,
        join_timeout: float,
        transfer_timeout: float,
        held: PolicyVersion | None = None,
    ):
        """`held`: the version that the sender's buckets hold already."""
        self.sender = sender
        self._name = name
        self._join_timeout = join_timeout
        self._transfer_timeout = transfer_timeout
        self._changed = threading.Condition(threading.RLock())  # guards what follows
        self._epoch = 0  # the one that this member is in, or is about to join
        self._group: Future[WeightGroup] | None = None
        self._abort: Callable[[], None] = lambda: None
        self._leaving: Future[None] | None = None
        self._held = held  # what the buckets hold, or are being filled with

    def open(self, epoch: int) -> Future[None]:
        """Leave the epoch before, in order to join `epoch`. The future is done once the former group is left."""
        with self._changed:
            left = self.close()
            self._epoch = epoch
            return left

    def connect(
        self, epoch: int, connect: Callable[[], WeightGroup], abort: Callable[[], None] = lambda: None
    ) -> Future[WeightGroup]:
        """Begin to join, in a thread, the group that `connect` returns; `abort` ends that from another. Raises Cancelled when
        the epoch was left meanwhile."""
        with self._changed:
            if epoch != self._epoch:
                abort()
                raise Cancelled(f"{self._name}: epoch {epoch} was given up")
            self._abort, self._group = abort, in_thread("join-weights", connect)
            return self._group

    def leave(self, epoch: int) -> Future[None] | None:
        """Leave the group of `epoch`. The future is done once it is left; None if this member is in another epoch."""
        with self._changed:
            return self.close() if epoch == self._epoch else None

    def close(self) -> Future[None]:
        """Leave in a thread, one group after the other: leaving a group that meets in a folder may wait for the file server."""
        with self._changed:
            group, abort, before = self._group, self._abort, self._leaving
            self._group, self._abort, self._epoch = None, lambda: None, 0

        def leave() -> None:
            if before is not None:
                wait([before])
            if group is None:
                return
            if not group.done():
                abort()
            self.sender.abort()
            group.add_done_callback(_abandon)

        self._leaving = in_thread("leave-weights", leave)
        return self._leaving

    def gather(self, tensors: Iterable[torch.Tensor | TensorChanges], version: PolicyVersion, epoch: int) -> Future[SendResult]:
        """Fill the buckets with `version`, sending each as soon as it is whole; the future is the transfer's.

        Blocks while a transfer of the version before ends, and while the group connects. The future raises ServiceFault when
        nothing could be sent, of phase "transfer" where the version is kept for another epoch.
        """
        sending: Future[SendResult]
        try:
            self.sender.begin(self._transfer_timeout)
        except SluiceError as error:
            for _ in tensors:  # the other ranks need this one to gather
                pass
            return _failed(error)
        with self._changed:
            self._held = version
            self._changed.notify_all()
        try:
            sending = self._send(version, epoch)
        except SluiceError as error:
            sending = _failed(error)
        try:
            with spans.log.span("gather", PUBLICATION, step=version.step):
                self.sender.fill(tensors)
        except BaseException:
            with self._changed:
                self._held = None
            raise
        return sending

    def resend(self, version: PolicyVersion, epoch: int) -> Future[SendResult]:
        """Send the version that the buckets hold once more. Blocks until its gathering has begun. Raises ServiceFault, of phase
        "snapshot" when they do not hold it, or no longer as it was gathered."""
        with self._changed:
            self._changed.wait_for(lambda: self._held is not None and self._held >= version, self._transfer_timeout)
            if self._held != version or not self.sender.intact:
                raise ServiceFault(self._name, "snapshot", f"version {version} was not kept: {self._held} is there")
        return self._send(version, epoch)

    def _send(self, version: PolicyVersion, epoch: int) -> Future[SendResult]:
        with self._changed:
            connected = self._group if epoch == self._epoch else None
        if connected is None:
            raise ServiceFault(self._name, "transfer", f"there is no publication group of epoch {epoch}")
        try:
            group = connected.result(self._join_timeout)
        except FutureTimeout:
            raise DeadlineExceeded(self._name, "transfer", "the group is not connected", self._join_timeout) from None
        return self.sender.send(group, version, self._transfer_timeout)


def _failed(error: Exception) -> Future[SendResult]:
    future: Future[SendResult] = Future()
    future.set_exception(error)
    return future


def _abandon(connected: Future[WeightGroup]) -> None:
    if connected.exception() is None:
        connected.result().abort()
