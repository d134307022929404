"""The register of who is alive: one row for each unit of a run, from its place on a node to its loss. Pure: no I/O, no clock.

A unit is a process that stands alone, or the ranks of a group, which live and die together and have the name of their first.

::

    who writes                                              who reads
    Nodes        gives a place, takes it away ┐           ┌ Peers         opens sessions to what has registered
    Peers        admits, connects             │           │ Nodes         tells agents the lowest incarnation that may run
    Devices      has rollouts join            ├ Register ─┤ Devices       whom to have join, and on which devices
    Membership   has them serve               │  (rows)   │ Membership    the epochs of the sync group
    anybody      `lose`: a session broke, an  │           │ RolloutPool, Replicas     whom to ask
                 agent told of a death, a     │           │ Recovery      the loss of trainer or critic
                 call failed, nothing is said ┘           └ coordinator   tells agents whom to end, and `sluice status`

    placed → started → registered → connected → joining → serving
       └────────┴──────────┴────────────┴──────────┴─────────┴──→ lost(reason), dismissed(reason)

`started`: some ranks of a group have registered. Only rollouts join: they serve once they have the committed version, and other
roles as soon as they are connected. An incarnation that was lost never comes back; what comes in its place is the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
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
        """Nothing comes of this incarnation any more."""
        return self in (UnitState.LOST, UnitState.DISMISSED)

    @property
    def connected(self) -> bool:
        return self in (UnitState.CONNECTED, UnitState.JOINING, UnitState.SERVING)


LIVING = (UnitState.JOINING, UnitState.SERVING)
"""The states of a rollout that is in the sync group's next epoch."""


class Incarnated(Protocol):
    """A process, a unit, or what somebody says of one."""

    @property
    def name(self) -> str:
        """A rank's name stands for its unit's."""

    @property
    def incarnation(self) -> int: ...


class Member(Struct, frozen=True, order=True):
    """One incarnation of a unit: what the register knows it by."""

    name: str
    incarnation: int = 0


def member_of(who: Incarnated) -> Member:
    return Member(who.name, who.incarnation)


class Unit(Struct, frozen=True):
    """A row. `processes` are the newest that has registered of each rank, of this incarnation or an earlier one. `port` is what
    the coordinator asks it by, while it is connected. `reason` is why the unit was lost last, until it is connected again."""

    role: str
    ranks: tuple[str, ...]  # their names, in order
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


class UnitEvent(Struct, frozen=True):
    """What happens to one incarnation of a unit."""


class RankRegistered(UnitEvent, frozen=True):
    """A process of it has loaded, and serves."""

    process: Any  # a Registration


class Connected(UnitEvent, frozen=True):
    """The coordinator has a session to each of its processes."""

    port: Any


class Joined(UnitEvent, frozen=True):
    """It is in the next epoch of the sync group."""


class Served(UnitEvent, frozen=True):
    """It has the committed version."""


class UnitLost(UnitEvent, frozen=True):
    """One of its processes is gone, or was given up."""

    reason: str


class Dismissed(UnitEvent, frozen=True):
    """The run has no place for it any more."""

    reason: str


class Replaced(UnitEvent, frozen=True):
    """A later incarnation has a place."""

    incarnation: int


_S = UnitState
_TABLE: dict[type[UnitEvent], dict[UnitState, UnitState]] = {
    RankRegistered: dict.fromkeys((_S.PLACED, _S.STARTED), _S.STARTED),
    Connected: {_S.REGISTERED: _S.CONNECTED},
    Joined: {_S.CONNECTED: _S.JOINING},
    Served: {_S.JOINING: _S.SERVING},
    UnitLost: dict.fromkeys([state for state in _S if not state.over], _S.LOST),
    Dismissed: dict.fromkeys([state for state in _S if state is not _S.DISMISSED], _S.DISMISSED),
    Replaced: dict.fromkeys((_S.LOST, _S.DISMISSED), _S.PLACED),
}


