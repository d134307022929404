"""The living rollouts: whom a group goes to, and what happens to the work of one that is lost."""

from __future__ import annotations

import asyncio
import heapq
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

from runtime.coordinator.register import ROLLOUT, Member, Register, Unit, UnitChange, UnitState, member_of
from runtime.coordinator.weight_sync_protocol import Epoch, Membership
from runtime.errors import ServiceFault, Unanswered, Unreachable
from runtime.ports import RolePort
from runtime.process.aio import done_within
from runtime.process.keys import GATEWAY
from runtime.types import GeneratedGroup, GroupRequest, PlayRequest, PolicyVersion


class RolloutLoads:
    """Samples under way by rollout, and who has the fewest for its slots. That one is at the top of a heap, whose outdated
    entries are dropped as they get there: so a group costs O(log n) of n rollouts."""

    def __init__(self, slots: Mapping[str, int]):
        self.samples = Counter[Member]()
        self.slots = slots
        self._among: tuple[Member, ...] = ()
        self._places: dict[Member, int] = {}  # in `_among`
        self._heap: list[tuple[float, int]] = []  # a load, and the place of who has or had it

    def add(self, member: Member, samples: int) -> None:
        self.samples[member] += samples
        if member in self._places:
            heapq.heappush(self._heap, (self._load(member), self._places[member]))

    def least(self, among: tuple[Member, ...]) -> Member:
        """Of `among`, which is not empty; the first of several."""
        if among is not self._among or len(self._heap) > 4 * len(among) + 64:
            self._among, self._places = among, {member: place for place, member in enumerate(among)}
            self._heap = sorted((self._load(member), place) for place, member in enumerate(among))
        while True:
            load, place = self._heap[0]
            if load == self._load(self._among[place]):
                return self._among[place]
            heapq.heappop(self._heap)

    def _load(self, member: Member) -> float:
        return self.samples[member] / self.slots[member.name]


