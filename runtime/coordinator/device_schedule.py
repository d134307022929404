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

from runtime.commands import Level
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
Offloadable = Literal["reference", "trainer"]


class Arrived(Struct, frozen=True):
    """A process of a rollout is there, asleep."""

    member: Member


class MemberLost(Struct, frozen=True):
    """A rollout is gone, or given up."""

    member: Member


class Reached(Struct, frozen=True):
    """A rollout has reached `level`, as it was told."""

    member: Member
    level: Level


class GenerationDone(Struct, frozen=True):
    """No rollout has work any more. `refers`: the reference has some."""

    refers: bool = False


class Onloaded(Struct, frozen=True):
    who: Offloadable


class Referred(Struct, frozen=True):
    """The reference has no work any more."""


class Trained(Struct, frozen=True):
    """The steps of the turn are done. `publishes`: they made a version."""

    publishes: bool = True


class VersionPublished(Struct, frozen=True):
    """The version counts."""


class Offloaded(Struct, frozen=True):
    who: Offloadable


Event = Arrived | MemberLost | Reached | GenerationDone | Onloaded | Referred | Trained | VersionPublished | Offloaded


class TellLevel(Struct, frozen=True):
    """Tell `member` to come to `level`."""

    member: Member
    level: Level


class TellOnload(Struct, frozen=True):
    """Tell `who` to bring its state to the devices."""

    who: Offloadable


class TellOffload(Struct, frozen=True):
    """Tell `who` to take its state off the devices."""

    who: Offloadable


Action = TellLevel | TellOnload | TellOffload

# In which phases an event is expected; a rollout may come, go or answer in any.
_EXPECTED: dict[type, tuple[Phase, ...]] = {
    GenerationDone: ("asleep", "generate"),
    Referred: ("refer",),
    Trained: ("train",),
    VersionPublished: ("publish",),
    Onloaded: ("ref_onload", "onload"),
    Offloaded: ("ref_offload", "offload"),
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
        if self.phase not in ("sleep", "wake_weights", "wake_kv"):
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
        elif isinstance(event, Reached):
            if self._told.get(event.member) == event.level:
                del self._told[event.member]
                self._levels[event.member] = event.level
        else:
            actions += self._proceed(event)
        actions += self._orders()
        while self.phase in ("sleep", "wake_weights", "wake_kv") and not self.waiting_for:
            actions += self._leave() + self._orders()
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
        return [TellLevel(member, wanted) for member in tell]

    def _proceed(self, event: Event) -> list[Action]:
        if self.phase not in _EXPECTED[type(event)]:
            raise InvariantViolated(f"{event} in the phase {self.phase}")
        if isinstance(event, GenerationDone):
            self.phase, self._refers = "sleep", event.refers
        elif isinstance(event, Referred):
            self.phase = "ref_offload"
            return [TellOffload("reference")]
        elif isinstance(event, Trained):
            if event.publishes:
                self.phase = "wake_weights"
                return []
            return self._offload_trainer()
        elif isinstance(event, VersionPublished):
            return self._offload_trainer()
        else:
            assert isinstance(event, Onloaded | Offloaded)
            return self._moved(event)
        return []

    def _moved(self, event: Onloaded | Offloaded) -> list[Action]:
        if event.who != ("reference" if self.phase.startswith("ref_") else "trainer"):
            raise InvariantViolated(f"{event} in the phase {self.phase}")
        if self.phase == "ref_offload":
            return self._onload_trainer()
        self.phase = {"ref_onload": "refer", "onload": "train", "offload": "wake_kv"}[self.phase]  # type: ignore[assignment]
        return []

    def _leave(self) -> list[Action]:
        """Every rollout has reached the level of this phase: begin the next phase."""
        if self.phase == "sleep":
            if self._refers:
                self.phase = "ref_onload"
                return [TellOnload("reference")]
            return self._onload_trainer()
        self.phase = "publish" if self.phase == "wake_weights" else "generate"
        return []

    def _onload_trainer(self) -> list[Action]:
        self.phase = "onload"
        return [TellOnload("trainer")]

    def _offload_trainer(self) -> list[Action]:
        self.phase = "offload"
        return [TellOffload("trainer")]
