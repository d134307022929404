"""Who may use the devices: `async with devices.lease("trainer"): ...`.

::

    lease          Devices (each role its own)    ColocatedDevices (rollouts, reference and trainer share them)
    "rollout"      at once                        while the rollouts are awake; the trainer's lease waits for its end
    "reference"    at once                        once the rollouts sleep and the reference is on the devices
    "trainer"      at once                        once the rollouts sleep; it ends with the weight sync and their wake-up

While groups are being generated, the rollouts hold the devices as if by a lease: `Devices.next_lease` returns once nothing is
left to be generated, after the η + 1 batches that the bound η admits. So no sample is in flight while the rollouts sleep, and
no sample has tokens of two versions. The trainer then makes up to η + 1 steps in one lease. Only the last version is published:
the rollouts could not generate with the versions before it.

With `training.partial_rollouts` it returns as soon as the next step has its batch, and the trainer makes as many steps as have
theirs; what is in flight then goes on when the rollouts are awake again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Literal

from runtime.cluster.topology import alternates, reference_takes_part
from runtime.commands import Level, Move, Offload, RolePort
from runtime.config import Config
from runtime.coordinator.buffer import Buffer, Group
from runtime.coordinator.device_schedule import (
    Action,
    Arrived,
    DeviceSchedule,
    Event,
    GenerationDone,
    MemberLost,
    Phase,
    ReferenceDone,
    ResidencyChanged,
    SetResidency,
    SetSleepLevel,
    SleepLevelReached,
    Trained,
    VersionPublished,
)
from runtime.coordinator.metrics_recorder import Probes
from runtime.coordinator.pools import Roles, RolloutPool
from runtime.coordinator.register import LIVING, ROLLOUT, Member, UnitChange, UnitState
from runtime.coordinator.weight_sync import WeightPublisher, WeightSync
from runtime.errors import InvariantViolated, SluiceError
from runtime.ledger.states import Mark
from runtime.ledger.states import Phase as GroupPhase
from runtime.telemetry.metrics import PublicationFigures, SpanClock
from runtime.types import PolicyVersion

TO_TRAIN, TO_INFER = "onload", "weight_sync"
_ANY = 1 << 30  # groups: the rollouts' slots do not matter

Role = Literal["rollout", "reference", "trainer"]


class Lease:
    """The right to use a role's devices. A version is published as soon as the trainer has it."""

    figures: PublicationFigures | None = None  # of the version that was published as the lease ended
    version: PolicyVersion | None = None  # the one to be published as the lease ends

    def __init__(self, publisher: WeightPublisher):
        self._publisher = publisher

    async def begin_sync(self, version: PolicyVersion) -> WeightSync | None:
        """Begin to publish `version`, whose update was ordered just now. None: the version is published when the lease ends,
        unless a later version is made before."""
        return await self._publisher.begin(version)

    async def sync(self, version: PolicyVersion) -> None:
        """Publish `version`, which the trainer has, before the lease is over."""
        await self._publisher.publish(version)


class ColocatedLease(Lease):
    """The rollouts have no memory to receive weights into before the steps of the lease are done: it ends with the sync."""

    async def begin_sync(self, version: PolicyVersion) -> None:
        self.version = version

    async def sync(self, version: PolicyVersion) -> None:
        self.version = version


class Devices:
    """Dedicated devices: every role has its own, and a lease does nothing."""

    def __init__(self, pool: RolloutPool, publisher: WeightPublisher, buffer: Buffer):
        self._pool = pool
        self._register = pool.register
        self._publisher = publisher
        self._buffer = buffer
        self._register.subscribe(self._look)
        for unit in self._register.units(ROLLOUT, UnitState.CONNECTED):
            self._arrive(unit.member)

    def close(self) -> None:
        """Stop following rollouts: the next attempt lets those join that connect from now on. Idempotent."""
        self._register.unsubscribe(self._look)

    def _look(self, change: UnitChange) -> None:
        if change.unit.role == ROLLOUT and change.unit.state is UnitState.CONNECTED:
            self._arrive(change.unit.member)

    def _arrive(self, member: Member) -> None:
        """A rollout is connected: it has its devices, and joins the sync group."""
        self._register.join(member)

    async def vacate(self) -> None:
        """After `close`, with trainer or critic lost: the devices are free for others in their place."""

    async def next_lease(self) -> bool:
        """Wait until the trainer should take the devices. False: the run ends without another step."""
        return self._buffer.step < self._buffer.last_step

    def have_batch(self) -> bool:
        """Whether the step that is being filled needs nothing more of the rollouts."""
        return self._buffer.fills

    @asynccontextmanager
    async def lease(self, role: Role, last: bool = False) -> AsyncIterator[Lease]:
        """The devices of `role`. `last`: the run ends in this lease, and no role needs the devices after it. When trainer or
        reference fail as devices change hands, raises their error, which ends the run."""
        yield Lease(self._publisher)


