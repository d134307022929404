"""The schedule of devices that rollouts, reference and trainer share: a state machine. Pure: no I/O, no clock.

::

    generate → sleep → (ref_onload → refer → ref_offload →) onload → train
        → wake_weights → publish → offload → wake_kv → generate

- generate: the rollouts have the devices, until the caller reports that generation is done.
- sleep: the rollouts free their memory. Then the reference gets the devices, if it takes part, and then the trainer.
- wake_weights: the steps are done, and the trainer's weights are still there. The rollouts allocate memory only for their
  weights, into which the new weights are published.
- offload, wake_kv: after the trainer is off the devices, the rollouts allocate keys and values, and generate.

A rollout arrives asleep in any phase, and is ordered to move to the level of the other rollouts. The run begins in the phase
`asleep`, which ends as `generate` does. No phase waits for a lost rollout, and a phase without rollouts to wait for is over: so
lost rollouts cannot hold up the trainer's turn.

**The invariant.** At no time do two of these have the devices, or the order to take them: rollouts with keys and values, the
reference, the trainer. Only the rollouts' weights may be there together with the trainer's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from msgspec import Struct

from runtime.commands import Level, Offload, Onload
from runtime.coordinator.register import Member
from runtime.errors import InvariantViolated

Phase = Literal[
    "asleep",
    "generate",
    "sleep",
    "ref_onload",
    "refer",
    "ref_offload",
    "onload",
    "train",
    "wake_weights",
    "publish",
    "offload",
    "wake_kv",
]


class Arrived(Struct, frozen=True):
    """A rollout process is there, asleep."""

    member: Member


class MemberLost(Struct, frozen=True):
    """A rollout is gone, or was given up."""

    member: Member


class SleepLevelReached(Struct, frozen=True):
    """A rollout has reached the ordered `level`."""

    member: Member
    level: Level


class GenerationDone(Struct, frozen=True):
    """No rollout has work any more. `refers`: the reference has work."""

    refers: bool = False


class ResidencyChanged(Struct, frozen=True):
    """Reference or trainer has moved its state to or off the devices, as ordered."""


class ReferenceDone(Struct, frozen=True):
    """The reference has no work any more."""


class Trained(Struct, frozen=True):
    """The steps of the turn are done. `publishes`: they made a version."""

    publishes: bool = True


class VersionPublished(Struct, frozen=True):
    """The version is committed."""


Event = (
    Arrived | MemberLost | SleepLevelReached | GenerationDone | ResidencyChanged | ReferenceDone | Trained | VersionPublished
)


class SetSleepLevel(Struct, frozen=True):
    member: Member
    level: Level


class SetResidency(Struct, frozen=True):
    """Order `who` to bring its state to the devices, or to take it off."""

    who: Literal["reference", "trainer"]
    command: Onload | Offload


Action = SetSleepLevel | SetResidency

# The next phase after each event, by the phase in which the event is expected; rollout events are allowed in any phase.
_AFTER: dict[type, dict[Phase, Phase]] = {
    GenerationDone: {"asleep": "sleep", "generate": "sleep"},
    ResidencyChanged: {"ref_onload": "refer", "ref_offload": "onload", "onload": "train", "offload": "wake_kv"},
    ReferenceDone: {"refer": "ref_offload"},
    Trained: {"train": "wake_weights"},
    VersionPublished: {"publish": "offload"},
}
# The next phase once every rollout has reached the level of a phase.
_REACHED: dict[Phase, Phase] = {"sleep": "onload", "wake_weights": "publish", "wake_kv": "generate"}
_MOVES: dict[Phase, SetResidency] = {
    "ref_onload": SetResidency("reference", Onload()),
    "ref_offload": SetResidency("reference", Offload()),
    "onload": SetResidency("trainer", Onload()),
    "offload": SetResidency("trainer", Offload()),
}
_LEVEL: dict[Phase, Level] = {
    "wake_weights": Level.WEIGHTS,
    "publish": Level.WEIGHTS,
    "wake_kv": Level.AWAKE,
    "generate": Level.AWAKE,
}


class DeviceSchedule:
    """The state machine. `phase` names the current turn; `members` are the present rollouts."""

    def __init__(self, members: Iterable[Member] = ()):
        """Begin with `members` asleep, and the devices free."""
        self.phase: Phase = "asleep"
        self._levels = dict.fromkeys(members, Level.ASLEEP)
        self._ordered: dict[Member, Level] = {}  # the level that a rollout was ordered to reach, until it answers
        self._refers = False

    @property
    def members(self) -> frozenset[Member]:
        return frozenset(self._levels)

    def is_moving(self, member: Member) -> bool:
        """Return True if the rollout has not yet reached its ordered level."""
        return member in self._ordered

    @property
    def waiting_for(self) -> tuple[Member, ...]:
        """The rollouts that the phase waits for."""
        if self.phase not in _REACHED:
            return ()
        return tuple(sorted(member for member in self._levels if self._behind(member)))

    def handle(self, event: Event) -> list[Action]:
        """Apply `event` and return the actions to carry out. Raises InvariantViolated if it cannot happen in this phase."""
        actions: list[Action] = []
        if isinstance(event, Arrived):
            for former in [member for member in self._levels if member.name == event.member.name]:
                self._remove(former)
            self._levels[event.member] = Level.ASLEEP
        elif isinstance(event, MemberLost):
            self._remove(event.member)
        elif isinstance(event, SleepLevelReached):
            if self._ordered.get(event.member) == event.level:
                del self._ordered[event.member]
                self._levels[event.member] = event.level
        else:
            actions += self._enter(self._after(event))
        actions += self._orders()
        while self.phase in _REACHED and not self.waiting_for:
            following: Phase = "ref_onload" if self.phase == "sleep" and self._refers else _REACHED[self.phase]
            actions += self._enter(following) + self._orders()
        return actions

    def _remove(self, member: Member) -> None:
        self._levels.pop(member, None)
        self._ordered.pop(member, None)

    def _behind(self, member: Member) -> bool:
        return member in self._ordered or self._levels[member] != _LEVEL.get(self.phase, Level.ASLEEP)

    def _orders(self) -> list[Action]:
        """Return the next orders to rollouts: each has one order at a time."""
        if self.phase == "offload":  # no orders: a rollout put to sleep would wake at once; one woken would lack room
            return []
        wanted = _LEVEL.get(self.phase, Level.ASLEEP)
        moves = [member for member, level in sorted(self._levels.items()) if level != wanted and member not in self._ordered]
        self._ordered |= dict.fromkeys(moves, wanted)
        return [SetSleepLevel(member, wanted) for member in moves]

    def _after(self, event: Event) -> Phase:
        """Return the phase after `event`."""
        phase = _AFTER[type(event)].get(self.phase)
        if phase is None:
            raise InvariantViolated(f"{event} in the phase {self.phase}")
        if isinstance(event, GenerationDone):
            self._refers = event.refers
        return "offload" if isinstance(event, Trained) and not event.publishes else phase

    def _enter(self, phase: Phase) -> list[Action]:
        self.phase = phase
        return [_MOVES[phase]] if phase in _MOVES else []
