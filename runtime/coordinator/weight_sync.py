"""Weight sync: new weights go from the trainer to every living rollout. This drives it; the bytes bypass the coordinator.

      train_loop ── begin(v) ──► WeightPublisher ──owns──► SyncGroup ── init_weight_group ──► trainer     one epoch: the trainer
          │                          │  lock: one             │ ── join_weights ────► rollouts       and living rollouts
          │                          │  sync at a time        │
          └── finish() ◄── WeightSync ◄─── reads its ─────────┘
                               │           epoch and ports
             send_weights ─────┼───► trainer ═══ buckets (runtime/weights) ═══► rollouts
             receive_weights ──┼───► rollouts: staged beside the weights in use
             commit_weights ───┼───► rollouts: swap between two steps
             abort_weights ────┴───► all: leave the group

The trainer waits for no process until it has made the version; rollouts wait for its announcement. `finish` waits for answers
and deadlines, as `SyncAttempt` (weight_sync_protocol.py) decides. A loss or a newcomer makes the epoch stale.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from itertools import count
from typing import Any, Literal

from msgspec import structs
from msgspec.structs import replace

from runtime import commands, timeouts
from runtime.commands import AbortWeights, JoinWeights, ReceiveWeights, ResendWeights, RolePort, SendWeights
from runtime.config import WeightSyncConfig as Settings
from runtime.coordinator.buffer import Buffer
from runtime.coordinator.pools import RolloutPool
from runtime.coordinator.register import ROLLOUT, Member, UnitChange, UnitState
from runtime.coordinator.weight_sync_protocol import Answer, Epoch, Phase, SyncAttempt, SyncOrder
from runtime.errors import InvariantViolated, ServiceFault, SluiceError, Unanswered, Unreachable
from runtime.process.waiting import done_within
from runtime.telemetry.metrics import WeightSyncFigures
from runtime.types import PolicyVersion
from runtime.weights.plan import shared_machines, transports

TRIES = 3  # of a rendezvous, or of a weight sync, that fails although no rollout is lost

log = logging.getLogger("sluice")


class SyncGroup:
    """The trainer and the rollouts of one epoch, connected for weights. Callers read `epoch`, `members`, `transport`. In the
    trainer's place may be a rollout with the committed version, which sends it to newcomers."""

    def __init__(self, trainer: RolePort, pool: RolloutPool, settings: Settings, machines: Mapping[str, str]):
        """Create the group. `machines`: of the processes that send weights, by name."""
        self.trainer, self.machines, self.pool, self.settings = trainer, machines, pool, settings
        self.epoch = Epoch(0, ())  # the newest epoch that was connected
        self.members: dict[str, RolePort] = {}  # the rollouts of this epoch by name
        self.transport = ""  # the transports of this epoch; "" before the first epoch

    async def open(self) -> None:
        """Connect the trainer and every living rollout. A rollout that does not join is lost, and left out of the next epoch.
        Raises ServiceFault if no rollout joins, or if the group fails `TRIES` times although no rollout is lost."""
        fruitless = 0
        while True:
            await self.pool.wait_for_living()
            epoch = self.pool.membership.open()
            fault = await self.meet(epoch)
            if fault is None:
                return
            log.warning("epoch %d: %s", epoch.number, fault)
            if set(epoch.members) <= set(self.pool.membership.living):
                fruitless += 1
            if fruitless == TRIES:
                raise fault

    async def meet(self, epoch: Epoch) -> SluiceError | None:
        """Connect the group. Return None, or the fault. Raises UserError if the members cannot use the configured transport."""
        ports: list[RolePort] = [self.pool.register.port(member) for member in epoch.members]
        receivers = {name: machine for port in ports for name, machine in port.machines.items()}
        machines = {**self.machines, **receivers}
        shared = shared_machines(self.settings.transport, self.settings.backend, machines)
        names = tuple(receivers)
        # The trainer opens the rendezvous and answers at once. It connects concurrently, once the rollouts have joined.
        hosted = await self.trainer.call(commands.InitWeightGroup(epoch.number, names, shared))
        address, manifest = hosted.address, hosted.manifest
        joins = [asyncio.ensure_future(self.trainer.post(JoinWeights(address, manifest)))] if address.senders > 1 else []
        ranks = dict(zip(names, count(address.senders, address.workers), strict=False))
        joins += [
            asyncio.ensure_future(port.post(JoinWeights(replace(address, rank=ranks[port.name]), manifest))) for port in ports
        ]
        try:
            # Wait for all joins together, as each blocks until all members are there. The first failure ends the wait.
            await asyncio.wait(joins, return_when=asyncio.FIRST_EXCEPTION)
            failed = next((error for join in joins if join.done() and (error := join.exception())), None)
            if failed is None:
                self.epoch, self.members = epoch, {port.name: port for port in ports}
                self.transport = " and ".join(sorted(transports(shared, len(self.machines))))
                log.info("epoch %d: %s to %s by %s", epoch.number, self.trainer.name, ", ".join(names), self.transport)
                return None
            self.pool.membership.break_up(epoch.number)
            if not isinstance(failed, SluiceError):
                raise failed
            # The members that joined would wait for the failed one until their own deadline, so ask them to leave.
            return await self._leave(epoch, ports, failed)
        finally:
            for join in joins:
                join.add_done_callback(seen)
                join.cancel()

    async def _leave(self, epoch: Epoch, ports: Sequence[RolePort], failed: SluiceError) -> SluiceError:
        """Ask all members to leave the group. A rollout that does not confirm is lost; the other rollouts only waited for it.
        Return the fault to report: the fault of a lost rollout if there is one, else `failed`."""
        version = self.pool.membership.committed or PolicyVersion()
        members: tuple[RolePort, ...] = (self.trainer, *ports)
        left = await asyncio.gather(*(one.call(AbortWeights(version, epoch.number)) for one in members), return_exceptions=True)
        for error in left:
            if isinstance(error, BaseException) and not isinstance(error, SluiceError):
                raise error
        if isinstance(left[0], SluiceError):
            raise left[0]
        for port, error in zip(ports, left[1:], strict=True):
            if isinstance(error, Unreachable | Unanswered):
                self.pool.register.lose(port, str(error))
                failed = failed if isinstance(failed, Unreachable | Unanswered) else error
        return failed


