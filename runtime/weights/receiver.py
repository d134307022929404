"""The receiving side of a weight sync: a rollout joins an epoch's group, and stages whole versions beside the weights in use.

A reception may be posted long before the sender starts, so two clocks apply. Until the sender's announcement a whole training
step may pass: only the end of the group, the loss of the sender, or the group's backstop of hours ends the wait. From the
announcement on, all buckets must arrive within `deadline` seconds. The coordinator keeps its own deadline, from the moment at
which the trainer has made the version, and enforces that deadline with AbortWeights.

A reception raises ServiceFault of phase "announce" (no announcement) or "transfer" (DeadlineExceeded if late), both after
aborting the group. It raises phase "verify", with the buckets' names, and keeps the group; and Cancelled after an abort."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

import torch
import xxhash
from msgspec.structs import astuple, replace

from runtime import commands, timeouts
from runtime.cluster.topology import takes_turns
from runtime.config import Config
from runtime.errors import Cancelled, DeadlineExceeded, InvariantViolated, ServiceFault
from runtime.process import platform, spans
from runtime.process.waiting import in_thread
from runtime.types import PolicyVersion
from runtime.weights.collective import reason
from runtime.weights.group import (
    AVAILABLE,
    FORWARDS,
    TAG,
    BucketReceipt,
    BucketTags,
    Target,
    Transfer,
    allocate,
    copy_and_hash,
    digest_of,
    targets_of,
    tensors_of,
)
from runtime.weights.plan import Bucket, GroupAddress, Manifest, Sharding, arena_offsets, name_of, plan_buckets, windows
from runtime.weights.sender import DEPTH, SendBuffers, WeightGroup, WeightSender, join_rendezvous

if TYPE_CHECKING:
    from runtime.rollout.engine import RolloutEngine

# Buckets posted at once: more than are under way, so that a transport's threads always have a next bucket.
AHEAD = DEPTH + 2

# Buffers for buckets that do not lie in one run: posted ones, the one being copied to its place, and those being passed on.
SLOTS = AHEAD + FORWARDS + 1


_Taken = tuple[commands.WeightsReceived, dict[int, bytes]]  # how the time was spent, and the tags by bucket

# Takes the tensors of a window into the engine: (tensors by name, whether it is the first, and the last) -> the end.
Load = Callable[[Mapping[str, torch.Tensor], bool, bool], "Future[None]"]


class _Share:
    """The part of a window that one of the rollout's workers receives, into the arena that all of them share."""

    def __init__(
        self,
        manifest: Manifest,
        own: list[tuple[int, Bucket]],
        arena: torch.Tensor,
        window: Sequence[int],
        slots: list[torch.Tensor],
    ):
        """Plan the reception of the worker's `own` buckets, by index, into `arena`, uint8, which has the tensors `window`.
        `slots`: the worker's, for all windows; made when needed."""
        self._manifest, self._own = manifest, own
        self._count = len(plan_buckets(manifest))  # of all workers and windows
        self._targets = targets_of(manifest, [bucket for _, bucket in self._own], arena, window)
        counts = Counter(bucket.root for _, bucket in self._own)
        # By sender, the tags of its buckets: uint8 [tags, bytes of a tag].
        self._sent_tags = {root: torch.zeros(counts[root], TAG.size, dtype=torch.uint8) for root in sorted(counts)}
        self._slots = slots
        self._slot_bytes = max((target.nbytes for target in self._targets if target.run is None), default=0)
        self._tags: BucketTags  # of the group that the version came over
        self._digests: list[int] = []  # of the buckets

    def verify(self) -> None:
        """Verify the buckets in the arena. Raises RuntimeError with the first that has changed."""
        for (index, _), target, digest in zip(self._own, self._targets, self._digests, strict=True):
            if digest_of(target, self._tags.hasher()) != digest:
                raise RuntimeError(f"{name_of(self._manifest, index)} has changed in memory since it was received")

    def take(self, group: WeightGroup, version: PolicyVersion, deadline: float, give_up: float) -> _Taken:
        """Receive the buckets until the monotonic time `give_up`, `deadline` seconds from the announcement. Returns the time
        spent, and the tags by bucket. A failure aborts the group; a wrong checksum keeps it usable. Raises ServiceFault of
        phase "transfer" (DeadlineExceeded if late), or of phase "verify" with the buckets; Cancelled."""
        self._tags, self._digests = group.tags, []
        pending, index = deque[tuple[Target, Transfer]](), 0
        waiting = copying = hashing = 0.0
        try:
            last = len(self._targets) + len(self._sent_tags)
            for index in range(last):
                for posted in range(index + len(pending), min(index + AHEAD, last)):
                    pending.append(self._post(group, posted, give_up))
                into, transfer = pending.popleft()
                before = time.monotonic()
                receipt = transfer(give_up)
                arrived = time.monotonic()
                if index >= len(self._targets):
                    waiting += arrived - before
                    continue
                # In the last part of the wait the transport was at work on the bucket: count this part as copy and hash.
                waited, worked = arrived - before, 0.0 if receipt is None else receipt.copy_seconds + receipt.hash_seconds
                share = min(1.0, waited / worked) if worked else 1.0
                if receipt is None:
                    receipt = self._land(group, into, self._targets[index])
                self._digests.append(receipt.digest)
                copying += share * receipt.copy_seconds
                hashing += share * receipt.hash_seconds
                waiting += max(0.0, waited - worked)
            group.settle(give_up)
        except RuntimeError as error:
            if group.aborted:
                raise Cancelled(f"{group.name}: version {version} was withdrawn during its transfer") from error
            group.abort()
            raise self._lost(group, index, version, error, give_up, deadline) from error
        tags, wrong = self._compare(group, version)
        if wrong:
            raise ServiceFault(group.name, "verify", f"version {version}: {'; '.join(wrong)}", deadline)
        return commands.WeightsReceived(waiting, copying, hashing), tags

    def _post(self, group: WeightGroup, index: int, give_up: float) -> tuple[Target, Transfer]:
        """Post a bucket, to its place in the arena if the transport can fill that, else to a slot; at the end post tags."""
        if (number := index - len(self._targets)) >= 0:
            root = list(self._sent_tags)[number]
            target = Target.of(self._sent_tags[root].view(-1))
            return target, group.way(root, group.worker).receive(self._count + root, target)
        (place, bucket), target = self._own[index], self._targets[index]
        link = group.way(bucket.root, bucket.taker)
        if target.run is None and not link.scatters:
            if not self._slots or self._slots[0].nbytes < self._slot_bytes:
                # In a memory file, as another member may copy out of them. Those of the window before are passed on.
                self._slots[:] = allocate([self._slot_bytes] * SLOTS, pin=False, shared=AVAILABLE)
            slot = self._slots[index % SLOTS][: target.nbytes]
            group.settle(give_up, slot)
            target = Target.of(slot)
        return target, link.receive(place, target)

    def _land(self, group: WeightGroup, source: Target, target: Target) -> BucketReceipt:
        """Hash a bucket that has arrived in `source`, and copy it to `target` unless that is where it is."""
        assert source.run is not None
        if source is not target:
            return copy_and_hash(source.run.numpy(), target.parts, group.tags.hasher(), lambda: None)
        before = time.monotonic()
        return BucketReceipt(group.tags.digest(source.run), 0.0, time.monotonic() - before)

    def _compare(self, group: WeightGroup, version: PolicyVersion) -> tuple[dict[int, bytes], list[str]]:
        """Return the tags by bucket, and the faults of the buckets against them."""
        wrong, tags, of_senders = [], {}, {root: iter(sent) for root, sent in self._sent_tags.items()}
        for (index, bucket), digest in zip(self._own, self._digests, strict=True):
            tag = tags[index] = next(of_senders[bucket.root]).numpy().tobytes()
            sent = PolicyVersion.unpack(TAG.unpack(tag)[1])
            if tag != group.tags.tag(index, digest, sent):
                wrong.append(f"{name_of(self._manifest, index)}: the checksum does not match")
            elif sent != version:
                wrong.append(f"{name_of(self._manifest, index)} is of version {sent}")
        return tags, wrong

    def _lost(
        self, group: WeightGroup, index: int, version: PolicyVersion, error: RuntimeError, give_up: float, deadline: float
    ) -> ServiceFault:
        roots = [*(bucket.root for _, bucket in self._own), *self._sent_tags]
        source = f" from {group.address.label(roots[index])}" if group.address.senders > 1 else ""
        what = name_of(self._manifest, self._own[index][0]) if index < len(self._own) else "the last message"
        message = f"{what} of version {version} did not arrive{source}: {reason(error)}"
        kind = DeadlineExceeded if time.monotonic() >= give_up else ServiceFault
        return kind(group.name, "transfer", message, deadline)


