"""Who is in the publication group, and who may be asked to generate: the rollouts' epochs. Pure: no I/O, no clock.

::

    arrive → newcomer → (an epoch with it is opened, and a version committed in it) → serving
                 |                                                                       |
                 +------------------------------ lose ----------------------------------+→ gone, for this incarnation

An epoch is a numbered list of members. It is stale once it is not exactly the living, or its group is broken: then another
has to be opened. A member serves from the first commit of an epoch that it is in, so all who serve have the committed version.
An incarnation that was lost never comes back; the process that replaces it has the next one.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from runtime.errors import InvariantViolated
from runtime.types import PolicyVersion


class Member(Struct, frozen=True, order=True):
    """One incarnation of a rollout, which takes part in publications."""

    name: str
    incarnation: int = 0


class Epoch(Struct, frozen=True):
    number: int
    members: tuple[Member, ...]


class Membership:
    """`epoch` is the newest; `committed` the version that counts, None before the first."""

    def __init__(self) -> None:
        self.epoch = Epoch(0, ())
        self.committed: PolicyVersion | None = None
        self._newest: dict[str, int] = {}  # the newest incarnation that was ever seen of each name
        self._living: set[Member] = set()
        self._serving: set[Member] = set()
        self._broken = False

    @property
    def living(self) -> tuple[Member, ...]:
        return tuple(sorted(self._living))

    @property
    def serving(self) -> tuple[Member, ...]:
        """Who may generate."""
        return tuple(sorted(self._serving))

    @property
    def newcomers(self) -> tuple[Member, ...]:
        return tuple(sorted(self._living - self._serving))

    @property
    def stale(self) -> bool:
        """Whether the next publication needs another epoch than this one."""
        return self._broken or set(self.epoch.members) != self._living

    def arrive(self, member: Member) -> bool:
        """A process is there. False, and nothing changes, when it is not newer than what was seen under its name."""
        if member.incarnation <= self._newest.get(member.name, -1):
            return False
        for former in [living for living in self._living if living.name == member.name]:
            self.lose(former)
        self._newest[member.name] = member.incarnation
        self._living.add(member)
        return True

    def lose(self, member: Member) -> bool:
        """It is gone, or given up. False when it was so before."""
        if member not in self._living:
            return False
        self._living.discard(member)
        self._serving.discard(member)
        return True

    def open(self) -> Epoch:
        """The next epoch, of all the living."""
        if not self._living:
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
        if behind := (self._living & set(self.epoch.members)) - members:
            raise InvariantViolated(f"version {version} is committed, and {sorted(behind)} live without it")
        self.committed = version
        self._serving = self._living & members
