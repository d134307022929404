"""The register of units: one row for each unit of a run, from its placement on a node to its loss. Pure: no I/O, no clock.

A unit is a process that stands alone, or the ranks of a group, which live and die together and have the name of the first rank.

::

    writers                                                 readers
    Nodes        places and dismisses units   ┐           ┌ Peers         opens sessions to registered units
    Peers        admits, connects             │           │ Nodes         sends agents the lowest incarnation that may run
    Devices      has rollouts join            ├ Register ─┤ Devices       the rollouts that can join, and their devices
    Membership   has them serve               │  (rows)   │ Membership    the epochs of the sync group
    any part     `lose`: a session broke, an  │           │ RolloutPool, Replicas     the units to call
                 agent reported a death, a    │           │ Recovery      the loss of trainer or critic
                 call failed, no status came  ┘           └ coordinator   the losses for the agents, and `sluice status`

    placed → started → registered → connected → joining → serving
       └────────┴──────────┴────────────┴──────────┴─────────┴──→ lost(reason), dismissed(reason)

`started`: some ranks of a group have registered. Only rollouts join: they serve once they have the committed version. Other
roles serve as soon as they are connected. A lost incarnation never comes back; its replacement is the next incarnation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from enum import StrEnum
from functools import partial
from typing import Any, Protocol

from msgspec import Struct
from msgspec.structs import replace

from runtime.errors import InvariantViolated, UserError

ROLLOUT = "rollout"  # the role whose units join the sync group before they serve


class UnitState(StrEnum):
    PLACED = "placed"
    STARTED = "started"
    REGISTERED = "registered"
    CONNECTED = "connected"
    JOINING = "joining"
    SERVING = "serving"
    LOST = "lost"
    DISMISSED = "dismissed"

    @property
    def over(self) -> bool:
        return self in (UnitState.LOST, UnitState.DISMISSED)

    @property
    def connected(self) -> bool:
        return self in (UnitState.CONNECTED, UnitState.JOINING, UnitState.SERVING)


LIVING = (UnitState.JOINING, UnitState.SERVING)
"""The states of a rollout that is in the sync group's next epoch."""


class Incarnated(Protocol):
    """A process, a unit, or a report about one of them. A rank's name stands for its unit."""

    @property
    def name(self) -> str: ...

    @property
    def incarnation(self) -> int: ...


class Member(Struct, frozen=True, order=True):
    """One incarnation of a unit: the key in the register."""

    name: str
    incarnation: int = 0


def member_of(who: Incarnated) -> Member:
    return Member(who.name, who.incarnation)


class Unit(Struct, frozen=True):
    """A row. `processes` has the newest registered process of each rank, of this incarnation or an earlier one. `port` calls
    the unit while it is connected. `reason` is the reason of the last loss, until the unit is connected again."""

    role: str
    ranks: tuple[str, ...]  # the ranks' names, in order
    processes: tuple[Any, ...]
    incarnation: int = 0
    state: UnitState = UnitState.PLACED
    reason: str = ""
    port: Any = None

    @property
    def name(self) -> str:
        return self.ranks[0]

    @property
    def member(self) -> Member:
        return member_of(self)


_BEFORE: dict[UnitState, Collection[UnitState]] = {
    UnitState.PLACED: (UnitState.LOST, UnitState.DISMISSED),
    UnitState.STARTED: (UnitState.PLACED, UnitState.STARTED),
    UnitState.CONNECTED: (UnitState.REGISTERED,),
    UnitState.JOINING: (UnitState.CONNECTED,),
    UnitState.SERVING: (UnitState.JOINING,),
    UnitState.LOST: [state for state in UnitState if not state.over],
    UnitState.DISMISSED: [state for state in UnitState if state is not UnitState.DISMISSED],
}
"""The states that a unit may leave for each state."""


