"""The sending side of a weight sync: the policy is gathered into flat buckets, which a thread sends as they become whole.

    event loop ── open, join, send, close ──┐
                                            ├──► WeightSender ──► SendBuffers ──► the epoch's group
    engine's thread ── gather ──────────────┘

Meeting, leaving, and sending the buckets once more must not wait for the engine, so the event loop calls these. The engine's
thread gathers, behind the commands that make the weights.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from msgspec.structs import replace

from runtime.commands import HostWeights, WeightsHosted, WeightsSent
from runtime.config import Config
from runtime.errors import Cancelled, DeadlineExceeded, ServiceFault, SluiceError
from runtime.process import spans
from runtime.process.aio import in_thread
from runtime.process.spans import PUBLICATION
from runtime.types import PolicyVersion
from runtime.weights import rendezvous
from runtime.weights.gloo_mesh import reason
from runtime.weights.group import (
    AVAILABLE,
    BucketTags,
    PendingGroup,
    Transfer,
    WeightGroup,
    allocate,
    populate,
    tensors_of,
    wait_until,
)
from runtime.weights.plan import GroupAddress, Manifest, plan_buckets

if TYPE_CHECKING:
    from runtime.weights.delta import Positions, TensorChanges

# Buckets under way at once: two on the wire, so that it never waits while others are hashed or verified.
DEPTH = 4


class SendBuffers:
    """The buckets of one sender, and the version in them. They outlive epochs: the group is an argument of `send`.

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
        held: PolicyVersion | None = None,
    ):
        """`number`: which of the manifest's senders it is. `pin` page-locks the buffers, for copies from an accelerator.
        `told`: where it is not filled with whole tensors, it is with changes, so that no transport has to look for them.
        `whole`: the buffers of the version `held`, which is there, and which this sender sends alone. Raises InvalidMessage for
        a manifest without a plan."""
        self.manifest = manifest
        self.number = number
        self.buckets = plan_buckets(manifest)
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
        self._held = held  # what the buckets hold, or are being filled with
        self.filled = False
        """Whether the buckets hold all of what was gathered last."""
        self._intact = True  # until a bucket is found to have changed since it was gathered
        self._group: WeightGroup | None = None  # of the transfer under way
        self._taken = 0  # how many buckets its receivers have
        self._gather_seconds = 0.0  # so far, of this version

    def begin(self, version: PolicyVersion, timeout: float) -> None:
        """Forget the version that the buckets hold: `version` follows.

        Blocks while a transfer reads them; raises DeadlineExceeded after `timeout` seconds.
        """
        self.filled = False
        with self._changed:
            self._await_idle("snapshot", timeout)
            self._digests, self._first, self._intact = {}, None, True
            self._missing = [len(bucket.entries) for _, bucket in self._own]
            self._words = [[] for _ in self._own]
            self._held = version
            self._changed.notify_all()

    def await_held(self, version: PolicyVersion, timeout: float) -> PolicyVersion | None:
        """Block until the gathering of `version` has begun, at most for `timeout` seconds. Returns the version that the buckets
        hold; None where they no longer hold all of it as it was gathered."""
        with self._changed:
            self._changed.wait_for(lambda: self._held is not None and self._held >= version, timeout)
            return self._held if self._intact else None

    @torch.no_grad()
    def fill(self, tensors: Iterable[torch.Tensor | TensorChanges]) -> None:
        """Copy this sender's tensors, in the manifest's order and on any device; they are cast to the manifest's dtypes. Or
        change those of the version before.

        All of `tensors` is taken even after the transfer has failed, because the other ranks may take part in each of them.
        """
        began = time.monotonic()
        try:
            for place, tensor in enumerate(tensors):
                self._put(place, tensor, began)
        except BaseException:
            with self._changed:
                self._held = None
            raise
        self.filled = True

    def _put(self, place: int, tensor: torch.Tensor | TensorChanges, began: float) -> None:
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

    def send(self, group: WeightGroup, version: PolicyVersion, deadline: float) -> Future[WeightsSent]:
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

    def _send(self, group: WeightGroup, version: PolicyVersion, deadline: float) -> WeightsSent:
        before, give_up = group.sent_bytes, time.monotonic() + deadline
        began = time.monotonic()
        try:
            if self._own:
                self._await_whole(0, group, give_up)
                began = time.monotonic()
            group.describe(self.manifest)
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
        return WeightsSent(sent, time.monotonic() - began, self._gather_seconds)

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
            self._intact = False
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