class StagedWeights:
    """An arena for a whole version beside the weights in use; with windows, two in turn, whose tensors the engine loads one
    window after the other. `taken` is set from the reception until `release`."""

    def __init__(self, manifest: Manifest, *, shared: bool = False):
        """Plan the first reception, which makes the arena. `shared`: other processes map it. Raises InvalidMessage."""
        plan_buckets(manifest)
        self.manifest = manifest  # of the next reception, always of the same tensors
        self.version: PolicyVersion | None = None  # the version that the arena holds whole; None during a reception
        self.taken = False
        self._shared = shared
        self._arenas: list[torch.Tensor] = []
        self._planned: Manifest | None = None  # of the last reception
        self._windows: list[tuple[dict[str, torch.Tensor], list[_Share]]] = []  # of each: its tensors, and the workers' shares
        self._sends: SendBuffers | None = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return views into the arena by Hugging Face name, for `RolloutEngine.stage`."""
        return dict(self._windows[0][0])

    def receive(
        self, groups: Sequence[WeightGroup], version: PolicyVersion, deadline: float, load: Load | None = None
    ) -> commands.WeightsReceived:
        """Receive and verify `version`, in a thread for each worker. `groups`: the workers'. `load`: takes each window once it
        is verified. Returns how the slowest worker has spent the time since the announcement. The first reception allocates: a
        second arena is made after the engine has freed its initial weights, so there are at most two copies."""
        lead = groups[0]
        if self.taken:
            raise InvariantViolated(f"{lead.name}: cannot receive {version}: {self.version} is still staged")
        self._prepare(lead.forwards)
        # The sender's `announce` unblocks this, once its first bucket is whole. An abort, or the sender's loss, ends it.
        with spans.log.span("await sender", spans.WEIGHT_SYNC, step=version.step):
            _await_sender(groups, version)
        at = time.monotonic()
        self.version, self._sends = None, None
        # Take bucket by bucket while the senders gather; the deadline counts from here.
        with spans.log.span("receive", spans.WEIGHT_SYNC, step=version.step):
            took, tags = self._take_all(groups, version, deadline, load)
        for phase in ("wait", "copy", "hash"):
            seconds = getattr(took, f"{phase}_seconds")
            spans.log.add(phase, at, at := at + seconds, spans.WEIGHT_SYNC, step=version.step)  # shown one after the other
        now, found = time.monotonic(), f"epoch {lead.epoch}: {xxhash.xxh3_64_hexdigest(tags)}"  # equal at all members
        spans.log.add("verified", now, now, spans.WEIGHT_SYNC, step=version.step, detail=found)
        self.version, self.taken = None if self.manifest.window_bytes else version, True
        return took

    def verify(self) -> SendBuffers:
        """Verify the arena, and return buffers that send the version. Raises RuntimeError with the first changed bucket."""
        if self._sends is None:
            for _, shares in self._windows:
                for share in shares:
                    share.verify()
            # A bucket of whole rows lies in the arena in one run, so it is sent from there.
            alone = replace(self.manifest, source=Sharding(), target=Sharding.whole(self.manifest.target.members))
            self._sends = SendBuffers(alone, whole=self._arenas[0], held=self.version)
        return self._sends

    def release(self) -> None:
        """Allow another version to be received into these buckets."""
        self.taken = False

    def _prepare(self, forwards: bool) -> None:
        """Make the arenas unless present. `forwards`: other members copy out of them, so they should be memory files."""
        specs, of_windows = self.manifest.tensors, windows(self.manifest)
        if not self._arenas:
            size = self.manifest.window_bytes or max(1, arena_offsets(specs)[1])
            shared = self._shared or (forwards and AVAILABLE)
            self._arenas = [allocate([size], pin=False, shared=shared)[0] for _ in of_windows[:2]]
        if self._planned != self.manifest:
            self._planned, self._windows = self.manifest, []
            slots: list[list[torch.Tensor]] = [[] for _ in range(self.manifest.target.members)]
            own: list[list[list[tuple[int, Bucket]]]] = [[[] for _ in slots] for _ in of_windows]
            for index, bucket in enumerate(plan_buckets(self.manifest)):
                own[bucket.window][bucket.taker].append((index, bucket))
            for number, window in enumerate(of_windows):
                arena = self._arenas[number % 2]
                tensors = {specs[index].name: tensor for index, tensor in tensors_of(specs, arena, window).items()}
                pairs = zip(own[number], slots, strict=True)
                self._windows.append((tensors, [_Share(self.manifest, each, arena, window, of) for each, of in pairs]))

    def _take_all(
        self, groups: Sequence[WeightGroup], version: PolicyVersion, deadline: float, load: Load | None
    ) -> tuple[commands.WeightsReceived, bytes]:
        """Receive every window, the next one while the engine loads one. Returns the time spent, and all tags."""
        give_up, spent, tags = time.monotonic() + deadline, [0.0, 0.0, 0.0], dict[int, bytes]()
        loading = deque[Future[None]]()
        try:
            for number, (tensors, shares) in enumerate(self._windows):
                if len(loading) == len(self._arenas):  # the engine reads the arena that comes next
                    loading[0].result(give_up - time.monotonic())
                    loading.popleft()
                took, found = _take(shares, groups, version, deadline, give_up)
                spent = [sum(pair) for pair in zip(spent, astuple(took)[:3], strict=True)]
                tags |= found
                if load is not None:
                    loading.append(load(tensors, number == 0, number == len(self._windows) - 1))
            for each in loading:
                each.result(give_up - time.monotonic())
        except TimeoutError as error:
            raise DeadlineExceeded(groups[0].name, "load", f"the engine did not load {version}", deadline) from error
        finally:
            for each in loading:
                each.cancel()
        return commands.WeightsReceived(*spent), b"".join(tags[index] for index in sorted(tags))


def _take(
    shares: Sequence[_Share], groups: Sequence[WeightGroup], version: PolicyVersion, deadline: float, give_up: float
) -> _Taken:
    """Receive every worker's share of a window; return the slowest worker's time, and all tags. Once a worker's group has
    failed, the other workers leave theirs. Raises the first fault, Cancelled only if there is no other."""

    def take(share: _Share, group: WeightGroup) -> _Taken:
        try:
            group.set_timeout(max(give_up - time.monotonic(), timeouts.TORCH_LEAST))
            return share.take(group, version, deadline, give_up)
        finally:
            if group.aborted:
                for other in groups:
                    other.abort()

    of_workers = list(zip(shares, groups, strict=True))
    started = [in_thread(f"receive-{version}", partial(take, *each)) for each in of_workers[1:]]
    first: Callable[[], _Taken] = partial(take, *of_workers[0])
    faults, parts = list[ServiceFault | Cancelled](), list[_Taken]()
    for result in (first, *(each.result for each in started)):
        try:
            parts.append(result())
        except (ServiceFault, Cancelled) as fault:
            faults.append(fault)
    if faults:
        raise min(faults, key=lambda fault: isinstance(fault, Cancelled))
    slowest = max((took for took, _ in parts), key=lambda took: sum(astuple(took)))
    return slowest, {index: tag for _, tags in parts for index, tag in tags.items()}


def _await_sender(groups: Sequence[WeightGroup], version: PolicyVersion) -> None:
    lead = groups[0]
    try:
        lead.await_announcement(version)
    except RuntimeError as error:
        if lead.aborted:
            raise Cancelled(f"{lead.name}: version {version} was withdrawn before its transfer") from error
        for group in groups:
            group.abort()
        raise ServiceFault(lead.name, "announce", f"the sender of version {version} is lost: {reason(error)}") from error


class WeightReceiver:
    """A rollout's part in weight syncs. It joins an epoch's group, receives versions, and swaps committed versions into the
    engine. As the host of an epoch, it sends the engine's version to rollouts that lack it. The event loop calls every method;
    generation goes on meanwhile. At most one join, one reception and one swap are under way at once."""

    def __init__(
        self,
        engine: RolloutEngine,
        config: Config,
        name: str,
        *,
        shared: bool = False,
        drain: Callable[[], Awaitable[None]] | None = None,
    ):
        """Make the receiver. `shared`: the engine's workers are other processes, and read the staged buckets. `drain`: waits
        until no sequence is running, and lets none start before the next swap; needed for windows."""
        self.epoch = 0  # of the group that this rollout is in or about to join
        self.groups: list[WeightGroup] = []  # of that epoch, one for each worker of the engine; []: not joined
        self.swaps = 0
        self._engine, self._config, self._name, self._shared = engine, config, name, shared
        self._settings, self._drain = config.weight_sync, drain
        self._adopts = False  # whether the engine generates from the buckets, so that the next version needs a second set
        self._sets: list[StagedWeights] = []
        self._adopted: StagedWeights | None = None
        self._staged: StagedWeights | None = None  # in the engine, before the swap
        self._received: PolicyVersion | None = None  # verified, and neither committed nor withdrawn
        self._committed: PolicyVersion | None = None
        self._reception: asyncio.Task[commands.WeightsReceived] | None = None
        self._peer: WeightSender | None = None
        self._hosting = 0  # the epoch that this rollout hosts or is about to host
        self._sending: asyncio.Task[commands.WeightsSent] | None = None
        self._load_lock = asyncio.Lock()  # windows are loaded one after the other, in order

    @property
    def held(self) -> StagedWeights | None:
        """The buckets that hold the engine's version, if any."""
        kept = (each for each in self._sets if each.version == self._committed)
        return None if self._committed is None else next(kept, None)

    async def join(self, command: commands.JoinWeights, require_base: Callable[[str], None]) -> None:
        """Join an epoch's group, and leave the epoch before. `require_base` raises for adapters of another base model."""
        self.leave()
        # Set the epoch before the first await: an abort may come at any time, and names the epoch.
        self.epoch = epoch = command.address.epoch
        timeout = command.address.timeout
        if base := command.manifest.base:
            await asyncio.to_thread(require_base, base)  # in a thread, because this reads the model's files
        # Wait for the transfers of the epoch before: `leave` has ended the groups, but threads may still use the buckets.
        for before in (self._reception, self._sending):
            if before is not None and not (await asyncio.wait({before}, timeout=timeout))[0]:
                raise DeadlineExceeded(self._name, "join", "the transfer before has not ended", timeout)
        # Wait until all members are connected, or the timeout or the end of rank 0. Known limit: an abort does not end this.
        addresses = [replace(command.address, rank=command.address.rank + worker) for worker in range(command.address.workers)]
        joining = [in_thread("join-weights", partial(self._join, *each)) for each in enumerate(addresses)]
        joined = await asyncio.gather(*map(asyncio.wrap_future, joining), return_exceptions=True)
        groups = [group for group in joined if isinstance(group, WeightGroup)]
        fault = next((each for each in joined if isinstance(each, BaseException)), None)
        if fault is not None or epoch != self.epoch:  # an abort came meanwhile
            for group in groups:
                group.abort()
            raise fault or Cancelled(f"{self._name}: epoch {epoch} was given up")
        self.groups = groups
        # In a thread: the plan of a large model takes seconds.
        await asyncio.to_thread(self._prepare, command.manifest)

    def _join(self, worker: int, address: GroupAddress) -> WeightGroup:
        if address.backend != "gloo":
            platform.device(index=worker % platform.device_count())  # of this thread: the link is made on the worker's device
        return join_rendezvous(address, self._name)

    def _prepare(self, manifest: Manifest) -> None:
        """Plan the reception, and make arenas for the tensors of `manifest` unless present. Raises InvalidMessage."""
        if not self._sets or self._sets[0].manifest.tensors != manifest.tensors:
            self._adopts = any(spec.dtype == self._engine.adopts for spec in manifest.tensors)
            self._sets = [StagedWeights(manifest, shared=self._shared) for _ in range(1 + self._adopts)]
            self._adopted = None
        plan_buckets(manifest)
        for each in self._sets:
            each.manifest = manifest

    async def receive(self, command: commands.ReceiveWeights) -> commands.WeightsReceived:
        """Receive and verify a version, and stage it in the engine unless that has it: a version is sent again for a newcomer.
        Returns how the time was spent. Raises the errors of `StagedWeights.receive`, and Cancelled once the group is left."""
        if not self.groups or command.epoch != self.epoch:
            message = f"is not a member of the sync group of epoch {command.epoch}"
            raise ServiceFault(self._name, "receive", message)
        if self._reception is not None and not self._reception.done():
            raise ServiceFault(self._name, "receive", "is receiving another version")
        # A separate task, which goes on if the caller is cancelled: `join` of the next epoch waits for its end.
        self._reception = asyncio.create_task(self._receive(self.groups, command.version))
        return await asyncio.shield(self._reception)

    async def _receive(self, groups: list[WeightGroup], version: PolicyVersion) -> commands.WeightsReceived:
        if self._staged is not None:
            raise InvariantViolated(f"{self._name}: cannot receive {version}: {self._staged.version} is still staged")
        free = next(each for each in self._sets if not each.taken)
        needed, timeout = not self._has(version), self._settings.transfer_timeout
        # Wait in a thread for all buckets. A whole training step may pass before the announcement. `leave` ends this wait.
        load = partial(self._load, asyncio.get_running_loop()) if needed and free.manifest.window_bytes else None
        try:
            took = await asyncio.wrap_future(
                in_thread(f"receive-{version}", lambda: free.receive(groups, version, timeout, load))
            )
            before = time.monotonic()
            if needed and load is None and groups is self.groups:
                with spans.log.span("stage", spans.WEIGHT_SYNC, step=version.step):
                    # The engine copies in its own thread, or its workers read the buckets. No reception overwrites them.
                    await self._engine.stage(free.tensors())
            if groups is not self.groups:  # left meanwhile
                raise Cancelled(f"{self._name}: version {version} was withdrawn while it was staged")
        except BaseException:
            free.release()
            if load is not None:
                self._engine.held = False
                for group in groups:  # the senders wait for it, if the engine has failed
                    group.abort()
            raise
        if needed:
            self._staged = free
        else:
            free.release()
        self._received = version
        return replace(took, stage_seconds=time.monotonic() - before)

    def _load(
        self, loop: asyncio.AbstractEventLoop, tensors: Mapping[str, torch.Tensor], first: bool, last: bool
    ) -> Future[None]:
        """Load a window into the engine, from a thread. The engine is drained before the first one."""

        async def load() -> None:
            async with self._load_lock:
                if first and self._drain is not None:
                    await self._drain()
                await self._engine.load(tensors, first, last)

        return asyncio.run_coroutine_threadsafe(load(), loop)

    def needs_swap(self, command: commands.CommitWeights) -> bool:
        """Return whether the engine lacks the version. Raises ServiceFault if the version was not received."""
        if self._received != command.version or command.epoch != self.epoch:
            raise ServiceFault(self._name, "commit", f"version {command.version} is not staged")
        if self._has(command.version):
            self._received = None
        return self._received is not None

    async def swap(self) -> None:
        """Swap the received version into the engine. Must be awaited between two decode steps."""
        assert self._received is not None
        with spans.log.span("swap", spans.WEIGHT_SYNC, step=self._received.step):
            await self._engine.swap(self._received, self._settings.in_flight == "recompute")
        self._committed, self._received = self._received, None
        # An engine that adopts buckets has stopped using the old ones; any other engine has copied the new ones.
        unused, self._adopted = (self._adopted, self._staged) if self._adopts else (self._staged, None)
        if unused is not None:
            unused.release()
        self._staged = None
        self.swaps += 1

    def leave(self, epoch: int | None = None) -> None:
        """Leave the group of `epoch`, or any group if None, and forget the version under way, not the engine's. Idempotent."""
        if epoch in (None, self._hosting):
            self._stop_sending()
        if epoch not in (None, self.epoch):
            return
        self.epoch, self._received = 0, None
        for group in self.groups:
            group.abort()
        self.groups = []
        if self._staged is not None:
            self._staged.release()
            self._staged = None

    async def host(self, command: commands.InitWeightGroup) -> commands.WeightGroupReady:
        """Host an epoch, and send from the buckets. Raises ServiceFault, phase "snapshot", if none hold the version."""
        held, backend = self.held, "gloo" if takes_turns(self._config) else self._settings.backend
        if held is None:
            raise ServiceFault(self._name, "snapshot", "no version that was received is kept")
        self._stop_sending()
        self._hosting = command.epoch
        try:
            # Verify in a thread, which reads the whole version. The other rollouts are asked to join only after that.
            buffers = await asyncio.wrap_future(in_thread("verify-weights", held.verify))
        except RuntimeError as error:
            raise ServiceFault(self._name, "snapshot", str(error)) from error
        if self._hosting != command.epoch:  # an abort came meanwhile
            raise Cancelled(f"{self._name}: epoch {command.epoch} was given up")
        backend = platform.collective_backend(backend, platform.device())
        self._peer = WeightSender(buffers, self._config, self._name, backend=backend)
        return await self._peer.open(command)

    async def resend(self, command: commands.ResendWeights) -> commands.WeightsSent:
        if self._peer is None:
            raise ServiceFault(self._name, "transfer", f"there is no sync group of epoch {command.epoch}")
        # A separate task, as in `receive`: it goes on if the caller is cancelled, and `join` waits for its end.
        self._sending = asyncio.create_task(self._peer.send(command.version, command.epoch))
        return await asyncio.shield(self._sending)

    def _stop_sending(self) -> None:
        self._hosting = 0
        if self._peer is not None:
            self._peer.close()
            self._peer = None

    def _has(self, version: PolicyVersion) -> bool:
        """Return whether the engine has `version` already. Such a version is sent again for a newcomer."""
        return version == self._committed and not self._engine.torn
