"""The receiving side of a weight sync: a rollout joins an epoch's group, and stages versions whole beside the weights in use.

The buckets outlive epochs: the group is an argument of `StagedWeights.receive`. A reception may be posted long before the
sender starts, and two clocks apply. Until the sender's announcement only the end of the group, the loss of the sender, or the
group's backstop of hours ends the wait, since a whole training step may lie in it. From the announcement on, everything must
have arrived within `deadline` seconds. A coordinator therefore posts early, keeps its own deadline from the moment at which the
trainer has made the version, and enforces it with AbortWeights.

A reception raises ServiceFault of phase "announce" (nothing announced) or "transfer" (DeadlineExceeded when late), both with
the group aborted; of phase "verify", naming the buckets, with the group whole; Cancelled after an abort.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import xxhash
from msgspec.structs import replace

from runtime.cluster.topology import takes_turns
from runtime.commands import (
    CommitWeights,
    HostWeights,
    JoinWeights,
    ReceiveWeights,
    ResendWeights,
    WeightsHosted,
    WeightsReceived,
    WeightsSent,
)
from runtime.config import Config
from runtime.errors import Cancelled, DeadlineExceeded, InvariantViolated, ServiceFault
from runtime.process import platform, spans
from runtime.process.aio import in_thread
from runtime.process.spans import PUBLICATION
from runtime.types import PolicyVersion
from runtime.weights import rendezvous
from runtime.weights.gloo_mesh import reason
from runtime.weights.group import BucketTags, Taken, Transfer, WeightGroup, allocate, tensors_of, wait_until
from runtime.weights.plan import TRAILER, Manifest, plan_buckets
from runtime.weights.sender import DEPTH, SendBuffers, WeightSender

if TYPE_CHECKING:
    from runtime.rollout.engine import RolloutEngine

# Buckets that are asked for at once: more than are under way, so that a transport's threads always have one to wait for.
AHEAD = DEPTH + 2


class StagedWeights:
    """Buckets for a whole version beside the weights in use. They are taken from their reception until `release`."""

    def __init__(self, manifest: Manifest, *, shared: bool = False):
        """Buckets that are `shared` can be mapped by other processes. Raises InvalidMessage for a manifest without a plan."""
        self.manifest = manifest
        self.buckets = plan_buckets(manifest)
        self.version: PolicyVersion | None = None
        """What the buckets hold; None while another version is on its way into them."""
        self.taken = False
        self._shared = shared
        self._buffers: list[torch.Tensor] = []
        self._tags: BucketTags  # of the group that the version came over
        self._sends: SendBuffers | None = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Views into the buckets by Hugging Face name, for `RolloutEngine.stage`."""
        found = tensors_of(self.manifest, self.buckets, self._buffers)
        return {self.manifest.tensors[place].name: tensor for place, tensor in found.items()}

    def receive(self, group: WeightGroup, version: PolicyVersion, deadline: float) -> WeightsReceived:
        """Receive and verify `version`, in a thread. Returns where the time went, from the sender's announcement on.

        The memory is allocated when the first version arrives: by the time at which it is for a second copy, the engine has
        freed its initial weights, so that there are never more than two.
        """
        if self.taken:
            raise InvariantViolated(f"{group.name}: cannot receive {version}: {self.version} is still staged")
        self._buffers = self._buffers or allocate(self.buckets, pin=False, shared=self._shared)
        group.describe(self.manifest)
        with spans.log.span("await sender", PUBLICATION, step=version.step):
            self._await_sender(group, version)
        at = time.monotonic()
        group.bound(deadline)
        self.version, self._sends, self._tags = None, None, group.tags
        with spans.log.span("receive", PUBLICATION, step=version.step):
            took = self._take(group, version, deadline)
        for phase in ("wait", "copy", "hash"):
            seconds = getattr(took, f"{phase}_seconds")
            spans.log.add(phase, at, at := at + seconds, PUBLICATION, step=version.step)  # as if one had come after the other
        now, found = time.monotonic(), f"epoch {group.epoch}: {self._checksum()}"
        spans.log.add("verified", now, now, PUBLICATION, step=version.step, detail=found)
        self.version, self.taken = version, True
        return took

    def verify(self) -> SendBuffers:
        """What sends the version on, out of these buckets, to any number of groups.

        Raises RuntimeError, naming the first bucket that is not what was received."""
        if self._sends is None:
            for index, (bucket, buffer) in enumerate(zip(self.buckets, self._buffers, strict=True)):
                if not self._tags.verify(index, bucket, buffer):
                    raise RuntimeError(f"bucket {index} of {len(self.buckets)} has changed in memory since it was received")
            self._sends = SendBuffers(self.manifest, whole=self._buffers, held=self.version)
        return self._sends

    def release(self) -> None:
        """Another version may be received into these buckets."""
        self.taken = False

    def _await_sender(self, group: WeightGroup, version: PolicyVersion) -> None:
        """Block until the sender's announcement. Raises ServiceFault, phase "announce", or Cancelled."""
        try:
            group.await_announcement(version)
        except RuntimeError as error:
            if group.aborted:
                raise Cancelled(f"{group.name}: version {version} was withdrawn before its transfer") from error
            group.abort()
            raise ServiceFault(group.name, "announce", f"the sender of version {version} is lost: {reason(error)}") from error

    def _take(self, group: WeightGroup, version: PolicyVersion, deadline: float) -> WeightsReceived:
        """Receive every bucket, also after a bad one: the group stays usable. A failure aborts the group, but a wrong checksum
        does not. Raises ServiceFault of phase "transfer" (DeadlineExceeded when late), or "verify", naming the buckets;
        Cancelled."""
        give_up, pending, wrong, posted, index = time.monotonic() + deadline, list[Transfer](), list[str](), 0, 0
        waiting = copying = hashing = 0.0
        try:
            for index, buffer in enumerate(self._buffers):
                while posted < min(index + AHEAD, len(self.buckets)):
                    pending.append(group.receive(posted, self._buffers[posted], self.buckets[posted].root))
                    posted += 1
                before = time.monotonic()
                taken = wait_until(pending.pop(0), give_up)
                arrived = time.monotonic()
                wrong += self._faults(index, buffer, taken, group.tags, version)
                # The bucket was there after a while, for the last of which the transport was at work on it.
                waited, worked = arrived - before, 0.0 if taken is None else taken.copy_seconds + taken.hash_seconds
                share = min(1.0, waited / worked) if worked else 0.0
                copying += share * taken.copy_seconds if taken else 0.0
                hashing += (share * taken.hash_seconds if taken else 0.0) + time.monotonic() - arrived
                waiting += max(0.0, waited - worked)
        except RuntimeError as error:
            if group.aborted:
                raise Cancelled(f"{group.name}: version {version} was withdrawn during its transfer") from error
            group.abort()
            source = "" if (called := group.called(self.buckets[index].root)) is None else f" from {called}"
            message = f"bucket {index} of {len(self.buckets)} of version {version} did not arrive{source}: {reason(error)}"
            kind = DeadlineExceeded if time.monotonic() >= give_up else ServiceFault
            raise kind(group.name, "transfer", message, deadline) from error
        if wrong:
            raise ServiceFault(group.name, "verify", f"version {version}: {'; '.join(wrong)}", deadline)
        return WeightsReceived(waiting, copying, hashing)

    def _faults(
        self, index: int, buffer: torch.Tensor, taken: Taken | None, tags: BucketTags, version: PolicyVersion
    ) -> list[str]:
        """`taken`: with the digest of what `buffer` holds, unless it is still to be made."""
        bucket, where = self.buckets[index], f"bucket {index} of {len(self.buckets)}"
        if not tags.verify(index, bucket, buffer, None if taken is None else taken.digest):
            return [f"{where}: the checksum does not match"]
        _, packed = TRAILER.unpack_from(buffer.numpy().data, bucket.data_bytes)
        return [] if packed == version.pack() else [f"{where} is of version {PolicyVersion.unpack(packed)}"]

    def _checksum(self) -> str:
        """Of the version: the same at each member of the group that has the same bytes."""
        pairs = zip(self.buckets, self._buffers, strict=True)
        return xxhash.xxh3_64_hexdigest(b"".join(buffer[bucket.data_bytes :].numpy().tobytes() for bucket, buffer in pairs))