def nearest(newcomers: Sequence[RolePort], serving: Sequence[RolePort], trainer: Collection[str]) -> RolePort | None:
    """Return the rollout that sends the committed version to the newcomers: one on a newcomer's machine, else any of `serving`.
    Return None if none serves, or if only the trainer (on the machines `trainer`) shares a machine with a newcomer."""
    late = {newcomer.machine for newcomer in newcomers} - {""}
    close = [rollout for rollout in serving if rollout.machine in late]
    if close or not late.intersection(trainer):
        return next(iter([*close, *serving]), None)
    return None


def seen(task: asyncio.Future[Any]) -> None:
    """Read the exception of a withdrawn call, so that asyncio does not report an exception that was never retrieved."""
    if not task.cancelled():
        task.exception()


class WeightPublisher:
    """Runs one weight sync at a time, each in an epoch of exactly the living rollouts. `committed` is the version in use.

    A lost rollout is left out of the next epoch, where the same version is tried again. A newcomer need not wait for a step:
    when no weight sync runs, a serving rollout sends it the committed version, else the trainer again from its buckets."""

    def __init__(self, trainer: RolePort, pool: RolloutPool, settings: Settings, step_seconds: float):
        """Create the publisher. `step_seconds`: how long a gather may have to wait for the trainer's current step."""
        self._pool, self._settings, self.step_seconds = pool, settings, step_seconds
        self._lock = asyncio.Lock()  # held by the weight sync that is under way
        self._held = False  # between `hold` and `free`: newcomers are not sent the committed version
        self.waits_for_next = False
        """The trainer is past the committed version: newcomers get it from another rollout, or the next version by `begin`."""
        self.group = SyncGroup(trainer, pool, settings, trainer.machines)
        self._changed = asyncio.Event()
        pool.subscribe(self._changed.set)
        self.kept: PolicyVersion | None = None
        """The version in the trainer's buckets, or about to be there: the trainer can send it again while its engine works."""
        self.abort = ""  # the reason of the newest abort; "" if there was none

    @property
    def committed(self) -> PolicyVersion | None:
        return self._pool.membership.committed

    async def run(self) -> None:
        """Open a new epoch when the living rollouts change, until cancelled. Raises ServiceFault that no rollout caused."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            async with self._lock:
                await self._renew()

    def close(self) -> None:
        """Stop publishing. A later publisher must open a new epoch."""
        self._pool.unsubscribe(self._changed.set)
        self._pool.membership.break_up(self._pool.membership.epoch.number)

    async def begin(self, version: PolicyVersion) -> WeightSync:
        """Ask the rollouts to receive `version` and the trainer to send it. `WeightSync.close` must follow.

        Waits while another weight sync runs, or while no rollout lives. Call `begin` right after posting the commands that make
        the version, and post these after the version before is committed. This order keeps the weights unchanged until the
        version commits, so a failed transfer can be sent again."""
        if self.committed is not None and version <= self.committed:
            raise InvariantViolated(f"weight sync of version {version} after {self.committed} was committed")
        lock = asyncio.Lock() if self._held else self._lock
        await lock.acquire()
        self.waits_for_next = False
        try:
            if self._pool.membership.stale:
                await self.group.open()
            return WeightSync(self, version, lock)
        except BaseException:
            lock.release()
            raise

    async def hold(self) -> None:
        """Wait for the weight sync under way. From then until `free`, only `begin` and `publish` send weights."""
        await self._lock.acquire()
        self._held = True

    def free(self) -> None:
        self._held = False
        self._lock.release()

    async def publish(self, version: PolicyVersion) -> WeightSyncFigures:
        """Run the weight sync of `version`, which the trainer has made already."""
        with closing(await self.begin(version)) as sync:
            return await sync.finish()

    async def _renew(self) -> None:
        """Open a new epoch if the current one is stale, and bring the committed version to the newcomers."""
        membership = self._pool.membership
        if self.committed is None or not membership.living or not membership.stale:
            return
        if membership.newcomers:
            await self._sync_from_peer(self.committed)
        if self.waits_for_next:
            return
        await self.group.open()
        if membership.newcomers:
            with closing(WeightSync(self, self.committed)) as sync:
                await sync.finish()
                self.waits_for_next = sync.past

    async def _sync_from_peer(self, version: PolicyVersion) -> None:
        """Let the nearest serving rollout send `version` to the newcomers. If this fails, the trainer sends it."""
        register = self._pool.register
        newcomers = [register.port(member) for member in self._pool.membership.newcomers]
        peer = nearest(newcomers, self._pool.units(), self.group.machines.values())
        if peer is None:
            return
        group = SyncGroup(peer, self._pool, self._settings, {peer.name: peer.machine})
        try:
            # Connect once. A newcomer that does not join is lost.
            fault = await group.meet(self._pool.membership.open(self._pool.membership.newcomers))
            if fault is None:
                with closing(WeightSync(self, version, group=group)) as sync:
                    await sync.attempt()
        except SluiceError as error:
            if isinstance(error, Unreachable | Unanswered):
                register.lose(peer, str(error))
            fault = error
        if fault is not None:
            log.warning("%s did not bring version %s to newcomers: %s", peer.name, version, fault)


class WeightSync:
    """The weight sync of one version: the state machine gets the answers of the ports, and its orders become calls. An aborted
    attempt is followed by another one in a new epoch, without the lost members."""

    def __init__(
        self,
        publisher: WeightPublisher,
        version: PolicyVersion,
        lock: asyncio.Lock | None = None,
        group: SyncGroup | None = None,
    ):
        """Post the first attempt. `close` releases `lock`. `group`: None for the trainer's group."""
        self._publisher, self._version, self._lock = publisher, version, lock
        self._group, self._from_peer = group or publisher.group, group is not None
        self._clock = asyncio.get_running_loop().time
        self._calls: set[asyncio.Task[Answer]] = set()
        self._answers: deque[asyncio.Task[Answer]] = deque()  # in order of arrival
        self._answer_arrived = asyncio.Event()
        self._pause = self._swap = 0.0
        self._sent = commands.WeightsSent(0, 0.0)
        self._received = commands.WeightsReceived()  # from the rollout that finished last
        self._aborts = self._fruitless = 0
        self._behind = False  # the weights may have to be gathered again, behind the trainer's current command
        self.past = False
        """The version is committed, but the trainer has neither these weights nor their buckets any more to send again."""
        self._post()

    async def finish(self) -> WeightSyncFigures:
        """Complete the weight sync, once the trainer has made the version: the deadlines count from here. Gives up if `past`.
        Raises ServiceFault without a trainer or a rollout, or after `TRIES` failed attempts without a lost member."""
        began = self._clock()
        # `attempt` waits for the members' answers. After an abort, `open` connects a new epoch without the lost members.
        while not await self.attempt() and not self.past:
            await self._group.open()
            self._post()
        return WeightSyncFigures(
            seconds=self._clock() - began,
            pause_seconds=self._pause,
            bytes=self._sent.bytes,
            aborts=self._aborts,
            epoch=self._epoch.number,
            gather_seconds=self._sent.gather_seconds,
            swap_seconds=self._swap,
            **structs.asdict(self._received),
        )

    def close(self) -> None:
        """Withdraw the calls that are under way and release the lock. The caller must call this in any case, once."""
        self._withdraw()
        if self._lock is not None:
            self._lock.release()

    def _withdraw(self) -> None:
        for task in self._calls:
            task.cancel()
        self._calls.clear()
        self._answers.clear()

    def _post(self) -> None:
        """Post the calls of one attempt, in the newest epoch."""
        self._epoch, self._ports = self._group.epoch, self._group.members
        trainer, number = self._group.trainer, self._epoch.number
        # The sender gathers and sends the version, or sends it again if its buckets, or a peer, hold it.
        again = self._from_peer or self._publisher.kept == self._version
        command = ResendWeights(self._version, number) if again else SendWeights(self._version, number)
        if not self._from_peer:
            self._publisher.kept = self._version
        self._call(trainer.name, self._send(command, trainer.post(command)), "transfer")
        for name, rollout in self._ports.items():
            self._call(name, self._receive(rollout.post(ReceiveWeights(self._version, number))), "verify")

    async def attempt(self) -> bool:
        """Drive one attempt to its end. Return True if the version is committed, False if the attempt was aborted."""
        settings, gather = self._group.settings, self._publisher.step_seconds if self._behind else 0.0
        seconds: dict[Phase, float] = {
            "transfer": settings.transfer_timeout + gather,
            "verify": settings.transfer_timeout,
            "commit": settings.commit_timeout,
            "abort": timeouts.SYNC_ABORT,
        }
        machine = SyncAttempt(self._version, self._ports, self._group.trainer.name, seconds, self._clock())
        while not machine.final:
            await self._step(machine)
        self._withdraw()
        return self._conclude(machine)

    def _conclude(self, machine: SyncAttempt) -> bool:
        pool = self._group.pool
        self._fruitless += not machine.lost and machine.phase == "aborted"
        self._behind |= self._group.trainer.name in machine.failed  # the trainer may have to gather again
        if self._group.trainer.name in machine.lost and self._from_peer:
            pool.register.lose(self._group.trainer, machine.reason)
        if self._group.trainer.name in machine.lost or self._fruitless == TRIES:
            raise ServiceFault(", ".join(sorted(machine.lost)) or "weight sync", "publish", machine.reason)
        reason = machine.reason
        if machine.phase == "done" and self._group.settings.in_flight == "drain":  # the attempt reached the commit
            reason += "; with weight_sync.in_flight drain, samples under way have to end within weight_sync.commit_timeout"
        for name in sorted(machine.lost):
            pool.register.lose(self._ports[name], reason)
        if machine.phase == "done":
            pool.commit(self._epoch, self._version, self._ports.keys() - machine.lost)
            return True
        self._aborts += 1
        self._publisher.abort = reason
        log.warning("weight sync aborted in epoch %d: %s", self._epoch.number, reason)
        pool.membership.break_up(self._epoch.number)
        return False

    async def _step(self, machine: SyncAttempt) -> None:
        """Wait for an answer or the deadline, pass it to the state machine, and carry out the machine's orders."""
        assert machine.next_deadline is not None
        timeout = max(0.0, machine.next_deadline - self._clock())
        self._answer_arrived.clear()
        if not self._answers:
            await done_within(self._answer_arrived.wait(), timeout)
        while self._answers:
            self._carry_out(machine.handle(self._answers.popleft().result(), self._clock()))
        self._carry_out(machine.handle(None, self._clock()))

    def _carry_out(self, orders: list[SyncOrder]) -> None:
        for order in orders:
            for name in order.members:
                if order.phase == "commit":
                    self._call(name, self._commit(self._ports[name]), "commit")
                else:
                    member = self._ports.get(name, self._group.trainer)
                    self._call(name, member.post(AbortWeights(self._version, self._epoch.number)), "abort")

    def _call(self, name: str, call: Awaitable[Any], phase: Phase) -> None:
        """Start `call`. Its answer counts for the phase `phase`."""
        task = asyncio.ensure_future(_answer(name, phase, call))
        self._calls.add(task)
        task.add_done_callback(self._hear)

    def _hear(self, task: asyncio.Task[Answer]) -> None:
        seen(task)
        if task in self._calls:  # otherwise it was withdrawn
            self._calls.discard(task)
            self._answers.append(task)
            self._answer_arrived.set()

    async def _commit(self, rollout: RolePort) -> None:
        ordered = self._clock()
        committed = await rollout.call(commands.CommitWeights(self._version, self._epoch.number))
        self._pause = max(self._pause, committed.pause_seconds)
        self._swap = max(self._swap, self._clock() - ordered)

    async def _receive(self, answer: Awaitable[commands.WeightsReceived]) -> None:
        self._received = await answer

    async def _send(self, command: SendWeights | ResendWeights, answer: Awaitable[commands.WeightsSent]) -> None:
        try:
            self._sent = await answer
        except SluiceError as error:
            if self._from_peer:  # the trainer's state is not touched
                raise
            # Gather again after a failed resend: of several senders one may have found a changed bucket in its memory, while
            # another sender, whose transfer failed because of that, answered first.
            phase = error.phase if isinstance(error, ServiceFault) else ""
            if isinstance(command, ResendWeights) or phase != "transfer":
                self._publisher.kept = None
            counts = self._version == self._publisher.committed
            self.past = counts and isinstance(command, SendWeights) and phase == "snapshot"
            raise


