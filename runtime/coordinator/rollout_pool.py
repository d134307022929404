"""The living rollouts: whom a group goes to, and what happens to the work of one that is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from runtime.coordinator.membership import Epoch, Membership
from runtime.coordinator.register import ROLLOUT, Member, Register, Unit, UnitChange, UnitState, member_of
from runtime.errors import ServiceFault, Unanswered, Unreachable
from runtime.ports import RolePort
from runtime.types import GeneratedGroup, GroupRequest, PolicyVersion


class RolloutPool:
    """Spreads groups over the rollouts that serve: each goes to whoever has the fewest samples under way for its slots. One
    that is lost fails every call under way with Unreachable: its groups are another's to make.
    """

    def __init__(self, register: Register, slots: Mapping[str, int], patience: float = 120.0):
        """`slots`: how many sequences each generates at once, by name. `patience`: seconds that a run goes on without any
        rollout."""
        self.register = register
        self.slots = slots
        self.membership = Membership(register)
        self._load = Counter[Member]()
        self._patience = patience
        self._changed = asyncio.Event()
        self._watchers: list[Callable[[], None]] = [self._changed.set]
        self._lost = self._repeated = 0  # since `close_step`
        self._closed = False
        register.subscribe(self._look)

    # ------------------------------------------------------------------------------------------ who is there

    def subscribe(self, watcher: Callable[[], None]) -> None:
        """`watcher` is called whenever somebody arrived, was lost, or began to serve."""
        self._watchers.append(watcher)

    def unsubscribe(self, watcher: Callable[[], None]) -> None:
        """Idempotent."""
        self._watchers = [other for other in self._watchers if other != watcher]

    def _look(self, change: UnitChange) -> None:
        if change.unit.role == ROLLOUT:
            self._lost += change.lost
            self._notify()

    def commit(self, epoch: Epoch, version: PolicyVersion, swapped: Collection[str]) -> None:
        """The members called `swapped` of `epoch` have `version`, which counts; the others were lost."""
        self.membership.commit(epoch.number, version, [member for member in epoch.members if member.name in swapped])
        self._notify()

    def serve_as_loaded(self) -> None:
        """Where nothing is published: everybody who lives serves with the weights that it loaded."""
        epoch = self.membership.open()
        self.commit(epoch, PolicyVersion(), {member.name for member in epoch.members})

    @property
    def serving(self) -> list[RolePort]:
        return [unit.port for unit in self.register.units(ROLLOUT, UnitState.SERVING)]

    @property
    def admitting(self) -> list[RolePort]:
        """Those that serve, while the pool is open."""
        return [] if self._closed else self.serving

    def close(self) -> None:
        """Nothing is asked to be generated until `open`: the rollouts' devices are another's."""
        self._closed = True

    def open(self) -> None:
        self._closed = False
        self._notify()

    async def somebody(self) -> None:
        """Return once a rollout lives. Raises ServiceFault when none comes in time."""
        await self._until(lambda: bool(self.membership.living))

    async def guard(self) -> None:
        """Until cancelled. Raises ServiceFault, naming who was lost, once no rollout has served for `patience` seconds, or,
        while the pool is closed, and a newcomer cannot begin to, none has lived."""

        def served() -> bool:
            return bool(self.membership.serving or (self._closed and self.membership.living))

        while True:
            if served():
                self._changed.clear()
                await self._changed.wait()
            else:
                await self._until(served)

    # ------------------------------------------------------------------------------------------ their work

    def least_loaded(self) -> RolePort:
        """Of those that serve, of whom there is at least one."""
        serving = self.membership.serving
        rollout: RolePort = self.register.port(min(serving, key=lambda one: self._load[one] / self.slots[one.name]))
        return rollout

    def load(self, rollout: RolePort) -> int:
        """Its samples under way."""
        return self._load[member_of(rollout)]

    async def generate(self, rollout: RolePort, request: GroupRequest) -> GeneratedGroup:
        """Raises Unreachable when `rollout` is lost meanwhile, as it is when it does not answer in time."""
        member = member_of(rollout)
        self._load[member] += request.n
        try:
            return await rollout.call(request)
        except Unanswered as error:
            self.register.lose(member, str(error))
            raise Unreachable(rollout.name, "Generate", error.reason) from error
        except Unreachable as error:
            self.register.lose(member, error.reason)
            raise
        finally:
            self._load[member] -= request.n

    async def generate_anywhere(self, request: GroupRequest) -> GeneratedGroup:
        """By the least loaded, and again by another when it is lost meanwhile. `guard` says how long that may go on."""
        while True:
            await self._wait(lambda: bool(self.admitting))
            try:
                return await self.generate(self.least_loaded(), request)
            except Unreachable:
                self.repeat()

    def repeat(self) -> None:
        """Count a group that is generated again because its rollout was lost."""
        self._repeated += 1

    # ------------------------------------------------------------------------------------------ what is told of them

    def close_step(self) -> dict[str, float]:
        """The metrics: who serves now, and what was lost since the last call."""
        figures = {
            "rollout/serving": float(len(self.membership.serving)),
            "rollout/lost": float(self._lost),
            "rollout/repeated_groups": float(self._repeated),
        }
        self._lost = self._repeated = 0
        return figures

    def __str__(self) -> str:
        """One line: the epoch, who serves in it, who is coming and who was lost, and why."""
        parts = [f"epoch {self.membership.epoch.number}: {_names(self.membership.serving) or 'no rollout'}"]
        if newcomers := _names(self.membership.newcomers):
            parts.append(f"catching up: {newcomers}")
        parts += [f"lost: {unit.name} ({unit.reason})" for unit in self._losses]
        return ", ".join(parts)

    # ------------------------------------------------------------------------------------------ inside

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():  # again, as it may have changed before the waiter's turn
            try:
                await asyncio.wait_for(self._wait(holds), self._patience)
            except asyncio.TimeoutError:
                who, why = ", ".join(unit.name for unit in self._losses), "; ".join(unit.reason for unit in self._losses)
                message = f"{why or 'lost'}; no rollout has served since"
                raise ServiceFault(who or "rollout", "run", message, self._patience) from None

    async def _wait(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._changed.clear()
            await self._changed.wait()

    @property
    def _losses(self) -> list[Unit]:
        """Who was lost, while nobody has come in its place."""
        return [unit for unit in self.register.units(ROLLOUT) if unit.reason]

    def _notify(self) -> None:
        for watcher in self._watchers:
            watcher()


def _names(members: Sequence[Member]) -> str:
    return ", ".join(member.name for member in members)
