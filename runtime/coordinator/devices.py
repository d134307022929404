"""Access to the devices: `async with devices.lease("trainer"): ...`.

::

    lease          Devices (each role its own)    ColocatedDevices (rollouts, reference and trainer share them)
    "rollout"      at once                        while the rollouts are awake; the trainer's lease waits for its end
    "reference"    at once                        once the rollouts sleep and the reference is on the devices
    "trainer"      at once                        once the rollouts sleep; it ends with the weight sync and their wake-up

While groups are being generated, the rollouts hold the devices as if by a lease. `Devices.next_lease` returns once no group is
left to generate, after the η + 1 batches that the bound η admits. So no sample is in flight while the rollouts sleep, and no
sample has tokens of two versions. The trainer then makes up to η + 1 steps in one lease. Only the last version is published:
the rollouts could not generate with the versions before it.

With `training.partial_rollouts`, `next_lease` returns as soon as the next step has its batch. The trainer makes as many steps
as have batches. Samples in flight go on when the rollouts are awake again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Literal

from runtime.cluster.topology import alternates, reference_takes_part
from runtime.commands import Level, Offload, RolePort, SetLevel
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
from runtime.telemetry.metrics import SpanClock, WeightSyncFigures
from runtime.types import PolicyVersion

TO_TRAIN, TO_INFER = "onload", "weight_sync"
_ANY = 1 << 30  # groups: ignore the rollouts' slots

Role = Literal["rollout", "reference", "trainer"]


class Lease:
    """The right to use a role's devices. On dedicated devices a version is published as soon as the trainer has it."""

    figures: WeightSyncFigures | None = None  # of the version published at the lease's end
    version: PolicyVersion | None = None  # to be published at the lease's end

    def __init__(self, publisher: WeightPublisher):
        self._publisher = publisher

    async def begin_sync(self, version: PolicyVersion) -> WeightSync | None:
        """Begin the weight sync of `version`, right after posting the commands that make the version. Return None if the lease
        publishes nothing before its end, and then only its newest version."""
        return await self._publisher.begin(version)

    async def sync(self, version: PolicyVersion) -> None:
        """Publish `version`, which the trainer has, before the lease ends."""
        await self._publisher.publish(version)


class ColocatedLease(Lease):
    """During the lease's steps the rollouts have no memory to receive weights, so the lease ends with the weight sync."""

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
        """Stop following rollouts: later connections join in the next attempt. Idempotent."""
        self._register.unsubscribe(self._look)

    def _look(self, change: UnitChange) -> None:
        if change.unit.role == ROLLOUT and change.unit.state is UnitState.CONNECTED:
            self._arrive(change.unit.member)

    def _arrive(self, member: Member) -> None:
        """Let a connected rollout join the sync group."""
        self._register.join(member)

    async def vacate(self) -> None:
        """Free the devices for the replacement of a lost trainer or critic. Call it after `close`."""

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
        yield Lease(self._publisher)


class ColocatedDevices(Devices):
    """Shared devices. At first the rollouts are asleep, and no role has the devices.

    During a lease of the trainer the pool is closed, and newcomers do not get the committed version, as their memory may be off
    the devices. A newcomer joins the pool once it has reached the level of the other rollouts, before the next weight sync.
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
        self._onloads_trainer = not alternates(config)  # otherwise `AlternatingUpdates` does it
        self._partial = config.training.partial_rollouts
        self._scores_drop = config.algorithm.dynamic_sampling  # a score may drop a group; then another is generated
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
        """Put all rollouts to sleep, whatever they do."""
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
        """Return True if the rollouts have finished their work before the trainer's turn."""
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
        """Return True if a score may still drop the group, so that another prompt is generated instead."""
        return self._scores_drop and group.state.phase == GroupPhase.GENERATED and not group.state.marks & Mark.SCORED

    # ------------------------------------------------------------------------------------------ handing over the devices

    async def _acquire(self) -> None:
        """Give the devices to the reference, if groups wait for it, then to the trainer. Call it when no rollout has work."""
        # Before the first version the reference is skipped, although restored groups may lack its log-probabilities.
        refers = self._refers and self.phase != "asleep" and any(map(_lacks_reference, self._buffer))
        self._pool.close()
        with self._spans.span(TO_TRAIN):
            # Wait for the weight sync under way; then the rollouts sleep, and reference or trainer begins to load.
            await self._publisher.hold()
            self._handle(GenerationDone(refers))
            await self._until("ref_onload", "refer", "train")
        if refers:
            # Wait until the reference is loaded. It keeps the devices until every group has its part, and is then offloaded.
            await self._until("refer")
            self._reference_leases.set()
            await self._referred()
            self._reference_leases.clear()
            self._handle(ReferenceDone())
            await self._until("onload", "train")
            # Wait until the trainer is loaded.
            with self._spans.span(TO_TRAIN):
                await self._until("train")

    async def _referred(self) -> None:
        """Wait until the reference has answered for every generated group."""
        buffer = self._buffer
        while any(map(_lacks_reference, buffer)):
            buffer.ready_changed.clear()
            await buffer.ready_changed.wait()

    async def _release(self, version: PolicyVersion | None) -> WeightSyncFigures | None:
        """Give the devices back to the rollouts, with `version` if the trainer made one."""
        with self._spans.span(TO_INFER):
            # The rollouts allocate only their weights and receive the version, while the trainer is still on the devices.
            self._handle(Trained(publishes=version is not None))
            figures = None
            if version is not None:
                await self._until("publish")
                figures = await self._publisher.publish(version)
                self._handle(VersionPublished())
            # Wait until the trainer is offloaded and the rollouts are fully awake.
            await self._until("generate")
            self._publisher.free()
        self._pool.open()
        return figures

    # ------------------------------------------------------------------------------------------ membership

    def _look(self, change: UnitChange) -> None:
        if change.unit.role == ROLLOUT and change.lost:
            self._handle(MemberLost(change.unit.member))
        super()._look(change)

    def _arrive(self, member: Member) -> None:
        """Take in a newcomer, which is asleep. It joins once it has reached the level of the other rollouts."""
        self._handle(Arrived(member))
        self._join(member)

    def _join(self, member: Member) -> None:
        unit = self._register.find(member.name)
        if unit is not None and unit.state is UnitState.CONNECTED and not self._schedule.is_moving(member):
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
        """Move a rollout to `level`. A rollout that fails to move is lost, whatever the reason."""
        if await self._moved(member, level, self._partial):
            self._handle(SleepLevelReached(member, level))
            self._join(member)

    async def _moved(self, member: Member, level: Level, keeps: bool = False) -> bool:
        rollout: RolePort | None = self._register.port(member)
        if rollout is None:
            return False
        try:
            await rollout.call(SetLevel(level, keeps))
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
