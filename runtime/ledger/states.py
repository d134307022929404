"""The states of a group, as one table. Pure: no I/O, no clock, no configuration.

::

    admitted → generating → generated → {scored, referenced, valued} → ready → consumed(step) → retired
        ↑__________|____________|_____________________________________|                |           |
                  Lost (replica or payload)                 ↑___________Rewound________|___________|

A group is `ready` exactly when it has every mark that the run needs; marks are independent and come in any order.
`dropped(why)` ends a group that was not consumed. `retired` and `dropped` are final within one lineage. Going back to a
checkpoint begins a new lineage, and only this rewinds groups that the dead branch consumed or retired.
"""

from __future__ import annotations

from enum import IntFlag, StrEnum

from msgspec import Struct
from msgspec.structs import replace

from runtime.errors import InvariantViolated


class Phase(StrEnum):
    ADMITTED = "admitted"
    GENERATING = "generating"
    GENERATED = "generated"
    READY = "ready"
    CONSUMED = "consumed"
    RETIRED = "retired"
    DROPPED = "dropped"

    @property
    def final(self) -> bool:
        return self in (Phase.RETIRED, Phase.DROPPED)


class Mark(IntFlag):
    """The data that a generated group has, or needs, before a step can train on it."""

    NONE = 0
    SCORED = 1
    REFERENCED = 2
    VALUED = 4


class GroupState(Struct, frozen=True):
    """The state of one group. `needs` is the run's; `step` is set from `consumed` on, `why` when dropped."""

    needs: Mark
    phase: Phase = Phase.ADMITTED
    marks: Mark = Mark.NONE
    step: int | None = None
    why: str | None = None

    def __str__(self) -> str:
        detail = next((f"({value})" for value in (self.why, self.step) if value is not None), "")
        return f"{self.phase.value}{detail}"


class Event(Struct, frozen=True):
    """An event of a group."""


class Dispatched(Event, frozen=True):
    """A replica was asked to generate the group."""


class Generated(Event, frozen=True):
    """The group's payload arrived."""


class Marked(Event, frozen=True):
    """One of the needed marks arrived."""

    mark: Mark


class Consumed(Event, frozen=True):
    """The optimizer step `step` has been applied to a batch with this group."""

    step: int


class Retired(Event, frozen=True):
    """The version that trained on the group was committed."""


class Dropped(Event, frozen=True):
    """No step will train on the group."""

    why: str


class Lost(Event, frozen=True):
    """The replica or the payload is gone: the group is generated again, with the same ordinal and seed."""


class Rewound(Event, frozen=True):
    """The group was consumed by a step after the checkpoint to which the run went back."""


class Covered(Event, frozen=True):
    """A checkpoint names the group as trained by `step`. This counts more than a journal that lags behind."""

    step: int


_TABLE: dict[type[Event], dict[Phase, Phase]] = {
    Dispatched: {Phase.ADMITTED: Phase.GENERATING},
    Generated: {Phase.GENERATING: Phase.GENERATED},
    Marked: {Phase.GENERATED: Phase.GENERATED},
    Consumed: {Phase.READY: Phase.CONSUMED},
    Retired: {Phase.CONSUMED: Phase.RETIRED},
    Dropped: dict.fromkeys((Phase.ADMITTED, Phase.GENERATING, Phase.GENERATED, Phase.READY), Phase.DROPPED),
    Lost: dict.fromkeys((Phase.GENERATING, Phase.GENERATED, Phase.READY), Phase.ADMITTED),
    Rewound: dict.fromkeys((Phase.CONSUMED, Phase.RETIRED), Phase.GENERATED),
    Covered: dict.fromkeys((Phase.ADMITTED, Phase.GENERATING, Phase.GENERATED, Phase.READY, Phase.CONSUMED), Phase.RETIRED),
}


def apply(state: GroupState, event: Event) -> GroupState:
    """Return the state after `event`. Raises InvariantViolated if the table has no such transition."""
    phase = _TABLE[type(event)].get(state.phase)
    if phase is None:
        raise InvariantViolated(f"a group that is {state} cannot take {event!r}")
    if isinstance(event, Marked):
        if event.mark & state.marks or event.mark & ~state.needs or not event.mark:
            raise InvariantViolated(f"{event!r} on a group that needs {state.needs!r} and has {state.marks!r}")
        return settle(replace(state, marks=state.marks | event.mark))
    if isinstance(event, Generated | Rewound):
        return settle(replace(state, step=None))
    if isinstance(event, Lost):
        return GroupState(state.needs)
    if isinstance(event, Consumed | Covered):
        return replace(state, phase=phase, step=event.step if state.step is None else state.step)
    return replace(state, phase=phase, why=event.why if isinstance(event, Dropped) else None)


def settle(state: GroupState) -> GroupState:
    """Set the phase to `generated` or `ready`, according to the marks."""
    return replace(state, phase=Phase.GENERATED if state.needs & ~state.marks else Phase.READY)


def restore(state: GroupState, last: int, trained: bool, intact: bool) -> GroupState:
    """Return the state of a group after the run has gone back to a checkpoint.

    `trained`: the checkpoint names the group; then `last` is the step that trained it, unless the journal has the step.
    `intact`: the payload, and the data of the marks, can still be read.
    Groups in generation are lost. Intact generated groups are kept, also from the dead branch.
    """
    if trained and state.phase != Phase.RETIRED:
        return apply(state, Covered(last))
    if trained or state.phase == Phase.DROPPED:
        return state
    if state.phase in (Phase.CONSUMED, Phase.RETIRED):
        state = apply(state, Rewound())
    elif state.phase in (Phase.GENERATED, Phase.READY):
        state = settle(state)
    if state.phase == Phase.GENERATING or (state.phase in (Phase.GENERATED, Phase.READY) and not intact):
        state = apply(state, Lost())
    return state
