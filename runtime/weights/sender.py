"""The sending side of a weight sync: each rank of the trainer copies the parts that it holds into flat buckets, and a thread
sends each whole bucket.

    event loop ── open, join, send, close ──┐
                                            ├──► WeightSender ──► SendBuffers ──► the epoch's group
    engine's thread ── gather ──────────────┘

The event loop calls `open`, `join`, `send` and `close`, because these must not wait for the engine. The engine's thread
gathers, after the commands that make the weights."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from datetime import timedelta
from itertools import product, zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from msgspec.structs import replace

from runtime import timeouts
from runtime.commands import InitWeightGroup, WeightGroupReady, WeightsSent
from runtime.config import Config
from runtime.errors import Cancelled, DeadlineExceeded, InvariantViolated, ServiceFault, SluiceError
from runtime.process import spans
from runtime.process.network import AUTO, PortRange, listen, own_address
from runtime.process.waiting import in_thread
from runtime.types import PolicyVersion
from runtime.weights import collective, shared_memory
from runtime.weights.collective import meet, reason, shut_down
from runtime.weights.delta import DeltaLink, Positions, words_of
from runtime.weights.group import (
    AVAILABLE,
    AuthenticatedStore,
    BucketTags,
    Relay,
    Shard,
    allocate,
    indexed,
    new_key,
    populate,
    settle,
    targets_of,
    typed,
)
from runtime.weights.plan import GroupAddress, Hop, Manifest, Piece, Span, hops, name_of, plan_buckets

if TYPE_CHECKING:
    from runtime.weights.group import Link, Transfer

# ---- Groups
# Members meet in a TCPStore that rank 0 hosts. Buckets move over links, one for each hop of the plan.


BACKLOG = 1024  # members that connect at once

LINKS: dict[str, Callable[[Any, GroupAddress, Sequence[str], str, str], Link]] = {
    "collective": collective.connect,
    "shared_memory": shared_memory.connect,
}
"""By transport: (store, address, all labels by rank, own name, own interface's address) -> link, within the timeout."""


class WeightGroup:
    """The members of one epoch: a rendezvous that is open, and after `connect` the group. The first ranks are senders, each
    with its own buckets. The other ranks are the rollouts' workers. Each receives its buckets, and passes some on to the same
    worker of other rollouts (`plan.hops`). Rank 0 leads. Every member makes the same calls in the same order, from one thread.
    No bucket moves before the sender announces the transfer. A receiver may therefore be posted a whole training step ahead.
    The wait occupies no device stream, and deadlines count from the announcement."""

    def __init__(self, address: GroupAddress, name: str, store: Any, interface: str):
        """Make a group that is not connected. `address`: rank 0's, with the own rank in it. `interface`: own IP address."""
        self.address = address
        self.name = name
        self.epoch = address.epoch
        self.rank = address.rank
        self.tags = BucketTags(address.key)
        self.aborted = False
        self._store: AuthenticatedStore | None = AuthenticatedStore(store, address.key).within(f"epoch/{address.epoch}")
        self._interface = interface
        self._hops: list[Hop] = []  # in which this member takes part
        self._links: list[Link] = []  # one for each of them
        self._ways: dict[tuple[int, int], Link] = {}  # by sender and taker: this member's place on the way of their buckets
        self._forwards: deque[tuple[Transfer, torch.Tensor]] = deque()
        self._transfers = 0

    def connect(self) -> WeightGroup:
        """Block until all are connected; return the group. Raises ServiceFault, phase "rendezvous", with the missing ranks."""
        address, store = self.address, self._running_store()
        give_up = time.monotonic() + address.timeout
        labels = list(map(address.label, range(address.world_size)))
        machines = address.machines or ("",) * (address.senders + (address.world_size - address.senders) // address.workers)
        mine = [self.rank] if self.rank < address.senders else range(address.senders)
        takers = range(address.workers) if self.rank < address.senders else [self.worker]
        ways = {each: hops(machines, address.senders, each[0], address.workers, each[1]) for each in product(mine, takers)}
        made: dict[Hop, Link] = {}
        try:
            # Meet first: otherwise errors would name members that only wait for the missing one.
            meet(store.within("all"), address.rank, "", labels, self.name, address.timeout)
            # All members connect the hops in one order, so that none waits for a member that waits for another hop.
            for hop in sorted({hop for way in ways.values() for hop in way if self.rank in (hop.parent, *hop.children)}):
                made[hop] = self._link_of(hop, store, labels, _left(give_up))
        except BaseException:
            for link in made.values():
                link.abort()
            self._store = None
            raise
        self._hops, self._links = list(made), list(made.values())
        for each, way in ways.items():
            parent = next((made[hop] for hop in way if self.rank in hop.children), None)
            relay = Relay(parent, [made[hop] for hop in way if hop.parent == self.rank], self._forwards)
            self._ways[each] = DeltaLink(relay, address.full_every) if address.full_every else relay
        return self

    def _link_of(self, hop: Hop, store: AuthenticatedStore, labels: Sequence[str], timeout: float) -> Link:
        """Connect and return the link of a hop. Its parent is the link's rank 0; the children follow."""
        members = (hop.parent, *hop.children)
        part = replace(self.address, rank=members.index(self.rank), world_size=len(members), timeout=timeout)
        apart = store.within(f"{hop.transport}/{hop.parent}/{hop.children[0]}")
        return LINKS[hop.transport](apart, part, [labels[rank] for rank in members], self.name, self._interface)

    @property
    def worker(self) -> int:
        """The number of this receiver among its rollout's workers."""
        return (self.rank - self.address.senders) % self.address.workers

    @property
    def sent_bytes(self) -> int:
        return sum(way.sent_bytes for way in self._ways.values())

    def announce(self, version: PolicyVersion) -> None:
        """Begin the transfer of `version` at a sender. Rank 0 notifies the receivers."""
        self._transfers += 1
        if self.rank == 0:
            self._running_store().set(f"transfer/{self._transfers}", b"")

    def await_announcement(self, version: PolicyVersion) -> None:
        """Block a receiver until `announce`, `abort`, or the loss of rank 0. Raises RuntimeError for the latter two."""
        self._transfers += 1
        self._running_store().await_value(f"transfer/{self._transfers}", timeouts.GLOO_BACKSTOP)

    @property
    def forwards(self) -> bool:
        """Whether this receiver passes buckets on."""
        return any(hop.parent == self.rank for hop in self._hops)

    def way(self, sender: int, taker: int) -> Link:
        """Return this member's place on the way of the buckets of `sender` that worker `taker` of each rollout takes."""
        return self._ways[sender, taker]

    def settle(self, give_up: float, buffer: torch.Tensor | None = None) -> None:
        """Wait at a receiver until every bucket was passed on, or those in `buffer`. Raises RuntimeError, at the monotonic time
        `give_up` at the latest."""
        while self._forwards and (buffer is None or any(each.data_ptr() == buffer.data_ptr() for _, each in self._forwards)):
            settle(self._forwards, len(self._forwards) - 1, give_up)

    def wait_for_senders(self, nbytes: int, give_up: float) -> int:
        """Report to rank 0 that the receivers have this sender's part, `nbytes` bytes. Rank 0 waits for all parts, until the
        monotonic time `give_up`, and returns their bytes. Raises RuntimeError with the failed sender and the reason."""
        if self.rank:
            self._running_store().set(self._part(self.rank), str(nbytes))
            return nbytes
        # Each other sender sets its part after its own receivers have taken all its buckets, or reports its failure.
        return nbytes + sum(self._await_part(sender, give_up) for sender in range(1, self.address.senders))

    def report_failure(self, message: str) -> None:
        """Report from any other sender to rank 0 that this sender's part has failed."""
        if self.rank:
            with suppress(RuntimeError):  # rank 0 has left
                self._running_store().set(self._part(self.rank), message)

    def _part(self, sender: int) -> str:
        return f"part/{self._transfers}/{sender}"

    def _await_part(self, sender: int, give_up: float) -> int:
        store, label = self._running_store(), self.address.label(sender)
        try:
            message = store.await_value(self._part(sender), max(give_up - time.monotonic(), timeouts.TORCH_LEAST)).decode()
        except RuntimeError as error:
            self._running_store()
            late = time.monotonic() >= give_up
            raise RuntimeError(f"the part of {label} was not taken" + ("" if late else f": {reason(error)}")) from error
        if not message.isdigit():
            raise RuntimeError(f"{label}: {message}")
        return int(message)

    def set_timeout(self, seconds: float) -> None:
        for link in self._links:
            link.set_timeout(seconds)

    def abort(self) -> None:
        """Leave for good. Blocked threads fail here at once, at the peers once these see it. At rank 0 a rendezvous ends for
        all that have come. Idempotent, from any thread. Also the normal end of a group, once every receiver has verified the
        last transfer: an arrived bucket may still fail when its connection closes. A process should do this before its exit."""
        self.aborted = True
        here, connected = frozenset({(self.address.host, self.address.port)}), bool(self._links)
        for link in self._links:
            link.abort()
        shut_down(frozenset() if connected else here, here)
        if connected:
            self._store = None

    def _running_store(self) -> AuthenticatedStore:
        store = self._store
        if store is None:
            raise RuntimeError("the group was aborted")
        return store


def _left(give_up: float) -> float:
    return max(give_up - time.monotonic(), timeouts.RENDEZVOUS_LEAST)


def open_rendezvous(
    address: GroupAddress, interface: str, port_range: PortRange | None = None, name: str = "sender"
) -> WeightGroup:
    """Open the rendezvous of `address`, which lacks host, port and key, as rank 0 on a free port of `interface` within
    `port_range`. Does not block. Raises UserError for an unknown interface, or a range without a free port."""
    address = replace(address, key=new_key())
    ip, patience = own_address(interface), timedelta(seconds=address.timeout)
    with listen(ip, port_range, BACKLOG) as listener:
        port = listener.getsockname()[1]
        descriptor = listener.detach()
        store = dist.TCPStore(ip, port, is_master=True, timeout=patience, wait_for_workers=False, master_listen_fd=descriptor)
    address = replace(address, host=ip, port=port)
    return WeightGroup(address, name, store, ip)


def join_rendezvous(address: GroupAddress, name: str) -> WeightGroup:
    """Enter the rendezvous as `address.rank`; block until all members are there. Raises ServiceFault, phase "rendezvous"."""
    give_up, patience = time.monotonic() + address.timeout, timedelta(seconds=address.timeout)
    try:
        store = dist.TCPStore(address.host, address.port, is_master=False, timeout=patience, wait_for_workers=False)
    except RuntimeError as error:
        message = f"{address.label(0)} at {address.host}:{address.port} cannot be reached: {reason(error)}"
        raise ServiceFault(name, "rendezvous", message, address.timeout) from error
    left = replace(address, timeout=_left(give_up))
    return WeightGroup(left, name, store, own_address(AUTO, address.host)).connect()


# ---- Sender


# Buckets under way at once: two are on the wire while the others are hashed or verified.
DEPTH = 4


class SendBuffers:
    """The buckets of one sender, and the version in them. They outlive epochs: the group is an argument of `send`. A rank of a
    trainer has memory for its own part of the model only.

    The order is `begin`, `fill` (gather), `send`. `send` may come before `fill`: a bucket leaves as soon as it is whole.
    Every bucket has its own buffer. So a version can be sent again, in another epoch, until the next `begin`."""

    def __init__(
        self,
        manifest: Manifest,
        *,
        number: int = 0,
        pin: bool = False,
        takes_changes: bool = False,
        whole: torch.Tensor | None = None,
        held: PolicyVersion | None = None,
    ):
        """Make the buckets of the manifest's sender `number`. `pin` page-locks the buffers, for copies from an accelerator.
        `takes_changes`: note what `fill` changes, for deltas. `whole`: an arena that holds the version `held`, for this sender
        alone to send. Raises InvalidMessage for a manifest without a plan."""
        self.manifest = manifest
        self.number = number
        buckets = plan_buckets(manifest)
        self.count = len(buckets)  # of all senders
        self.own = [(index, bucket) for index, bucket in enumerate(buckets) if bucket.root == number]
        if whole is not None:
            runs = [target.run for target in targets_of(manifest, buckets, whole)]
            self.buffers = [run for run in runs if run is not None]
        else:
            self.buffers = allocate([bucket.nbytes for _, bucket in self.own], pin, AVAILABLE)
            if self.own and AVAILABLE and not pin:
                in_thread("populate-buckets", lambda: populate(self.buffers[0]))
        self._pieces: dict[int, list[tuple[int, Piece, torch.Tensor]]] = {}  # by tensor: own bucket, piece, its memory
        for position, ((_, bucket), buffer) in enumerate(zip(self.own, self.buffers, strict=True)):
            for piece in bucket.pieces if whole is None else ():
                spec = manifest.tensors[piece.tensor]
                shape = (*(last - first for first, last in piece.span), *spec.shape[len(piece.span) :])
                view = typed(buffer[piece.offset :], spec, shape)
                self._pieces.setdefault(piece.tensor, []).append((position, piece, view))
        self._takes_changes = takes_changes
        self._words: list[list[Positions] | None] = [None] * len(self.own)  # the changed words of each bucket; None: any
        self._changed = threading.Condition()  # guards the fields below
        self._missing = [0 if whole is not None else len(bucket.pieces) for _, bucket in self.own]  # that each still lacks
        self._digests: dict[int, int] = {}  # of this version's buckets at their first send, made by `_first`
        self._first: BucketTags | None = None
        self._held = held  # the version that the buckets hold, or are being filled with
        self._intact = True  # False once a bucket has changed since it was gathered
        self._group: WeightGroup | None = None  # of the transfer under way
        self._taken = 0  # buckets that the transfer's receivers have
        self._gather_seconds = 0.0  # of this version, so far

    def begin(self, version: PolicyVersion, timeout: float) -> None:
        """Expect `version` in the buckets. Blocks while a transfer reads them. Raises DeadlineExceeded after `timeout` s."""
        with self._changed:
            self._await_idle("snapshot", timeout)
            # Buckets that were filled before hold the version before, so that `fill` finds what changes.
            known = self._takes_changes and self._held is not None and not any(self._missing)
            self._digests, self._first, self._intact = {}, None, True
            self._missing = [len(bucket.pieces) for _, bucket in self.own]
            self._words = [[] if known else None for _ in self.own]
            self._held = version
            self._changed.notify_all()

    def await_held(self, version: PolicyVersion, timeout: float) -> PolicyVersion | None:
        """Wait up to `timeout` s until `version` is being gathered. Returns the buckets' version; None if one has changed."""
        with self._changed:
            self._changed.wait_for(lambda: self._held is not None and self._held >= version, timeout)
            return self._held if self._intact else None

    @torch.no_grad()
    def fill(self, shards: Iterable[Shard]) -> None:
        """Copy what this sender sends out of `shards`, which are all that this process holds, in any order. Casts to the
        manifest's dtypes. Raises InvariantViolated if some of it is in none of them."""
        began, left = time.monotonic(), sum(map(len, self._pieces.values()))
        try:
            for shard in shards:
                for position, piece, view in self._pieces.get(shard.tensor, ()):
                    if (span := _within(piece.span, shard.span)) is not None:
                        self._put(position, piece.offset, view, indexed(shard.block, span), began)
                        left -= 1
            if left:
                raise InvariantViolated(f"sender {self.number}: {left} of the pieces that it sends are in no shard")
        except BaseException:
            with self._changed:
                self._held = None
            raise

    def _put(self, position: int, offset: int, view: torch.Tensor, block: torch.Tensor, began: float) -> None:
        words = self._words[position]
        if words is None or view.itemsize % 2:
            view.copy_(block)
            self._words[position] = None
        else:
            new, old = words_of(block.to("cpu", view.dtype).contiguous()), words_of(view)
            changed = np.flatnonzero(old != new)
            old[changed] = new[changed]
            words.append(changed + offset // 2)
        with self._changed:
            self._gather_seconds = time.monotonic() - began
            self._missing[position] -= 1
            if not self._missing[position]:
                self._changed.notify_all()

    def send(self, group: WeightGroup, version: PolicyVersion, deadline: float) -> Future[WeightsSent]:
        """Send this sender's buckets, stamped with `version`, from a thread. Each must be whole and taken within `deadline`
        seconds. Sender 0's future ends once the receivers have the parts of all senders; its result counts all parts.

        Blocks while another transfer ends; raises DeadlineExceeded after `deadline` seconds. On any failure the group is
        aborted, which fails the receivers too. The future raises ServiceFault: of phase "transfer", or of phase "snapshot" if a
        bucket that is sent again has changed. The future raises UserError if the user can mend the failure."""
        with self._changed:
            self._await_idle("transfer", deadline)
            self._group, self._taken = group, 0
        return in_thread(f"send-{version}", lambda: self._send(group, version, deadline))

    def abort(self) -> None:
        """End any transfer under way: leave its group for good. Idempotent, from any thread."""
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
            # Do not announce before the first bucket is whole: the receivers' deadlines count from the announcement.
            if self.own:
                self._await_whole(0, group, give_up)
                began = time.monotonic()
            group.set_timeout(deadline)
            group.announce(version)
            with spans.log.span("send", spans.WEIGHT_SYNC, step=version.step):
                self._send_all(group, version, give_up)
            # Rank 0 blocks here until the other senders' parts are taken, so that one future covers the whole version.
            sent = group.wait_for_senders(group.sent_bytes - before, give_up)
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
        """Return the progress of the transfer of `version`, for messages."""
        if self._taken >= len(self.own):
            return f"version {version}"
        return f"{name_of(self.manifest, self.own[self._taken][0])} of version {version} was not taken"

    def _send_all(self, group: WeightGroup, version: PolicyVersion, give_up: float) -> None:
        pending: deque[tuple[Transfer, torch.Tensor]] = deque()
        tags: dict[int, list[bytes]] = {}  # of the present window, by taker
        windows = [bucket.window for _, bucket in self.own]
        first = self._first = self._first or group.tags
        for position, ((index, bucket), buffer) in enumerate(zip(self.own, self.buffers, strict=True)):
            # `_put` unblocks this when the bucket's last piece is there, `abort` when the group ends.
            self._await_whole(position, group, give_up)
            digest = group.tags.digest(buffer)
            tag, link = group.tags.tag(index, digest, version), group.way(self.number, bucket.taker)
            tags.setdefault(bucket.taker, []).append(tag)
            # A later group has another seed.
            self._require_same(index, digest if first is group.tags else first.digest(buffer), group.name)
            words = self._words[position]
            link.describe(tag, None if words is None else np.sort(np.concatenate(words)))
            pending.append((link.send(index, buffer), buffer))
            # The receivers' taking of the oldest bucket unblocks this: about `DEPTH` buckets are under way to each worker.
            self._take(pending, DEPTH * group.address.workers - 1, give_up)
            if windows[position + 1 : position + 2] != [bucket.window]:  # the last of its window
                for taker, sent in tags.items():  # the last message to each, whose size a receiver knows
                    last, link = torch.frombuffer(bytearray(b"".join(sent)), dtype=torch.uint8), group.way(self.number, taker)
                    link.describe(sent[-1], None)
                    pending.append((link.send(self.count + self.number, last), last))
                tags.clear()
        self._take(pending, 0, give_up)

    def _require_same(self, index: int, digest: int, name: str) -> None:
        """Raise ServiceFault if the bucket's contents have changed since its first send."""
        if self._digests.setdefault(index, digest) != digest:
            self._intact = False
            message = f"{name_of(self.manifest, index)} has changed in memory since it was gathered"
            raise ServiceFault(name, "snapshot", message)

    def _await_whole(self, position: int, group: WeightGroup, give_up: float) -> None:
        with self._changed:
            whole = self._changed.wait_for(lambda: group.aborted or not self._missing[position], give_up - time.monotonic())
        if group.aborted:
            raise RuntimeError("the group was aborted")
        if not whole:
            raise RuntimeError("it was not gathered in time")

    def _take(self, pending: deque[tuple[Transfer, torch.Tensor]], most: int, give_up: float) -> None:
        while len(pending) > most:
            settle(pending, len(pending) - 1, give_up)
            self._taken += 1


def _within(span: Span, held: Span) -> Span | None:
    """Return the part `span` of a tensor relative to its part `held`, or None if it does not lie in there."""
    if not held:
        return span
    if not span or any(first < begin or last > end for (first, last), (begin, end) in zip(span, held, strict=False)):
        return None
    return tuple((first - begin, last - begin) for (first, last), (begin, _) in zip_longest(span, held, fillvalue=(0, 0)))


class _Joining(NamedTuple):
    """The epoch that a sender has begun to join."""

    epoch: int
    group: Future[WeightGroup]
    pending: WeightGroup | None  # at rank 0, which hosts the rendezvous: its `abort` ends the joining of all members


class WeightSender:
    """A sender of weights: a rank of the trainer, or a rollout for others. The event loop calls every method but `gather`."""

    def __init__(
        self, buffers: SendBuffers, config: Config, name: str, *, backend: str, names: tuple[str, ...] = (), full_every: int = 0
    ):
        """Make a sender. `names`: the manifest's senders. `backend`, `full_every`: of the `GroupAddress` that rank 0 sends."""
        self.buffers = buffers
        self._name, self._names = name, names or (name,)
        self._settings, self._network = config.weight_sync, config.network
        self._backend, self._full_every = backend, full_every
        self._epoch = 0  # that this sender is in, or is about to join
        self._joining: _Joining | None = None  # set when that epoch begins to connect; `gather` reads the field once
        self._left: Future[None] = _done()  # a new future for each epoch left: so a comparison shows whether an epoch was left

    async def open(self, command: InitWeightGroup) -> WeightGroupReady:
        """Host the rendezvous of an epoch as rank 0, and begin to connect. Raises Cancelled once the epoch is left.

        Known limit: a server of names that never answers holds up every later epoch of this process."""
        settings = self._settings
        left, self._epoch = self.close(), command.epoch  # `gather` finds no group until `_connect`
        address = GroupAddress(
            epoch=command.epoch,
            world_size=len(self._names) + len(command.names) * (workers := self.buffers.manifest.target.members),
            backend=self._backend,
            timeout=settings.join_timeout,
            full_every=self._full_every,
            names=(*self._names, *command.names),
            machines=command.machines,
            senders=len(self._names),
            workers=workers,
        )

        def host() -> WeightGroup:
            with _HOSTING:
                pending = open_rendezvous(address, self._network.interface, self._network.port_range, self._name)
                if self._left is not left:
                    pending.abort()  # before the next rendezvous is hosted
                return pending

        # Wait until the epoch before is left: both epochs may use the same port, and the transfer before must free the buckets.
        await asyncio.wrap_future(left)
        # In a thread, as an abort is answered meanwhile: torch looks up names, for seconds where no name server answers.
        hosting = in_thread("host-weights", host)
        try:
            pending = await asyncio.wrap_future(hosting)
            self._require_in(command.epoch, left)
        except (asyncio.CancelledError, Cancelled):
            hosting.add_done_callback(_abandon)  # no member will get the address
            raise
        # Connect in the background: the receivers can join only after this method has returned the address.
        self._connect(command.epoch, pending.connect, pending)
        return WeightGroupReady(pending.address, self.buffers.manifest)

    async def join(self, address: GroupAddress) -> None:
        """Join the group of `address`, which rank 0 of the senders hosts. Raises Cancelled once the epoch is left."""
        left, self._epoch = self.close(), address.epoch  # `gather` finds no group until `_connect`
        own = replace(address, rank=self.buffers.number)
        # Wait until the epoch before is left, then check that no `close` came meanwhile.
        await asyncio.wrap_future(left)
        self._require_in(address.epoch, left)
        # Wait until all members are connected, or the rendezvous fails. After an abort this ends by the rendezvous' timeout.
        await asyncio.wrap_future(self._connect(address.epoch, lambda: join_rendezvous(own, self._name)))

    def gather(self, shards: Iterable[Shard], version: PolicyVersion, epoch: int) -> Future[WeightsSent]:
        """Fill the buckets with `version` in the engine's thread, and send each once it is whole. Returns the transfer's
        future. Blocks while the transfer before ends, and while the group connects. They are filled even if they cannot be
        sent, for `send`. The future raises ServiceFault: of phase "transfer" if the version is kept."""
        # Wait until the transfer before no longer reads the buckets: its end or an abort unblocks this.
        try:
            self.buffers.begin(version, self._settings.transfer_timeout)
        except SluiceError as error:
            return _done(error)
        # Wait until the group is connected. The sending thread then waits for the first whole bucket, which `fill` provides.
        try:
            sending = self._begin_transfer(version, epoch)
        except SluiceError as error:
            sending = _done(error)
        with spans.log.span("gather", spans.WEIGHT_SYNC, step=version.step):
            self.buffers.fill(shards)
        return sending

    async def send(self, version: PolicyVersion, epoch: int) -> WeightsSent:
        """Send `version` again, beside the engine. Raises ServiceFault, phase "snapshot", if it is not whole in the buckets."""

        def send() -> WeightsSent:
            held = self.buffers.await_held(version, self._settings.transfer_timeout)
            if held != version:
                raise ServiceFault(self._name, "snapshot", f"version {version} was not kept: {held or 'no whole'} is there")
            return self._begin_transfer(version, epoch).result()

        # In a thread, which waits for the engine to begin to gather, then for the members and the transfer, until `close`.
        return await asyncio.wrap_future(in_thread("resend", send))

    def close(self, epoch: int | None = None) -> Future[None]:
        """Leave the group of `epoch`, or any group if None, and stop sending. The future is done once the group is left."""
        if epoch not in (None, self._epoch):
            return _done()
        joining, before = self._joining, self._left
        self._joining, self._epoch = None, 0

        def leave() -> None:
            wait([before])  # leave one group at a time
            if joining is None:
                return
            if joining.pending is not None and not joining.group.done():
                joining.pending.abort()
            self.buffers.abort()
            joining.group.add_done_callback(_abandon)

        # In a thread: the group's connections are closed there.
        self._left = in_thread("leave-weights", leave)
        return self._left

    def _require_in(self, epoch: int, left: Future[None]) -> None:
        """Raise Cancelled if the epoch was left. `left`: of `close`; the number may be of an epoch that was opened again."""
        if self._left is not left:
            raise Cancelled(f"{self._name}: epoch {epoch} was given up")

    def _connect(
        self, epoch: int, connect: Callable[[], WeightGroup], pending: WeightGroup | None = None
    ) -> Future[WeightGroup]:
        self._joining = _Joining(epoch, in_thread("join-weights", connect), pending)
        return self._joining.group

    def _begin_transfer(self, version: PolicyVersion, epoch: int) -> Future[WeightsSent]:
        """Start the transfer, off the event loop. Blocks until the group is connected, at most for `join_timeout`."""
        joining, patience = self._joining, self._settings.join_timeout
        if joining is None or joining.epoch != epoch:
            raise ServiceFault(self._name, "transfer", f"there is no sync group of epoch {epoch}")
        try:
            group = joining.group.result(patience)
        except TimeoutError:
            raise DeadlineExceeded(self._name, "transfer", "the group is not connected", patience) from None
        return self.buffers.send(group, version, self._settings.transfer_timeout)


_HOSTING = threading.Lock()  # opens one rendezvous at a time: two in a process may need the same port


def _done(error: Exception | None = None) -> Future[Any]:
    future: Future[Any] = Future()
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
    return future


def _abandon(made: Future[WeightGroup]) -> None:
    """Leave the rendezvous or group `made` as soon as it exists."""
    if made.exception() is None:
        made.result().abort()
