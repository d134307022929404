"""A coordinator that is lost is started again, and takes up the processes that live: what it has to know, and what it asks.

::

    the coordinator writes into the ledger                     the next one reads
      members   who runs where, at which address               sessions to all of them, none is started again
      course    after each step: how far the run is            the step to go on with
      groups    each change, as always                         who generates, scores and has been taken for which step
                                                               ↓
    rollouts, rewards, references   keep what was asked of them, and their answers, until these are acknowledged: asked again
                                    for the same group and attempt, they go on or answer at once
    trainer, critic                 say for which step Apply was ordered, and keep what came of it
    agents                          keep their processes for `deadlines.coordinator`

A step is over once `course` says so. What follows the last one is done again, and each part of it is the same when it is done
twice: Apply answers what it answered, a version that is published again is had already, groups that were taken are the batch.

Who speaks is told by a term, one more with each coordinator: a process that has heard a higher one refuses a lower one. Where
trainer or critic is not what the course says, the run goes back to its newest checkpoint instead.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any, Protocol

from msgspec import Struct

from runtime import timeouts, types
from runtime.cluster.placement import Binding
from runtime.cluster.topology import Instance, takes_turns
from runtime.commands import Level, Move, Offload
from runtime.config import Config
from runtime.coordinator.pools import models
from runtime.coordinator.register import ROLLOUT, Member, Register, Unit, UnitState
from runtime.coordinator.run_context import COURSE, RunState
from runtime.errors import InUse, ServiceFault, SluiceError, StorageFull
from runtime.ledger.journal import LedgerWriter
from runtime.ledger.records import Note
from runtime.status import Registration
from runtime.types import PolicyVersion

log = logging.getLogger("sluice")

MEMBERS = "members"  # the note


class KnownUnit(Struct):
    """A row of the register, and how its processes are reached."""

    role: str
    ranks: list[str]
    incarnation: int
    processes: list[Registration]


class Members(Struct, kw_only=True):
    """Who takes part in the `run`. `began`: the term in which all was started. `rollouts`: how many there are to be where they
    are one fleet, which may have been scaled; else 0."""

    run: str
    began: int
    rollouts: int
    seats: list[Binding]
    pending: list[Instance]
    units: list[KnownUnit]


class Failover(Struct):
    """What an earlier coordinator of this run has left."""

    members: Members
    course: RunState


async def reopened(folder: Path, segment_bytes: int, patience: float) -> LedgerWriter:
    """The ledger of an earlier coordinator, once there is room and the file system does not fail. Raises InUse when another
    process, as the earlier one, has it open for `patience` seconds."""
    clock = asyncio.get_running_loop().time
    told, until = False, clock() + patience
    while True:
        try:
            return await LedgerWriter.open(folder, segment_bytes)
        except (StorageFull, ServiceFault, InUse) as error:
            if isinstance(error, InUse) and clock() >= until:
                raise
            if not told:
                log.warning("waits until %s can be opened: %s", folder, error)
            told = True
        await asyncio.sleep(timeouts.DISK_RETRY)


async def left_by(ledger: LedgerWriter, run: str) -> Failover | None:
    """What an earlier coordinator of `run` has written; None where there was none, or none that had published a version."""
    members, course = await ledger.note(MEMBERS), await ledger.note(COURSE)
    if members is None or course is None:
        return None
    found = Failover(types.decode(Members, members), types.decode(RunState, course))
    return found if found.members.run == found.course.run == run else None


def known_units(register: Register) -> list[KnownUnit]:
    """Those whose processes have all registered with their newest incarnation."""
    whole = (UnitState.REGISTERED, UnitState.CONNECTED, UnitState.JOINING, UnitState.SERVING)
    return [
        KnownUnit(unit.role, list(unit.ranks), unit.incarnation, list(unit.processes) if unit.state in whole else [])
        for unit in register.units()
        if unit.state is not UnitState.DISMISSED
    ]


class PlacedMembers(Protocol):
    def members(self, began: int) -> Members:
        """Who takes part now."""


class MembershipStore:
    """Writes the note of the members, once for all changes of a turn of the event loop."""

    def __init__(self, register: Register, ledger: LedgerWriter, placed: PlacedMembers, began: int):
        """`began`: as of `Members`."""
        self._ledger, self._placed, self._began = ledger, placed, began
        self._due: asyncio.Handle | None = None
        register.subscribe(self._look)
        self._look()

    async def written(self) -> None:
        """Returns once all changes so far are in the ledger."""
        if self._due is not None:
            self._due.cancel()
            self._write()
        await self._ledger.flush()

    def _look(self, _: Any = None) -> None:
        if self._due is None:
            self._due = asyncio.get_running_loop().call_soon(self._write)

    def _write(self) -> None:
        self._due = None
        self._ledger.record(Note(key=MEMBERS, value=types.encode(self._placed.members(self._began))))


class FailoverState(Struct, frozen=True):
    """Where an attempt goes on: with the step after `version`. `told`: the version of each rollout. `ahead`: the trainer is
    past it already."""

    version: PolicyVersion
    told: dict[Member, PolicyVersion]
    ahead: bool

    @property
    def having(self) -> list[Member]:
        """The rollouts that may generate with `version`."""
        return [member for member, theirs in self.told.items() if theirs >= self.version]

    def has_since(self, who: Member, step: int) -> bool:
        """Whether a rollout had the weights of `step` when it was asked. One that was started again meanwhile, under the name
        of who was asked for a group, begins with those that all began with."""
        return who in self.told and self.told[who].step >= step


async def take_up(config: Config, register: Register, course: RunState) -> FailoverState:
    """Go on after `course` with the processes that live. Raises SluiceError where trainer or critic is not what it says."""
    version, ahead = course.history.version, False
    rollouts = register.units(ROLLOUT, UnitState.CONNECTED)
    told = await asyncio.gather(*(_version(config, register, unit) for unit in rollouts))  # those that share devices sleep then
    for unit in models(register):
        if unit.port is None or unit.member not in course.models:
            raise SluiceError(f"{unit.name} (incarnation {unit.incarnation}) is another than made version {version}")
        ordered = await unit.port.take_up()
        if ordered not in (version.step, version.step + 1):
            raise SluiceError(f"{unit.name} has made {ordered} steps, but {version.step} are over")
        if takes_turns(config):
            await unit.port.call(Offload())  # nobody has the devices at first
        ahead |= unit.role == "trainer" and ordered > version.step
    known = {unit.member: theirs for unit, theirs in zip(rollouts, told, strict=True) if theirs is not None}
    return FailoverState(version, known, ahead)


async def _version(config: Config, register: Register, unit: Unit) -> PolicyVersion | None:
    """What a rollout has; on shared devices it is asleep then. None: it is lost."""
    try:
        if takes_turns(config):
            await unit.port.call(Move(Level.ASLEEP))
        return (await unit.port.status()).version
    except ServiceFault as error:
        register.lose(unit, str(error))
        return None