def apply(unit: Unit, event: UnitEvent) -> Unit:
    """The row after `event`. Raises InvariantViolated when the table has no such transition."""
    state = _TABLE[type(event)].get(unit.state)
    if state is None:
        raise InvariantViolated(
            f"{unit.name} (incarnation {unit.incarnation}) is {unit.state.value}, and cannot take {event!r}"
        )
    if isinstance(event, RankRegistered):
        pairs = zip(unit.ranks, unit.processes, strict=True)
        processes = tuple(event.process if rank == event.process.name else known for rank, known in pairs)
        complete = all(one is not None and one.incarnation == unit.incarnation for one in processes)
        return replace(unit, state=_S.REGISTERED if complete else state, processes=processes)
    if isinstance(event, Connected):
        return replace(unit, state=state if unit.role == ROLLOUT else _S.SERVING, port=event.port, reason="")
    if isinstance(event, UnitLost | Dismissed):
        return replace(unit, state=state, port=None, reason=event.reason)
    if isinstance(event, Replaced):
        return replace(unit, state=state, incarnation=event.incarnation)
    return replace(unit, state=state)


class UnitChange(Struct, frozen=True):
    """The row as it is now, and the state that it was in before; `was` is None when it is new."""

    unit: Unit
    was: UnitState | None

    @property
    def lost(self) -> bool:
        """Whether it was connected, and is over now."""
        return self.was is not None and self.was.connected and self.unit.state.over


