"""Failover: a lost coordinator is started again and takes over the living processes. This module has the state it reads.

::

    the coordinator writes into the ledger                     the next one reads
      members   the processes, their nodes and addresses       opens sessions to all of them, starts none again
      course    after each step: how far the run is            the step to go on with
      groups    each change, as always                         the state of each group: generating, scored, taken by a step
                                                               ↓
    rollouts, rewards, references   keep requests and answers until these are acknowledged: if asked again for the same group
                                    and attempt, they go on or answer at once
    trainer, critic                 report the step of the newest Apply, and keep its result
    agents                          keep their processes for `deadlines.coordinator`

A step is over once `course` has it. Later work is repeated, and idempotent: Apply answers with the same result, a version that
is published again is there already, and the groups that were taken are the batch.

A process that has seen a higher term, one more with each coordinator, refuses a lower one. A trainer or critic that was started
again has the state of `course`, or that of the next step, in memory (`Recall`). Where it does not, the run goes back to its
newest checkpoint. A coordinator that lives takes up its own run in the same way after the loss of trainer or critic.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import Struct

from runtime import timeouts, types
from runtime.cluster.placement import Binding
from runtime.cluster.topology import Instance, takes_turns
from runtime.commands import Level, Offload, Recall, SetLevel
from runtime.config import Config
from runtime.coordinator.metrics_recorder import COURSE, RunState
from runtime.coordinator.pools import models
from runtime.coordinator.register import LIVING, ROLLOUT, Member, Register, Unit, UnitState
from runtime.errors import InUse, ServiceFault, SluiceError, StorageFull, Unreachable
from runtime.ledger.journal import LedgerWriter, Note
from runtime.process.waiting import now
from runtime.status import Registration
from runtime.types import PolicyVersion

log = logging.getLogger("sluice")

MEMBERS = "members"  # the key of the note


class KnownUnit(Struct):
    """A row of the register, with the addresses of its processes."""

    role: str
    ranks: list[str]
    incarnation: int
    processes: list[Registration]


class Members(Struct, kw_only=True):
    """The processes of the `run`. `began`: the term in which all of them were started. `rollouts`: their configured number if
    they are one fleet, which may have been scaled; else 0."""

    run: str
    began: int
    rollouts: int
    seats: list[Binding]
    pending: list[Instance]
    units: list[KnownUnit]


class Failover(Struct):
    """The state that an earlier coordinator of this run has left."""

    members: Members
    course: RunState


async def reopened(folder: Path, patience: float) -> LedgerWriter:
    """Open the ledger of an earlier coordinator, once there is room and the file system works. Raises InUse if another process,
    such as the earlier one, keeps the ledger open for `patience` seconds."""
    reported, until = False, now() + patience
    while True:
        try:
            return await LedgerWriter.open(folder)
        except (StorageFull, ServiceFault, InUse) as error:
            if isinstance(error, InUse) and now() >= until:
                raise
            if not reported:
                log.warning("waiting until %s can be opened: %s", folder, error)
            reported = True
        await asyncio.sleep(timeouts.DISK_RETRY)


async def left_by(ledger: LedgerWriter, run: str) -> Failover | None:
    """Read the state of an earlier coordinator of `run`. Return None if there was none, or if it had published no version."""
    members, course = await ledger.note(MEMBERS), await ledger.note(COURSE)
    if members is None or course is None:
        return None
    found = Failover(types.decode(Members, members), types.decode(RunState, course))
    return found if found.members.run == found.course.run == run else None


def known_units(register: Register) -> list[KnownUnit]:
    """List the units, with processes if all of these have registered with the newest incarnation."""
    whole = (UnitState.REGISTERED, UnitState.CONNECTED, UnitState.JOINING, UnitState.SERVING)
    return [
        KnownUnit(unit.role, list(unit.ranks), unit.incarnation, list(unit.processes) if unit.state in whole else [])
        for unit in register.units()
        if unit.state is not UnitState.DISMISSED
    ]


class MembershipStore:
    """Writes the note of the members, once for all changes of a turn of the event loop."""

    def __init__(self, register: Register, ledger: LedgerWriter, members: Callable[[], Members]):
        """Subscribe to the register. `members` returns the processes that take part now."""
        self._ledger, self._members = ledger, members
        self._due: asyncio.Handle | None = None
        register.subscribe(self._look)
        self._look()

    async def written(self) -> None:
        """Wait until all changes so far are in the ledger."""
        if self._due is not None:
            self._due.cancel()
            self._write()
        await self._ledger.flush()

    def _look(self, _: Any = None) -> None:
        if self._due is None:
            self._due = asyncio.get_running_loop().call_soon(self._write)

    def _write(self) -> None:
        self._due = None
        self._ledger.record(Note(key=MEMBERS, value=types.encode(self._members())))


class FailoverState(Struct, frozen=True):
    """The state to go on after `version`, with the trainer and the critic `models`; one that was lost since fails all calls.
    `held`: the version of each rollout. `ahead`: the trainer has made the next. `lives`: the trainer is the process that made
    `version`, and has its weights ready to be sent."""

    models: tuple[Any, ...]
    version: PolicyVersion
    held: dict[Member, PolicyVersion]
    ahead: bool
    lives: bool

    @property
    def having(self) -> list[Member]:
        return [member for member, theirs in self.held.items() if theirs >= self.version]

    def has_since(self, who: Member, step: int) -> bool:
        """Return True if a rollout had the weights of `step` when asked; a later incarnation begins with initial weights."""
        return who in self.held and self.held[who].step >= step


class NotInMemory(SluiceError):
    """The copies of the version that a trainer or critic was to find in memory are lost."""


async def take_up(config: Config, register: Register, course: RunState) -> FailoverState:
    """Go on after `course` with the living processes. A trainer or critic that was started again goes on from its memory.
    Raises SluiceError if one of them is in another state."""
    version, ahead, lives, taken_up = course.history.version, False, True, list[Any]()
    rollouts = register.units(ROLLOUT, UnitState.CONNECTED, *LIVING)
    held = await asyncio.gather(*(_version(config, register, unit) for unit in rollouts))  # then asleep if devices are shared
    for unit in models(register):
        if (port := unit.port) is None:
            raise Unreachable(unit.name, "take up", unit.reason)
        taken_up.append(port)
        if unit.member not in course.models:
            lives &= unit.role != "trainer"
            recalled = await port.call(Recall(version))
            if recalled.version is None:
                raise NotInMemory(f"{unit.name} has neither version {version} nor the next in memory: {recalled.reason}")
        ordered = await port.take_up()
        if ordered not in (version.step, version.step + 1):
            raise SluiceError(f"{unit.name} has made {ordered} steps, but {version.step} are over")
        if takes_turns(config):
            await port.call(Offload())  # no role has the devices at first
        ahead |= unit.role == "trainer" and ordered > version.step
    known = {unit.member: theirs for unit, theirs in zip(rollouts, held, strict=True) if theirs is not None}
    return FailoverState(tuple(taken_up), version, known, ahead, lives)


async def _version(config: Config, register: Register, unit: Unit) -> PolicyVersion | None:
    """Return the version of a rollout, or None if it is lost. On shared devices, put it to sleep first."""
    try:
        if takes_turns(config):
            await unit.port.call(SetLevel(Level.ASLEEP))
        return (await unit.port.status()).version
    except ServiceFault as error:
        register.lose(unit, str(error))
        return None
