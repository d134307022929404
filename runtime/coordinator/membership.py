"""The epochs of the sync group: which rollouts are in it, and from when each may be asked to generate. Pure: no I/O, no clock.

An epoch is a numbered list of members. It is stale once it is not exactly the living, or its group is broken: then another
has to be opened. A member serves from the first commit of an epoch that it is in, so all who serve have the committed version.
Who lives is what the register says: who joins (a newcomer) or serves.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from runtime.coordinator.register import LIVING, ROLLOUT, Member, Register, UnitState
from runtime.errors import InvariantViolated
from runtime.types import PolicyVersion


class Epoch(Struct, frozen=True):
    number: int
    members: tuple[Member, ...]


class Membership:
    """`epoch` is the newest; `committed` the version that counts, None before the first."""

    def __init__(self, register: Register):
        self.epoch = Epoch(0, ())
        self.committed: PolicyVersion | None = None
        self._register = register
        self._broken = False

    @property
    def living(self) -> tuple[Member, ...]:
        return self._members(*LIVING)

    @property
    def serving(self) -> tuple[Member, ...]:
        """Who may generate."""
        return self._members(UnitState.SERVING)

    @property
    def newcomers(self) -> tuple[Member, ...]:
        return self._members(UnitState.JOINING)

    @property
    def stale(self) -> bool:
        """Whether the next publication needs another epoch than this one."""
        return self._broken or self.epoch.members != self.living

    def open(self) -> Epoch:
        """The next epoch, of all the living."""
        if not self.living:
            raise InvariantViolated("an epoch needs a living member")
        self.epoch, self._broken = Epoch(self.epoch.number + 1, self.living), False
        return self.epoch

    def break_up(self, epoch: int) -> None:
        """The group of `epoch` cannot be used any more."""
        self._broken = self._broken or epoch == self.epoch.number

    def commit(self, epoch: int, version: PolicyVersion, swapped: Iterable[Member]) -> None:
        """`version` counts, and `swapped` have it. Whoever of the epoch has not must have been lost before.

        Raises InvariantViolated for a former epoch, a version that goes back, or a member that lives without the version.
        """
        members = set(swapped)
        if epoch != self.epoch.number or not members <= set(self.epoch.members):
            raise InvariantViolated(f"a commit of epoch {epoch} by {sorted(members)} in {self.epoch}")
        if self.committed is not None and version < self.committed:
            raise InvariantViolated(f"version {version} is committed after {self.committed}")
        if behind := (set(self.living) & set(self.epoch.members)) - members:
            raise InvariantViolated(f"version {version} is committed, and {sorted(behind)} live without it")
        self.committed = version
        for member in self.newcomers:
            if member in members:
                self._register.serve(member)

    def _members(self, *states: UnitState) -> tuple[Member, ...]:
        return tuple(unit.member for unit in self._register.units(ROLLOUT, *states))
