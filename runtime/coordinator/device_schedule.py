"""The schedule of devices that rollouts, reference and trainer share: a state machine. Pure: no I/O, no clock.

::

    generate → sleep → (ref_onload → refer → ref_offload →) onload → train
        → wake_weights → publish → offload → wake_kv → generate

- generate: the rollouts have the devices, until the caller says that nothing is being generated any more.
- sleep: the rollouts free their memory. Then the reference gets the devices, if it takes part, and then the trainer.
- wake_weights: the steps are done, and the trainer's weights are still there. The rollouts allocate the memory of their weights
  alone, into which the new ones are published.
- offload, wake_kv: once the trainer is off the devices the rollouts allocate keys and values, and generate.

A rollout is asleep when it arrives, whatever the phase, and is told to move to the level of the others. The run begins in the
phase `asleep`, which ends as `generate` does. No phase waits for a lost rollout, and a phase that waits for no rollout is over:
lost rollouts cannot hold up the trainer's turn.

**The invariant.** At no time do two of these have the devices, or the order to take them: rollouts with keys and values, the
reference, the trainer. Only the weights of rollouts may lie beside the trainer's.
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
    """A process of a rollout is there, asleep."""

    member: Member


class MemberLost(Struct, frozen=True):
    """A rollout is gone, or given up."""

    member: Member


class SleepLevelReached(Struct, frozen=True):
    """A rollout has reached `level`, as it was told."""

    member: Member
    level: Level


class GenerationDone(Struct, frozen=True):
    """No rollout has work any more. `refers`: the reference has some."""

    refers: bool = False


class ResidencyChanged(Struct, frozen=True):
    """Reference or trainer has brought its state to the devices, or off them, as it was told."""


class ReferenceDone(Struct, frozen=True):
    """The reference has no work any more."""


class Trained(Struct, frozen=True):
    """The steps of the turn are done. `publishes`: they made a version."""

    publishes: bool = True


class VersionPublished(Struct, frozen=True):
    """The version counts."""


Event = (
    Arrived | MemberLost | SleepLevelReached | GenerationDone | ResidencyChanged | ReferenceDone | Trained | VersionPublished
)


class SetSleepLevel(Struct, frozen=True):
    member: Member
    level: Level


class SetResidency(Struct, frozen=True):
    """Have `who` bring its state to the devices, or take it off them."""

    who: Literal["reference", "trainer"]
    command: Onload | Offload


Action = SetSleepLevel | SetResidency

# What each event leads to, by the phase in which it is expected; a rollout may come, go or answer in any.
_AFTER: dict[type, dict[Phase, Phase]] = {
    GenerationDone: {"asleep": "sleep", "generate": "sleep"},
    ResidencyChanged: {"ref_onload": "refer", "ref_offload": "onload", "onload": "train", "offload": "wake_kv"},
    ReferenceDone: {"refer": "ref_offload"},
    Trained: {"train": "wake_weights"},
    VersionPublished: {"publish": "offload"},
}
# What follows once every rollout has reached the level of a phase.
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
    """`phase` is whose turn it is; `members` are the rollouts that are there."""

    def __init__(self, members: Iterable[Member] = ()):
        """`members` are asleep, and nobody has the devices."""
        self.phase: Phase = "asleep"
        self._levels = dict.fromkeys(members, Level.ASLEEP)
        self._told: dict[Member, Level] = {}  # the level that a rollout is told to reach, until it answers
        self._refers = False

    @property
    def members(self) -> frozenset[Member]:
        return frozenset(self._levels)

    def told(self, member: Member) -> bool:
        """Whether the rollout has not yet reached the level that it was told."""
        return member in self._told

    @property
    def waiting_for(self) -> tuple[Member, ...]:
        """The rollouts that the phase waits for."""
        if self.phase not in _REACHED:
            return ()
        return tuple(sorted(member for member in self._levels if self._behind(member)))

    def handle(self, event: Event) -> list[Action]:
        """Apply `event`; returns what is to be done. Raises InvariantViolated for what cannot happen in this phase."""
        actions: list[Action] = []
        if isinstance(event, Arrived):
            for former in [member for member in self._levels if member.name == event.member.name]:
                self._remove(former)
            self._levels[event.member] = Level.ASLEEP
        elif isinstance(event, MemberLost):
            self._remove(event.member)
        elif isinstance(event, SleepLevelReached):
            if self._told.get(event.member) == event.level:
                del self._told[event.member]
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
        self._told.pop(member, None)

    def _behind(self, member: Member) -> bool:
        return member in self._told or self._levels[member] != _LEVEL.get(self.phase, Level.ASLEEP)

    def _orders(self) -> list[Action]:
        """The next orders to rollouts: each has one order at a time."""
        if self.phase == "offload":  # a rollout that slept now would wake again at once; one that woke would lack the room
            return []
        wanted = _LEVEL.get(self.phase, Level.ASLEEP)
        tell = [member for member, level in sorted(self._levels.items()) if level != wanted and member not in self._told]
        self._told |= dict.fromkeys(tell, wanted)
        return [SetSleepLevel(member, wanted) for member in tell]

    def _after(self, event: Event) -> Phase:
        """The phase that follows `event`."""
        phase = _AFTER[type(event)].get(self.phase)
        if phase is None:
            raise InvariantViolated(f"{event} in the phase {self.phase}")
        if isinstance(event, GenerationDone):
            self._refers = event.refers
        return "offload" if isinstance(event, Trained) and not event.publishes else phase

    def _enter(self, phase: Phase) -> list[Action]:
        self.phase = phase
        return [_MOVES[phase]] if phase in _MOVES else []