class Register:
    """The rows. Each method that writes returns whether anything changed: what is said of an incarnation that is over, or that
    another has followed, comes late, changes nothing, and is counted in `late`."""

    def __init__(self) -> None:
        self.late = 0
        self._units: dict[str, Unit] = {}
        self._unit_of: dict[str, str] = {}  # by the name of each rank
        self._views: dict[tuple[str, tuple[UnitState, ...]], tuple[Unit, ...]] = {}  # until the next change
        self._members: dict[tuple[str, tuple[UnitState, ...]], tuple[Member, ...]] = {}  # likewise
        self._watchers: list[Callable[[UnitChange], None]] = []
        self._untold: deque[UnitChange] = deque()
        self._telling = False

    # ------------------------------------------------------------------------------------------ reading

    def subscribe(self, watcher: Callable[[UnitChange], None]) -> None:
        """`watcher` is told of every change, in order and one at a time, before the method that made it returns; of those that
        watchers make themselves, after that."""
        self._watchers.append(watcher)

    def unsubscribe(self, watcher: Callable[[UnitChange], None]) -> None:
        """Idempotent."""
        self._watchers = [other for other in self._watchers if other != watcher]

    def units(self, role: str = "", *states: UnitState) -> tuple[Unit, ...]:
        """The rows of `role`, or of all, in these states, or in any, by their names."""
        key = (role, states)
        if key not in self._views:
            found = (unit for unit in self._units.values() if role in ("", unit.role) and (not states or unit.state in states))
            self._views[key] = tuple(sorted(found, key=lambda unit: unit.name))
        return self._views[key]

    def members(self, role: str, *states: UnitState) -> tuple[Member, ...]:
        """Of `units`."""
        key = (role, states)
        if key not in self._members:
            self._members[key] = tuple(unit.member for unit in self.units(role, *states))
        return self._members[key]

    def find(self, name: str) -> Unit | None:
        """The row of the unit, or of the rank, that is called `name`."""
        return self._units.get(self._unit_of.get(name, ""))

    def port(self, who: Incarnated) -> Any:
        """What this incarnation is asked by; None where it is not connected."""
        unit = self.find(who.name)
        return None if unit is None or unit.incarnation != who.incarnation else unit.port

    def is_followed(self, who: Incarnated) -> bool:
        """Whether a later incarnation than `who` is known."""
        unit = self.find(who.name)
        return unit is not None and who.incarnation < unit.incarnation

    def has_others(self, who: Incarnated) -> bool:
        """Whether another unit of its role is there, or comes."""
        mine = self.find(who.name)
        return mine is not None and any(unit is not mine and not unit.state.over for unit in self.units(mine.role))

    # ------------------------------------------------------------------------------------------ writing

    def place(self, role: str, ranks: Sequence[str]) -> None:
        """A unit is to run on a node. Where it has run before, its next incarnation is."""
        unit = self.find(ranks[0])
        if unit is None:
            self._unit_of |= dict.fromkeys(ranks, ranks[0])
            self._put(Unit(role=role, ranks=tuple(ranks), processes=(None,) * len(ranks)), None)
        elif unit.state is not UnitState.PLACED:
            self._follow(unit, unit.incarnation + 1)

    def take_up(self, role: str, ranks: Sequence[str], incarnation: int, processes: Sequence[Any]) -> None:
        """A unit of which an earlier coordinator knew; `processes`: of all its ranks, where all had registered, else none."""
        self._unit_of |= dict.fromkeys(ranks, ranks[0])
        state = _S.REGISTERED if processes else _S.PLACED
        known = tuple(processes) or (None,) * len(ranks)
        self._put(Unit(role=role, ranks=tuple(ranks), processes=known, incarnation=incarnation, state=state), None)

    def admit(self, process: Incarnated) -> bool:
        """A process has registered. Raises UserError for one that the run has no place for, or that is there already."""
        unit = self.find(process.name)
        if unit is None or unit.state is UnitState.DISMISSED:
            raise UserError(f"{process.name} (incarnation {process.incarnation}) is not in this run's topology")
        known = unit.processes[unit.ranks.index(process.name)]
        if known == process:
            return False  # it says so again
        here = known is not None and known.incarnation == unit.incarnation
        if here and (process.incarnation == unit.incarnation or self.is_followed(process)):
            raise UserError(f"{process.name}: its incarnation {unit.incarnation} has registered already")
        return self._tell(process, RankRegistered(process))

    def connect(self, port: Any) -> bool:
        """`port` (a RolePort) leads to a unit that has registered; it is lost as soon as `port` is."""
        if not self._tell(port, Connected(port)):
            return False
        port.when_lost(partial(self.lose, port))
        return True

    def join(self, who: Incarnated) -> bool:
        """A rollout is to be in the next epoch of the sync group."""
        return self._tell(who, Joined())

    def serve(self, who: Incarnated) -> bool:
        """A rollout has the committed version."""
        return self._tell(who, Served())

    def lose(self, who: Incarnated, reason: str) -> bool:
        """The run does without `who` from now on: its unit is asked nothing any more. Whoever notices says so, as often as
        it likes."""
        return self._tell(who, UnitLost(reason))

    def dismiss(self, name: str, reason: str) -> None:
        """The unit is not wanted any more, nor missed."""
        unit = self._units[name]
        if unit.state is not UnitState.DISMISSED:
            self._apply(unit, Dismissed(reason))

    def add(self, role: str, port: Any) -> None:
        """A unit of one process that somebody else has started and connected."""
        if self.find(port.name) is None:
            self.place(role, [port.name])
        self.admit(port)
        self.connect(port)

    # ------------------------------------------------------------------------------------------ inside

    def _tell(self, who: Incarnated, event: UnitEvent) -> bool:
        unit = self.find(who.name)
        if unit is None or self.is_followed(who) or (who.incarnation == unit.incarnation and unit.state.over):
            self.late += 1
            return False
        if who.incarnation > unit.incarnation:
            unit = self._follow(unit, who.incarnation)
        self._apply(unit, event)
        return True

    def _follow(self, unit: Unit, incarnation: int) -> Unit:
        if not unit.state.over:
            unit = self._apply(unit, UnitLost(f"incarnation {incarnation} has come in its place"))
        return self._apply(unit, Replaced(incarnation))

    def _apply(self, unit: Unit, event: UnitEvent) -> Unit:
        after = apply(unit, event)
        self._put(after, unit)
        return after

    def _put(self, unit: Unit, before: Unit | None) -> None:
        self._units[unit.name] = unit
        self._views.clear()
        self._members.clear()
        self._untold.append(UnitChange(unit, before.state if before is not None else None))
        if before is not None and before.port is not None and unit.port is None:
            before.port.give_up(unit.reason)
        if self._telling:
            return  # whoever tells goes on with this
        self._telling = True
        try:
            while self._untold:
                change = self._untold.popleft()
                for watcher in self._watchers:
                    watcher(change)
        finally:
            self._telling = False