class _Joining(NamedTuple):
    """An epoch that a sender has begun to join."""

    epoch: int
    group: Future[WeightGroup]
    pending: PendingGroup | None  # what rank 0 hosts: its end is that of the joining, also for the others


class WeightSender:
    """Who sends weights: a rank of the trainer, or a rollout that brings others the version which it has.

    Every method but `gather` is called on the event loop, which alone changes what epoch this sender is in.
    """

    def __init__(
        self,
        buffers: SendBuffers,
        config: Config,
        name: str,
        *,
        backend: str = "gloo",
        names: tuple[str, ...] = (),
        full_every: int = 0,
    ):
        """`names`: what the manifest's senders are called, `name` among them. `backend` and `full_every` are what rank 0 says
        to the others, as `GroupAddress` has them."""
        self.buffers = buffers
        self._name, self._names = name, names or (name,)
        self._settings, self._network = config.publication, config.network
        self._backend, self._full_every = backend, full_every
        self._epoch = 0  # the one that this sender is in, or is about to join
        self._joining: _Joining | None = None  # of that epoch, once it begins; `gather` reads it once
        self._left: Future[None] = _done()  # a new one whenever an epoch is left, so that it also says whether one was

    async def open(self, command: HostWeights) -> WeightsHosted:
        """Host the rendezvous of an epoch as rank 0, and begin to connect. Raises Cancelled once the epoch is left.

        Known limit: a server of names or of a shared folder that never answers holds up every later epoch of this process.
        """
        settings, left = self._settings, self._enter(command.epoch)
        address = GroupAddress(
            epoch=command.epoch,
            world_size=len(self._names) + command.world_size - 1,
            backend=self._backend,
            timeout=settings.join_timeout,
            transport=command.transport,
            folder=settings.folder,
            full_every=self._full_every,
            names=(*self._names, *command.names[1:]),
            senders=len(self._names),
        )

        def host() -> PendingGroup:
            with _HOSTING:
                pending = rendezvous.host(address, self._network.interface, self._network.port_range, self._name)
                if self._left is not left:
                    pending.abort()  # before the next one is hosted
                return pending

        # The epoch before is left first: both may have the same port. Its transfer ends by this, so that the buckets are free.
        await asyncio.wrap_future(left)
        # In a thread: torch looks up names while it opens the store, for seconds where no name server answers, and the server
        # of a shared folder may not answer at all. An abort is answered meanwhile.
        hosting = in_thread("host-weights", host)
        try:
            pending = await asyncio.wrap_future(hosting)
            self._require_in(command.epoch, left)
        except (asyncio.CancelledError, Cancelled):
            hosting.add_done_callback(_abandon)  # nobody will ever have its address
            raise
        # Connecting goes on beside this: it ends once those have come who are told the address by what is returned here.
        self._connect(command.epoch, pending.connect, pending)
        return WeightsHosted(pending.address, self.buffers.manifest)

    async def join(self, address: GroupAddress) -> None:
        """Join the group of `address`, which rank 0 of the senders hosts. Raises Cancelled once the epoch is left."""
        left, own = self._enter(address.epoch), replace(address, rank=self.buffers.number)
        await asyncio.wrap_future(left)
        self._require_in(address.epoch, left)
        # Until all members are there, or the rendezvous fails; an abort ends it at the latest by the rendezvous' own timeout.
        await asyncio.wrap_future(self._connect(address.epoch, lambda: rendezvous.join(own, self._name)))

    def gather(
        self, tensors: Iterable[torch.Tensor | TensorChanges], version: PolicyVersion, epoch: int
    ) -> Future[WeightsSent]:
        """Fill the buckets with `version` in the engine's thread, sending each as soon as it is whole; the future is the
        transfer's. Every rank takes part in the gathering, so that it goes on to its end also where nothing can be sent.

        Blocks while a transfer of the version before ends, and while the group connects. The future raises ServiceFault when
        nothing could be sent, of phase "transfer" where the version is kept for another epoch.
        """
        try:
            self.buffers.begin(version, self._settings.transfer_timeout)
        except SluiceError as error:
            for _ in tensors:  # the other ranks need this one to gather
                pass
            return _done(error)
        try:
            sending = self._begin_transfer(version, epoch)
        except SluiceError as error:
            sending = _done(error)
        with spans.log.span("gather", PUBLICATION, step=version.step):
            self.buffers.fill(tensors)
        return sending

    async def send(self, version: PolicyVersion, epoch: int) -> WeightsSent:
        """Send once more what the buckets hold of `version`, whatever the engine does meanwhile. Raises ServiceFault, of phase
        "snapshot" when they do not hold it, or no longer as it was gathered."""

        def send() -> WeightsSent:
            held = self.buffers.await_held(version, self._settings.transfer_timeout)
            if held != version:
                raise ServiceFault(self._name, "snapshot", f"version {version} was not kept: {held or 'no whole'} is there")
            return self._begin_transfer(version, epoch).result()

        # In a thread, which waits three times: the engine may not have begun to gather the version, the others may still be on
        # their way into the group, and the transfer takes its time. `close` ends the latter two.
        return await asyncio.wrap_future(in_thread("resend", send))

    def close(self, epoch: int | None = None) -> Future[None]:
        """Leave the group of `epoch`, or whatever there is, and send nothing any more. The future is done once it is left."""
        if epoch not in (None, self._epoch):
            return _done()
        joining, before = self._joining, self._left
        self._joining, self._epoch = None, 0

        def leave() -> None:
            wait([before])  # one group after the other
            if joining is None:
                return
            if joining.pending is not None and not joining.group.done():
                joining.pending.abort()
            self.buffers.abort()
            joining.group.add_done_callback(_abandon)

        # In a thread: leaving a group that meets in a folder may wait for the file server.
        self._left = in_thread("leave-weights", leave)
        return self._left

    def _enter(self, epoch: int) -> Future[None]:
        """Be about to join `epoch`: from now on `gather` finds no group, until one begins to connect."""
        left = self.close()
        self._epoch = epoch
        return left

    def _require_in(self, epoch: int, left: Future[None]) -> None:
        """`left`: as `_enter` returned it. By the number alone an epoch is not known: an epoch may be opened again."""
        if self._left is not left:
            raise Cancelled(f"{self._name}: epoch {epoch} was given up")

    def _connect(
        self, epoch: int, connect: Callable[[], WeightGroup], pending: PendingGroup | None = None
    ) -> Future[WeightGroup]:
        self._joining = _Joining(epoch, in_thread("join-weights", connect), pending)
        return self._joining.group

    def _begin_transfer(self, version: PolicyVersion, epoch: int) -> Future[WeightsSent]:
        """Off the event loop. Blocks until the group is connected, at most for `join_timeout`."""
        joining, patience = self._joining, self._settings.join_timeout
        if joining is None or joining.epoch != epoch:
            raise ServiceFault(self._name, "transfer", f"there is no publication group of epoch {epoch}")
        try:
            group = joining.group.result(patience)
        except FutureTimeout:
            raise DeadlineExceeded(self._name, "transfer", "the group is not connected", patience) from None
        return self.buffers.send(group, version, self._settings.transfer_timeout)


_HOSTING = threading.Lock()  # one rendezvous is opened after the other: two of a process may want the same port


def _done(error: Exception | None = None) -> Future[Any]:
    future: Future[Any] = Future()
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
    return future


def _abandon(made: Future[PendingGroup] | Future[WeightGroup]) -> None:
    """Leave what was hosted, or connected, as soon as it is."""
    if made.exception() is None:
        made.result().abort()