class WeightReceiver:
    """A rollout's part in weight syncs: it joins an epoch's group, receives versions, and has the engine take over what is
    committed. In an epoch of its own it sends the version which its engine has to those that lack it.

    Every method is called on the event loop; generation goes on meanwhile. At most one join, one reception and one swap are
    under way at once.
    """

    def __init__(self, engine: RolloutEngine, config: Config, name: str, *, shared: bool = False):
        """`shared`: the engine's workers are processes of their own, which read the weights where they were staged."""
        self.epoch = 0  # of the group that this rollout is in, or is about to join
        self.group: WeightGroup | None = None
        self.swaps = 0
        self._engine, self._config, self._name, self._shared = engine, config, name, shared
        self._settings = config.publication
        self._adopts = False  # the engine generates from the buckets, so that the next version needs others
        self._sets: list[StagedWeights] = []
        self._adopted: StagedWeights | None = None
        self._staged: StagedWeights | None = None  # in the engine, which has not taken it over
        self._received: PolicyVersion | None = None  # verified, and neither committed nor withdrawn
        self._committed: PolicyVersion | None = None
        self._reception: asyncio.Task[WeightsReceived] | None = None
        self._peer: WeightSender | None = None
        self._hosting = 0  # the epoch that this rollout hosts, or is about to
        self._sending: asyncio.Task[WeightsSent] | None = None

    @property
    def held(self) -> StagedWeights | None:
        """The buckets, if any, that hold the version which the engine has."""
        kept = (each for each in (self._adopted, *self._sets) if each is not None and each.version == self._committed)
        return None if self._committed is None else next(kept, None)

    async def join(self, command: JoinWeights, require_base: Callable[[str], None]) -> None:
        """Join the group of an epoch. Leaves the epoch before, also the one in which this rollout sends. `require_base` raises
        for the fingerprint of a model to which adapters belong and which is not this rollout's."""
        self.leave()
        # Before anything is awaited: an abort of this epoch may come at any time, and names it.
        self.epoch = epoch = command.address.epoch
        timeout = command.address.timeout
        if base := command.manifest.base:
            await asyncio.to_thread(require_base, base)  # in a thread: it reads the model's files
        # Of the epoch before: the groups are left, but threads may still use the buckets.
        for before in (self._reception, self._sending):
            if before is not None and not (await asyncio.wait({before}, timeout=timeout))[0]:
                raise DeadlineExceeded(self._name, "join", "the transfer before has not ended", timeout)
        # Until all members are there, or the rendezvous fails. Known limit: an abort does not end this; it ends by its timeout,
        # or as rank 0 leaves.
        met = await asyncio.wrap_future(in_thread("join-weights", lambda: rendezvous.join(command.address, self._name)))
        if epoch != self.epoch:  # this rollout was told to leave meanwhile
            met.abort()
            raise Cancelled(f"{self._name}: epoch {epoch} was given up")
        self.group = met
        self._prepare(command.manifest)

    def _prepare(self, manifest: Manifest) -> None:
        """Have buckets for the tensors of `manifest`. Raises InvalidMessage."""
        if not self._sets or self._sets[0].manifest != manifest:
            self._adopts = any(spec.dtype == self._engine.adopts for spec in manifest.tensors)
            self._sets = [StagedWeights(manifest, shared=self._shared) for _ in range(1 + self._adopts)]
            self._adopted = None

    async def receive(self, command: ReceiveWeights) -> WeightsReceived:
        """Receive and verify a version beside generation, and stage it in the engine unless the engine has it already, as it is
        sent again for a newcomer. Returns where the time went.

        Raises the errors of `StagedWeights.receive`, and Cancelled once the group is left.
        """
        if self.group is None or command.epoch != self.epoch:
            message = f"is not a member of the publication group of epoch {command.epoch}"
            raise ServiceFault(self._name, "receive", message)
        if self._reception is not None and not self._reception.done():
            raise ServiceFault(self._name, "receive", "is receiving another version")
        # A task of its own, which goes on when the caller withdraws: the next epoch waits for its end.
        self._reception = asyncio.create_task(self._receive(self.group, command.version))
        return await asyncio.shield(self._reception)

    async def _receive(self, group: WeightGroup, version: PolicyVersion) -> WeightsReceived:
        if self._staged is not None:
            raise InvariantViolated(f"{self._name}: cannot receive {version}: {self._staged.version} is still staged")
        free = next(each for each in self._sets if not each.taken)
        needed, timeout = not self._has(version), self._settings.transfer_timeout
        # A whole training step may pass before the sender's announcement. An abort ends this by leaving the group.
        took = await asyncio.wrap_future(in_thread(f"receive-{version}", lambda: free.receive(group, version, timeout)))
        before = time.monotonic()
        try:
            if needed and group is self.group:
                with spans.log.span("stage", PUBLICATION, step=version.step):
                    # In a thread of the engine's, or in its workers: the tensors stay as they are until the swap.
                    await self._engine.stage(free.tensors())
            if group is not self.group:  # left meanwhile
                raise Cancelled(f"{self._name}: version {version} was withdrawn while it was staged")
        except BaseException:
            free.release()
            raise
        if needed:
            self._staged = free
        else:
            free.release()
        self._received = version
        return replace(took, stage_seconds=time.monotonic() - before)

    def needs_swap(self, command: CommitWeights) -> bool:
        """Whether the engine lacks the version. Raises ServiceFault where the version was not received."""
        if self._received != command.version or command.epoch != self.epoch:
            raise ServiceFault(self._name, "commit", f"version {command.version} is not staged")
        if self._has(command.version):
            self._received = None
        return self._received is not None

    async def swap(self) -> None:
        """Have the engine take over the version that was received. To be awaited between two of its steps."""
        assert self._received is not None
        with spans.log.span("swap", PUBLICATION, step=self._received.step):
            await self._engine.swap(self._received, self._settings.in_flight == "recompute")
        self._committed, self._received = self._received, None
        # An engine that adopts the buckets uses those of the version before no more; any other has copied what it needs.
        unused, self._adopted = (self._adopted, self._staged) if self._adopts else (self._staged, None)
        if unused is not None:
            unused.release()
        self._staged = None
        self.swaps += 1

    def leave(self, epoch: int | None = None) -> None:
        """Leave the group of `epoch`, or whatever there is, and forget the version that is under way; the engine's weights stay
        as they are. Idempotent."""
        if epoch in (None, self._hosting):
            self._stop_sending()
        if epoch not in (None, self.epoch):
            return
        self.epoch, self._received = 0, None
        if self.group is not None:
            self.group.abort()
            self.group = None
        if self._staged is not None:
            self._staged.release()
            self._staged = None

    async def host(self, command: HostWeights) -> WeightsHosted:
        """Host an epoch with those that lack the version which the engine has; it leaves from the buckets in which it was
        received. Raises ServiceFault, phase "snapshot", where no buckets hold it as it was received."""
        held, backend = self.held, "gloo" if takes_turns(self._config) else self._settings.backend
        if held is None:
            raise ServiceFault(self._name, "snapshot", "no version that was received is kept")
        self._stop_sending()
        self._hosting = command.epoch
        try:
            # In a thread, as all of the version is read. Nobody is asked to join before it has been.
            buffers = await asyncio.wrap_future(in_thread("verify-weights", held.verify))
        except RuntimeError as error:
            raise ServiceFault(self._name, "snapshot", str(error)) from error
        if self._hosting != command.epoch:  # left meanwhile
            raise Cancelled(f"{self._name}: epoch {command.epoch} was given up")
        backend = platform.collective_backend(backend, platform.device())
        self._peer = WeightSender(buffers, self._config, self._name, backend=backend)
        return await self._peer.open(command)

    async def resend(self, command: ResendWeights) -> WeightsSent:
        """Send the version that is held, in the epoch that this rollout hosts."""
        if self._peer is None:
            raise ServiceFault(self._name, "transfer", f"there is no publication group of epoch {command.epoch}")
        # As a reception: it goes on when the caller withdraws, and `join` waits for its end.
        self._sending = asyncio.create_task(self._peer.send(command.version, command.epoch))
        return await asyncio.shield(self._sending)

    def _stop_sending(self) -> None:
        self._hosting = 0
        if self._peer is not None:
            self._peer.close()
            self._peer = None

    def _has(self, version: PolicyVersion) -> bool:
        """Whether the engine has `version` already, which is then sent again for a newcomer."""
        return version == self._committed and not self._engine.torn