class ColocatedDevices(Devices):
    """The rollouts are asleep at first, and nobody has the devices.

    During a lease of the trainer the pool is closed, and the committed version is not sent to newcomers, whose memory may be
    off the devices. A newcomer joins the pool once it has reached the level of the others, so that it takes part in the next
    publication.
    """

    def __init__(
        self,
        config: Config,
        roles: Roles,
        pool: RolloutPool,
        publisher: WeightPublisher,
        buffer: Buffer,
        probes: Probes,
        spans: SpanClock,
    ):
        self._roles = roles
        self._probes = probes
        self._spans = spans
        self._refers = reference_takes_part(config)
        self._onloads_trainer = not alternates(config)  # else `AlternatingUpdates` does it
        self._partial = config.training.partial_rollouts
        self._scores_drop = config.algorithm.dynamic_sampling  # a score may drop a group, and another be generated in its place
        self._schedule = DeviceSchedule(pool.membership.living)
        self._rollout_leases = 0
        self._reference_leases = asyncio.Event()  # set while the reference has the devices
        self._calls: set[asyncio.Task[None]] = set()
        self._fault: BaseException | None = None
        self._changed = asyncio.Event()
        pool.close()
        super().__init__(pool, publisher, buffer)

    @property
    def phase(self) -> Phase:
        return self._schedule.phase

    @asynccontextmanager
    async def lease(self, role: Role, last: bool = False) -> AsyncIterator[Lease]:
        lease = ColocatedLease(self._publisher)
        if role == "rollout":
            self._rollout_leases += 1
            try:
                yield lease
            finally:
                self._rollout_leases -= 1
                self._buffer.ready_changed.set()
        elif role == "reference":
            if self._refers:
                await self._reference_leases.wait()
            yield lease
        else:
            await self._acquire()
            yield lease
            if not last:
                lease.figures = await self._release(lease.version)

    async def vacate(self) -> None:
        """The rollouts sleep, whatever they were at."""
        for call in self._calls:
            call.cancel()
        members = self._register.members(ROLLOUT, UnitState.CONNECTED, *LIVING)
        await asyncio.gather(*(self._moved(member, Level.ASLEEP) for member in members))

    async def next_lease(self) -> bool:
        buffer = self._buffer
        while buffer.step < buffer.last_step:
            buffer.ready_changed.clear()
            if self._turn_over():
                return True
            await buffer.ready_changed.wait()
        return False

    def _turn_over(self) -> bool:
        """Whether the rollouts have done what they are to do before the trainer's turn."""
        buffer = self._buffer
        if self._rollout_leases or self._probes.pending:
            return False
        if self._partial:
            return self.have_batch()
        if buffer.generating or buffer.capacity(_ANY, buffer.last_step):
            return False
        return not any(map(self._may_be_dropped, buffer))

    def have_batch(self) -> bool:
        return super().have_batch() and not any(map(self._may_be_dropped, self._buffer))

    def _may_be_dropped(self, group: Group) -> bool:
        """Whether a score may still drop the group, so that another prompt is generated in its place."""
        return self._scores_drop and group.state.phase == GroupPhase.GENERATED and not group.state.marks & Mark.SCORED

    # ------------------------------------------------------------------------------------------ devices change hands

    async def _acquire(self) -> None:
        """Give the devices to the trainer, and before that to the reference, if groups wait for it. To be called when no
        rollout has work."""
        # Before the first version no group is brought to the reference, although restored groups may lack its part.
        refers = self._refers and self.phase != "asleep" and any(map(_lacks_reference, self._buffer))
        self._pool.close()
        with self._spans.span(TO_TRAIN):
            # Newcomers wait; the rollouts go to sleep; then the reference or the trainer begins to move in.
            await self._publisher.hold()
            self._handle(GenerationDone(refers))
            await self._until("ref_onload", "refer", "train")
        if refers:
            # The reference has the devices until it has seen every group; then it moves out.
            await self._until("refer")
            self._reference_leases.set()
            await self._referred()
            self._reference_leases.clear()
            self._handle(ReferenceDone())
            await self._until("onload", "train")
            # The trainer moves in.
            with self._spans.span(TO_TRAIN):
                await self._until("train")

    async def _referred(self) -> None:
        """Wait until the reference has seen every group that was generated."""
        buffer = self._buffer
        while any(map(_lacks_reference, buffer)):
            buffer.ready_changed.clear()
            await buffer.ready_changed.wait()

    async def _release(self, version: PolicyVersion | None) -> PublicationFigures | None:
        """Give the devices back to the rollouts, with `version` if the trainer made one."""
        with self._spans.span(TO_INFER):
            # The rollouts allocate only their weights and receive the version, while the trainer's weights are on the devices.
            self._handle(Trained(publishes=version is not None))
            figures = None
            if version is not None:
                await self._until("publish")
                figures = await self._publisher.publish(version)
                self._handle(VersionPublished())
            # The trainer moves out, and the rollouts wake entirely.
            await self._until("generate")
            self._publisher.free()
        self._pool.open()
        return figures

    # ------------------------------------------------------------------------------------------ rollouts come and go

    def _look(self, change: UnitChange) -> None:
        if change.unit.role == ROLLOUT and change.lost:
            self._handle(MemberLost(change.unit.member))
        super()._look(change)

    def _arrive(self, member: Member) -> None:
        """A newcomer is asleep, and joins once it has reached the level of the others."""
        self._handle(Arrived(member))
        self._join(member)

    def _join(self, member: Member) -> None:
        unit = self._register.find(member.name)
        if unit is not None and unit.state is UnitState.CONNECTED and not self._schedule.told(member):
            self._register.join(member)

    def _handle(self, event: Event) -> None:
        for action in self._schedule.handle(event):
            task = asyncio.ensure_future(self._carry_out(action))
            self._calls.add(task)
            task.add_done_callback(self._done)
        self._changed.set()

    def _carry_out(self, action: Action) -> Coroutine[Any, Any, None]:
        return self._move(action.member, action.level) if isinstance(action, SetSleepLevel) else self._have_moved(action)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._calls.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fault = self._fault or error
            self._changed.set()

    async def _until(self, *phases: Phase) -> None:
        while self._fault is None and self._schedule.phase not in phases:
            self._changed.clear()
            await self._changed.wait()
        if self._fault is not None:
            raise self._fault

    async def _move(self, member: Member, level: Level) -> None:
        """Tell a rollout to move to `level`. A rollout that fails to do so is lost, whatever the reason."""
        if await self._moved(member, level, self._partial):
            self._handle(SleepLevelReached(member, level))
            self._join(member)

    async def _moved(self, member: Member, level: Level, keeps: bool = False) -> bool:
        rollout: RolePort | None = self._register.port(member)
        if rollout is None:
            return False
        try:
            await rollout.call(Move(level, keeps))
        except InvariantViolated:
            raise
        except SluiceError as error:
            self._register.lose(member, str(error))
            return False
        return True

    async def _have_moved(self, action: SetResidency) -> None:
        if action.who == "reference":
            with self._spans.span(self.phase):
                await self._roles.references.broadcast(action.command)
        elif self._onloads_trainer or isinstance(action.command, Offload):
            await self._roles.trainer.call(action.command)
        self._handle(ResidencyChanged())


def _lacks_reference(group: Group) -> bool:
    return group.generated is not None and bool(Mark.REFERENCED & group.state.needs & ~group.state.marks)