async def _answer(name: str, phase: Phase, call: Awaitable[Any]) -> Answer:
    """Return the answer of `call`. Raises errors that are no SluiceError."""
    try:
        await call
        return Answer(phase, name)
    except SluiceError as error:
        return Answer(phase, name, str(error), isinstance(error, Unreachable | Unanswered))


# ---- Devices

Role = Literal["rollout", "reference", "trainer"]


class Lease:
    """The right to use a role's devices. On shared devices, versions are published only at its end, for lack of memory."""

    def __init__(self, publisher: WeightPublisher | None = None):
        self._publisher = publisher
        self.version: PolicyVersion | None = None  # which the trainer has, to be published at the lease's end
        self.figures: WeightSyncFigures | None = None  # of this version

    async def begin_sync(self, version: PolicyVersion) -> WeightSync | None:
        """Begin the weight sync of `version`, behind the commands that make it. Return None if it comes at the lease's end."""
        if self._publisher is not None:
            return await self._publisher.begin(version)
        self.version = version
        return None


class Devices:
    """Dedicated devices: every role has its own, and a lease does nothing."""

    def __init__(self, pool: RolloutPool, publisher: WeightPublisher, buffer: Buffer):
        self._pool, self._register, self._publisher, self._buffer = pool, pool.register, publisher, buffer
        self._register.subscribe(self._look)
        for member in self._register.members(ROLLOUT, UnitState.CONNECTED):
            self._arrive(member)

    def close(self) -> None:
        """Stop following rollouts: later connections join in the next attempt. Idempotent."""
        self._register.unsubscribe(self._look)

    def _look(self, change: UnitChange) -> None:
        if change.unit.role == ROLLOUT and change.unit.state is UnitState.CONNECTED:
            self._arrive(change.unit.member)

    def _arrive(self, member: Member) -> None:
        """Let a connected rollout join the sync group."""
        self._register.join(member)

    async def next_lease(self) -> bool:
        """Wait until the trainer should take the devices. Return False if the run ends without another step."""
        return self._buffer.step < self._buffer.last_step

    def have_batch(self) -> bool:
        """Return True if the step being filled needs no more groups from the rollouts."""
        return self._buffer.fills

    @asynccontextmanager
    async def lease(self, role: Role, last: bool = False) -> AsyncIterator[Lease]:
        """Hold the devices of `role`. `last`: the run ends in this lease, and no role needs the devices after it. Raises the
        error of trainer or reference if one fails while devices change hands; this ends the run."""
        lease = Lease(self._publisher)
        yield lease
        if lease.version is not None:
            await self._publisher.publish(lease.version)