class WorkPool(ABC):
    """Spreads groups over the units of a role that serve: each goes to whoever has the fewest samples under way for its slots.
    One that is lost fails every call under way with Unreachable: its groups are another's to make.
    """

    def __init__(self, register: Register, role: str, slots: Mapping[str, int]):
        """`slots`: how many sequences each has at once, by name."""
        self.register = register
        self._role = role
        self._loads = RolloutLoads(slots)
        self._changed = asyncio.Event()
        self._watchers: list[Callable[[], None]] = [self._changed.set]
        register.subscribe(self._look)

    def _look(self, change: UnitChange) -> None:
        if change.unit.role == self._role:
            self._notify()

    @property
    def slots(self) -> Mapping[str, int]:
        """Of each unit that there may be, or has been: one that is to go may serve for a moment yet."""
        return self._loads.slots

    @slots.setter
    def slots(self, slots: Mapping[str, int]) -> None:
        self._loads.slots = {**self._loads.slots, **slots}

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """Whether those that serve are given groups now."""

    @property
    def serving(self) -> list[RolePort]:
        return [unit.port for unit in self.register.units(self._role, UnitState.SERVING)]

    @property
    def admitting(self) -> list[RolePort]:
        """Those that are given groups now."""
        return self.serving if self.is_open else []

    @property
    def admits(self) -> bool:
        """Whether there is one of them."""
        return self.is_open and bool(self.register.units(self._role, UnitState.SERVING))

    def least_loaded(self) -> RolePort:
        """Of those that admit, of whom there is at least one."""
        least: RolePort = self.register.port(self._loads.least(self.register.members(self._role, UnitState.SERVING)))
        return least

    @abstractmethod
    def repeat(self) -> None:
        """Count a group that is asked for again because who had it was lost."""

    def subscribe(self, watcher: Callable[[], None]) -> None:
        """`watcher` is called whenever somebody arrived, was lost, or began to serve."""
        self._watchers.append(watcher)

    def unsubscribe(self, watcher: Callable[[], None]) -> None:
        """Idempotent."""
        self._watchers = [other for other in self._watchers if other != watcher]

    def find(self, name: str) -> RolePort | None:
        """The unit called `name`, if it is connected."""
        unit = self.register.find(name)
        return None if unit is None else unit.port

    def load(self, who: RolePort) -> int:
        """Its samples under way."""
        return self._loads.samples[member_of(who)]

    async def generate(
        self, who: RolePort, request: GroupRequest | PlayRequest, first: Awaitable[None] | None = None
    ) -> GeneratedGroup:
        """It is asked once `first` is done. Raises Unreachable when it is lost meanwhile, as it is when it does not answer in
        time."""
        member = member_of(who)
        self._loads.add(member, request.n)
        try:
            if first is not None:
                await first
            return await who.call(request)
        except Unanswered as error:
            self.register.lose(member, str(error))
            raise Unreachable(who.name, error.phase, error.reason) from error
        except Unreachable as error:
            self.register.lose(member, error.reason)
            raise
        finally:
            self._loads.add(member, -request.n)

    async def generate_anywhere(self, request: GroupRequest | PlayRequest) -> GeneratedGroup:
        """By the least loaded, and again by another when it is lost meanwhile. `RolloutPool.guard` says how long that may go
        on."""
        while True:
            await self._wait(lambda: self.admits)
            try:
                return await self.generate(self.least_loaded(), request)
            except Unreachable:
                self.repeat()

    async def _wait(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._changed.clear()
            await self._changed.wait()

    def _notify(self) -> None:
        for watcher in self._watchers:
            watcher()


class RolloutPool(WorkPool):
    """The rollouts, which serve once they have the committed version."""

    def __init__(self, register: Register, slots: Mapping[str, int], patience: float, term: int = 1):
        """`patience`: seconds that a run goes on without any rollout. `term`: as of `Membership`."""
        super().__init__(register, ROLLOUT, slots)
        self.membership = Membership(register, term)
        self.players: WorkPool = self
        """Who is given the groups under training and evaluation: the rollouts themselves, or the gateways before them."""
        self._patience = patience
        self._lost = self._repeated = 0  # since `close_step`
        self._closed = False

    # ------------------------------------------------------------------------------------------ who is there

    def _look(self, change: UnitChange) -> None:
        self._lost += change.lost and change.unit.role == ROLLOUT
        super()._look(change)

    def commit(self, epoch: Epoch, version: PolicyVersion, swapped: Collection[str]) -> None:
        """The members called `swapped` of `epoch` have `version`, which counts; the others were lost."""
        self.membership.commit(epoch.number, version, [member for member in epoch.members if member.name in swapped])
        self._notify()

    def take_up(self, version: PolicyVersion, having: Collection[Member]) -> None:
        """`version` counts, and those `having` it serve: an earlier coordinator has seen to that."""
        self.membership.take_up(version, having)
        self._notify()

    def serve_as_loaded(self) -> None:
        """Where nothing is published: everybody who lives serves with the weights that it loaded."""
        epoch = self.membership.open()
        self.commit(epoch, PolicyVersion(), {member.name for member in epoch.members})

    @property
    def gateways(self) -> list[RolePort]:
        """Those that have the rollouts' episodes played, where there are any."""
        return [unit.port for unit in self.register.units(GATEWAY, UnitState.SERVING)]

    @property
    def is_open(self) -> bool:
        return not self._closed

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

    def repeat(self) -> None:
        self._repeated += 1

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
            if not await done_within(self._wait(holds), self._patience):
                who, why = ", ".join(unit.name for unit in self._losses), "; ".join(unit.reason for unit in self._losses)
                message = f"{why or 'lost'}; no rollout has served since"
                raise ServiceFault(who or "rollout", "run", message, self._patience)

    @property
    def _losses(self) -> list[Unit]:
        """Who was lost, while nobody has come in its place."""
        return [unit for unit in self.register.units(ROLLOUT) if unit.reason]


def _names(members: Sequence[Member]) -> str:
    return ", ".join(member.name for member in members)
