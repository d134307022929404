"""Access to devices that rollouts, reference and trainer share: `async with devices.lease("trainer"): ...`.

::

    lease          Devices (each role its own)    ColocatedDevices
    "rollout"      at once                        while the rollouts are awake; the trainer's lease waits for its end
    "reference"    at once                        once the rollouts sleep and the reference is on the devices
    "trainer"      at once                        once the rollouts sleep; it ends with the weight sync and their wake-up

`next_lease` returns once no group is left to generate, after the η + 1 batches that the bound η admits. So no sample is in
flight while the rollouts sleep, and no sample has tokens of two versions. The trainer then makes up to η + 1 steps in one
lease. Only the last version is published: the rollouts could not generate with the versions before it.

With `training.partial_rollouts`, `next_lease` returns as soon as the next step has its batch. The trainer makes as many steps
as have batches. Samples in flight go on when the rollouts are awake again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from runtime.cluster.topology import alternates, reference_takes_part
from runtime.commands import Level, Offload, Onload, RolePort, SetLevel
from runtime.coordinator.buffer import Buffer, Group
from runtime.coordinator.metrics_recorder import Probes, RunContext
from runtime.coordinator.pools import Roles, RolloutPool
from runtime.coordinator.register import LIVING, ROLLOUT, Member, UnitChange, UnitState
from runtime.coordinator.weight_sync import Devices, Lease, Role, WeightPublisher
from runtime.errors import InvariantViolated, SluiceError
from runtime.ledger.states import Mark, Phase
from runtime.telemetry.metrics import WeightSyncFigures
from runtime.types import PolicyVersion

TO_TRAIN, TO_INFER = "onload", "weight_sync"
_ANY = 1 << 30  # groups: ignore the rollouts' slots


class ColocatedDevices(Devices):
    """Shared devices. At first the rollouts are asleep, and no role has the devices. Each turn of the trainer::

        sleep → (reference: onload, refer, offload →) onload → train → wake for weights → publish → offload → wake → generate

    No turn waits for a lost rollout. During a lease of the trainer newcomers do not get the committed version, as their memory
    may be off the devices. A newcomer arrives asleep, and joins the pool once it has reached the other rollouts' level.

    **The invariant.** At no time do two of these have the devices, or the order to take them: rollouts with keys and values,
    the reference, the trainer. Only the rollouts' weights may be there together with the trainer's.
    """

    def __init__(
        self, context: RunContext, roles: Roles, pool: RolloutPool, publisher: WeightPublisher, buffer: Buffer, probes: Probes
    ):
        config = context.config
        self._roles, self._probes, self._spans = roles, probes, context.spans
        self._refers = reference_takes_part(config)
        self._alternates = alternates(config)
        self._partial = config.training.partial_rollouts
        self._scores_drop = config.algorithm.dynamic_sampling  # a score may drop a group; then another is generated
        self._awake_before = False  # the rollouts have had the devices in this attempt
        self._wanted = Level.ASLEEP
        self._levels: dict[Member, Level | None] = dict.fromkeys(pool.membership.living, Level.ASLEEP)  # None: it moves
        self._moves: dict[Member, asyncio.Task[None]] = {}
        self._fault: BaseException | None = None
        self._changed = asyncio.Event()
        self._rollout_leases = 0
        self._reference_leases = asyncio.Event()  # set while the reference has the devices
        pool.close()
        super().__init__(pool, publisher, buffer)

    @asynccontextmanager
    async def lease(self, role: Role, last: bool = False) -> AsyncIterator[Lease]:
        lease = Lease()
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
        """Put all rollouts to sleep, whatever they do, to make room for another trainer or critic. Call it after `close`."""
        for move in self._moves.values():
            move.cancel()
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
        working = buffer.generating or buffer.capacity(_ANY, buffer.last_step) or any(map(self._may_be_dropped, buffer))
        return not working

    def have_batch(self) -> bool:
        return super().have_batch() and not any(map(self._may_be_dropped, self._buffer))

    def _may_be_dropped(self, group: Group) -> bool:
        """Return True if a score may still drop the group, so that another prompt is generated instead."""
        return self._scores_drop and group.state.phase == Phase.GENERATED and not group.state.marks & Mark.SCORED

    # ------------------------------------------------------------------------------------------ handing over the devices

    async def _acquire(self) -> None:
        """Give the devices to the reference, if groups wait for it, then to the trainer. Call it when no rollout has work."""
        # Before the first version the reference is skipped, although restored groups may lack its log-probabilities.
        refers = self._refers and self._awake_before and any(map(_lacks_reference, self._buffer))
        self._pool.close()
        with self._spans.span(TO_TRAIN):
            # Wait for the weight sync under way, then until all rollouts sleep.
            await self._publisher.hold()
            await self._reach(Level.ASLEEP)
        if refers:
            await self._refer()
        if not self._alternates:  # else `AlternatingUpdates` does it
            with self._spans.span(TO_TRAIN):
                await self._roles.trainer.call(Onload())

    async def _refer(self) -> None:
        """Give the devices to the reference until it has answered for every generated group."""
        with self._spans.span("ref_onload"):
            await self._roles.references.broadcast(Onload())
        self._reference_leases.set()
        while any(map(_lacks_reference, self._buffer)):
            self._buffer.ready_changed.clear()
            await self._buffer.ready_changed.wait()
        self._reference_leases.clear()
        with self._spans.span("ref_offload"):
            await self._roles.references.broadcast(Offload())

    async def _release(self, version: PolicyVersion | None) -> WeightSyncFigures | None:
        """Give the devices back to the rollouts, with `version` if the trainer made one."""
        figures = None
        with self._spans.span(TO_INFER):
            if version is not None:
                # The rollouts allocate only their weights and receive the version, while the trainer is still on the devices.
                await self._reach(Level.WEIGHTS)
                figures = await self._publisher.publish(version)
            # Wait until the trainer is offloaded; then the rollouts take the devices whole.
            await self._roles.trainer.call(Offload())
            await self._reach(Level.AWAKE)
            self._awake_before = True
            self._publisher.free()
        self._pool.open()
        return figures

    # ------------------------------------------------------------------------------------------ levels of the rollouts

    def _look(self, change: UnitChange) -> None:
        if change.unit.role == ROLLOUT and change.lost:
            self._levels.pop(change.unit.member, None)
            self._changed.set()
        super()._look(change)

    def _arrive(self, member: Member) -> None:
        """Take in a newcomer, which is asleep."""
        self._levels[member] = Level.ASLEEP
        self._move(member)

    async def _reach(self, level: Level) -> None:
        """Move every rollout to `level`, and wait until all that live have reached it. Raises the fault of a move."""
        self._wanted = level
        for member in sorted(self._levels):
            self._move(member)
        while self._fault is None and any(reached != level for reached in self._levels.values()):
            self._changed.clear()
            await self._changed.wait()
        if self._fault is not None:
            raise self._fault

    def _move(self, member: Member) -> None:
        """Move a rollout to the wanted level. There a newcomer joins. A rollout has one order at a time."""
        unit = self._register.find(member.name)
        if member in self._moves or unit is None:
            return
        if self._levels[member] != self._wanted:
            self._moves[member] = asyncio.ensure_future(self._follow(member))
            self._moves[member].add_done_callback(partial(self._followed, member))
        elif unit.state is UnitState.CONNECTED:
            self._register.join(member)

    async def _follow(self, member: Member) -> None:
        while member in self._levels and self._levels[member] != (level := self._wanted):
            self._levels[member] = None
            if not await self._moved(member, level, self._partial):
                self._levels.pop(member, None)
            elif member in self._levels:  # else it was lost meanwhile
                self._levels[member] = level

    def _followed(self, member: Member, task: asyncio.Task[None]) -> None:
        del self._moves[member]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fault = self._fault or error
        elif not task.cancelled() and member in self._levels:
            self._move(member)  # it joins, or another level has been wanted since
        self._changed.set()

    async def _moved(self, member: Member, level: Level, keeps: bool = False) -> bool:
        """Move a rollout to `level`. Return False if it fails: then it is lost, whatever the reason."""
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


def _lacks_reference(group: Group) -> bool:
    return group.generated is not None and bool(Mark.REFERENCED & group.state.needs & ~group.state.marks)