def moved(unit: Unit, state: UnitState, process: Any = None, **fields: Any) -> Unit:
    """Return the row in its next `state` and with `fields`. Raises InvariantViolated if the table has no such transition.

    `process`: the Registration of a rank that has started; with the last rank's the unit is registered. A connected unit that
    is no rollout serves at once."""
    if unit.state not in _BEFORE[state]:
        who = f"{unit.name} (incarnation {unit.incarnation})"
        raise InvariantViolated(f"{who} is {unit.state.value}, and cannot be {state.value}")
    if process is not None:
        pairs = zip(unit.ranks, unit.processes, strict=True)
        fields["processes"] = tuple(process if rank == process.name else known for rank, known in pairs)
        if all(one is not None and one.incarnation == unit.incarnation for one in fields["processes"]):
            state = UnitState.REGISTERED
    elif state is UnitState.CONNECTED and unit.role != ROLLOUT:
        state = UnitState.SERVING
    return replace(unit, state=state, **fields)


class UnitChange(Struct, frozen=True):
    """A row after a change, and its state before; `was` is None for a new row."""

    unit: Unit
    was: UnitState | None

    @property
    def lost(self) -> bool:
        """Whether the unit was connected before, and is over now."""
        return self.was is not None and self.was.connected and self.unit.state.over


class Register:
    """The rows. Each method that writes returns True if a row changed. A report about an incarnation that is over or replaced
    comes late: it changes nothing and is counted in `late`."""

    def __init__(self) -> None:
        self.late = 0
        self._units: dict[str, Unit] = {}
        self._unit_of: dict[str, str] = {}  # by the name of each rank
        self._views: dict[tuple[str, tuple[UnitState, ...]], tuple[tuple[Unit, ...], tuple[Member, ...]]] = {}  # until a change
        self._watchers: list[Callable[[UnitChange], None]] = []
        self._pending: deque[UnitChange] = deque()
        self._notifying = False

    # ------------------------------------------------------------------------------------------ reading

    def subscribe(self, watcher: Callable[[UnitChange], None]) -> None:
        """Call `watcher` for each change, one at a time, before the method that made it returns; watchers' changes follow."""
        self._watchers.append(watcher)

    def unsubscribe(self, watcher: Callable[[UnitChange], None]) -> None:
        """Remove `watcher`. Idempotent."""
        self._watchers = [other for other in self._watchers if other != watcher]

    def units(self, role: str = "", *states: UnitState) -> tuple[Unit, ...]:
        """Return the rows of `role` in these states, sorted by name. "" means all roles; no states means any state."""
        return self._view(role, states)[0]

    def members(self, role: str, *states: UnitState) -> tuple[Member, ...]:
        return self._view(role, states)[1]

    def _view(self, role: str, states: tuple[UnitState, ...]) -> tuple[tuple[Unit, ...], tuple[Member, ...]]:
        if (role, states) not in self._views:
            found = (unit for unit in self._units.values() if role in ("", unit.role) and (not states or unit.state in states))
            units = tuple(sorted(found, key=lambda unit: unit.name))
            self._views[role, states] = units, tuple(unit.member for unit in units)
        return self._views[role, states]

    def find(self, name: str) -> Unit | None:
        """Return the row of the unit, or of the rank's unit, called `name`."""
        return self._units.get(self._unit_of.get(name, ""))

    def port(self, who: Incarnated) -> Any:
        """Return the port of this incarnation, or None if it is not connected."""
        unit = self.find(who.name)
        return None if unit is None or unit.incarnation != who.incarnation else unit.port

    def is_followed(self, who: Incarnated) -> bool:
        """Return True if a later incarnation than `who` is known."""
        unit = self.find(who.name)
        return unit is not None and who.incarnation < unit.incarnation

    def has_others(self, who: Incarnated) -> bool:
        """Return True if another unit of the same role is there, or is starting."""
        mine = self.find(who.name)
        return mine is not None and any(unit is not mine and not unit.state.over for unit in self.units(mine.role))

    # ------------------------------------------------------------------------------------------ writing

    def place(self, role: str, ranks: Sequence[str]) -> None:
        """Place a unit on a node. If the unit has run before, place its next incarnation, perhaps with other `ranks`."""
        unit = self.find(ranks[0])
        if unit is None:
            self.take_up(role, ranks, incarnation=0, processes=())
        elif unit.state is not UnitState.PLACED or unit.ranks != tuple(ranks):
            self._follow(unit, unit.incarnation + 1, tuple(ranks))

    def take_up(self, role: str, ranks: Sequence[str], incarnation: int, processes: Sequence[Any]) -> None:
        """Add a unit known to an earlier coordinator. `processes`: of all ranks if all had registered, else empty."""
        self._unit_of |= dict.fromkeys(ranks, ranks[0])
        state = UnitState.REGISTERED if processes else UnitState.PLACED
        known = tuple(processes) or (None,) * len(ranks)
        self._put(Unit(role=role, ranks=tuple(ranks), processes=known, incarnation=incarnation, state=state), None)

    def admit(self, process: Incarnated) -> bool:
        """Register a process. Raises UserError if it is not in the topology, or if its rank has registered already."""
        unit = self.find(process.name)
        if unit is None or unit.state is UnitState.DISMISSED:
            raise UserError(f"{process.name} (incarnation {process.incarnation}) is not in this run's topology")
        known = unit.processes[unit.ranks.index(process.name)]
        if known == process:
            return False  # a repeated registration
        here = known is not None and known.incarnation == unit.incarnation
        if here and (process.incarnation == unit.incarnation or self.is_followed(process)):
            raise UserError(f"{process.name}: its incarnation {unit.incarnation} has registered already")
        return self._report(process, UnitState.STARTED, process=process)

    def connect(self, port: Any) -> bool:
        """Connect a registered unit by `port`, a RolePort. The loss of the port is the loss of the unit."""
        if not self._report(port, UnitState.CONNECTED, port=port, reason=""):
            return False
        port.when_lost(partial(self.lose, port))
        return True

    def join(self, who: Incarnated) -> bool:
        """Put a rollout into the next epoch of the sync group."""
        return self._report(who, UnitState.JOINING)

    def serve(self, who: Incarnated) -> bool:
        """Let a rollout serve: it has the committed version."""
        return self._report(who, UnitState.SERVING)

    def lose(self, who: Incarnated, reason: str) -> bool:
        """Mark the unit of `who` as lost: the run stops calling it. Any part of the coordinator may call this, also twice."""
        return self._report(who, UnitState.LOST, port=None, reason=reason)

    def dismiss(self, name: str, reason: str) -> None:
        """Remove the unit from the run; it is no loss."""
        unit = self._units[name]
        if unit.state is not UnitState.DISMISSED:
            self._move(unit, UnitState.DISMISSED, port=None, reason=reason)

    def add(self, role: str, port: Any) -> None:
        """Add a unit of one process that the caller has started and connected."""
        if self.find(port.name) is None:
            self.place(role, [port.name])
        self.admit(port)
        self.connect(port)

    def _report(self, who: Incarnated, state: UnitState, **fields: Any) -> bool:
        unit = self.find(who.name)
        if unit is None or self.is_followed(who) or (who.incarnation == unit.incarnation and unit.state.over):
            self.late += 1
            return False
        if who.incarnation > unit.incarnation:
            unit = self._follow(unit, who.incarnation)
        self._move(unit, state, **fields)
        return True

    def _follow(self, unit: Unit, incarnation: int, ranks: tuple[str, ...] = ()) -> Unit:
        if not unit.state.over:
            unit = self._move(unit, UnitState.LOST, port=None, reason=f"incarnation {incarnation} has come in its place")
        if not ranks or ranks == unit.ranks:
            return self._move(unit, UnitState.PLACED, incarnation=incarnation)
        for rank in unit.ranks:
            del self._unit_of[rank]
        self._unit_of |= dict.fromkeys(ranks, ranks[0])
        return self._move(unit, UnitState.PLACED, incarnation=incarnation, ranks=ranks, processes=(None,) * len(ranks))

    def _move(self, unit: Unit, state: UnitState, **fields: Any) -> Unit:
        after = moved(unit, state, **fields)
        self._put(after, unit)
        return after

    def _put(self, unit: Unit, before: Unit | None) -> None:
        self._units[unit.name] = unit
        self._views.clear()
        self._pending.append(UnitChange(unit, before.state if before is not None else None))
        if before is not None and before.port is not None and unit.port is None:
            before.port.give_up(unit.reason)
        if self._notifying:
            return  # the outer call notifies the watchers
        self._notifying = True
        try:
            while self._pending:
                change = self._pending.popleft()
                for watcher in self._watchers:
                    watcher(change)
        finally:
            self._notifying = False
