"""Bounded staleness: how many groups may be under way, and which of them a step may take. Pure arithmetic.

**The rule.** A step may train on a group only if the version of the group's oldest token + η ≥ the step's number. So no
token is more than η versions older than the weights that it trains.

`buffer.py` enforces it: `Buffer.capacity` admits, `generated` refuses a group with a token older than its dispatch allows, and
`take` selects. `consume` checks again once a step has been applied, beside the publication of what it made, and ends the run
where the rule is broken. After a resume `load` has those generated again that are `overdue`.

Deadlines are numbers of steps here.

Terms. Step v trains the weights of version v and makes version v + 1. c is the committed version, η the bound, B the
groups per step. A group *holds a place* from its dispatch until it is retired (the commit of the version that it trained) or
dropped; it is *open* while no step has taken it. Its deadline is the last step that may take it: the version of its oldest
token + η. Until the group arrives, the version committed at its dispatch is used as a lower bound, so a deadline only ever
moves later.

**The invariant.** Let v be the next step with room and r ≥ 1 its open places. For every d ≥ v::

    U(d) ≤ r + (d − v)·B          U(d): open groups with a deadline ≤ d                          (1)

The right side is how many groups the steps v … d can still take. By (1) taking the earliest deadline first meets every
deadline; by (1) at d = v, nobody is overdue: v − version of the oldest token ≤ η, exactly.

**Dispatch keeps it.** Groups that hold a place: B for each of the steps c … v − 1 that are full (their versions are not
committed), B − r in step v, and the open ones. When all of them together, the new one included, are at most (η + 1)·B, then
open ≤ r + (c + η − v)·B. The new one's deadline is ≥ c + η, so it counts in (1) only where d ≥ c + η, and there
U(d) ≤ open ≤ r + (c + η − v)·B ≤ r + (d − v)·B. Hence `admission_capacity`.

**Taking keeps it** when it is checked: after taking k groups, r is less by k and U(d) less by the taken with deadlines ≤ d, so
(1) asks that for every d the number taken with a deadline *later* than d be at most r + (d − v)·B − U(d). Those sets
are nested in d, so going through the ready groups by deadline and stopping at the first that does not fit takes as many as can
be taken. The earliest deadline always fits. A step that can take nothing waits for a group that is being generated, which
depends on no step: there is no deadlock. A full step leaves (1) for v + 1 as it was: r becomes B and B moves to the left term.

**Nothing starves.** A group whose deadline is d is taken by step d at the latest, however long it took; so none is dropped for
being slow, and with drops and lost replicas (a group leaves, or returns later with a later deadline) U only falls.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from runtime.errors import InvariantViolated

# ---- Depth
#
# How many groups hold a place at once: as many as keep the trainer busy, where that is fewer than the staleness bound
# allows. By measured times; no I/O.
#
# A step of the trainer takes S seconds and B groups. While it goes on, B groups have to become ready for the next one; they
# were dispatched with the newest weights when the step before it was committed. What the trainer needs beside the groups
# that it trains on is therefore B · max(1, L / S), where L are the seconds from a group's dispatch until it is ready
# (Little's law: what is under way is the rate B / S times the time that it takes).
#
# L is above the mean m of those seconds, as they have a spread s. A batch that is sent whole waits for its slowest group:
# of B numbers from a normal distribution the largest is at most m + s √(2 ln B) on average (Boucheron, Lugosi, Massart:
# Concentration Inequalities, 2013, theorem 2.5). A trainer that is given parts of a batch begins with those that are ready,
# and slower groups have until the step's end: L = m + s, which five of six groups keep.
#
# Where rollouts are slower than the trainer, L grows with the groups under way, and the bound holds, as without this.

FIRST = 3  # steps whose groups hold a place before anything is measured
STEPS = 4  # over which the measured times are averaged
LATE = 4.0  # times as long as the slowest group of a step takes: one that the trainer waits for longer is late


class MovingMoments:
    """Mean and variance of numbers, each of which counts exponentially less with those that follow."""

    def __init__(self, memory: float):
        """`memory`: numbers that count."""
        self._share = 1 / max(1.0, memory)
        self.count = 0
        self.mean = self.variance = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        share = max(self._share, 1 / self.count)  # the plain mean, until there are more numbers than count
        gap = value - self.mean
        self.mean += share * gap
        self.variance = (1 - share) * (self.variance + share * gap * gap)


class PipelineDepth:
    """The groups that may hold a place. `bound`: that staleness allows, (η + 1) · B."""

    def __init__(self, groups_per_step: int, bound: int, measured: bool = True, streams: bool = True):
        """`measured`: False for as many as the bound allows. `streams`: the trainer is given parts of a batch."""
        self._size, self._bound, self._measured, self._streams = groups_per_step, bound, measured, streams
        self._ready = MovingMoments(STEPS * groups_per_step)  # seconds
        self._step = MovingMoments(STEPS)  # seconds
        self._spent = 0.0  # seconds on groups that were dropped, since one became ready

    def became_ready(self, seconds: float) -> None:
        """A group, so long after its dispatch."""
        self._ready.add(seconds + self._spent)
        self._spent = 0.0

    def dropped(self, seconds: float) -> None:
        """A group, whose place another takes: so much later is the next one ready."""
        self._spent += seconds

    def stepped(self, seconds: float) -> None:
        """The trainer has worked so long on a step, waits aside."""
        self._step.add(seconds)

    @property
    def target(self) -> int:
        """A few steps' groups until both times are known."""
        needed = self._ready_within(1.0) if self._streams else self.slowest
        if not self._measured:
            return self._bound
        if not self._step.mean or needed is None:
            return min(self._bound, FIRST * self._size)
        return min(self._bound, round(self._size * (1 + max(1.0, needed / self._step.mean))))

    @property
    def slowest(self) -> float | None:
        """Seconds that the slowest of a step's groups takes to be ready; None: not known yet."""
        return self._ready_within(math.sqrt(2 * math.log(self._size)))

    def _ready_within(self, deviations: float) -> float | None:
        if self._ready.count < self._size:
            return None
        return self._ready.mean + deviations * math.sqrt(self._ready.variance)


class OpenGroup(NamedTuple):
    """A dispatched group that no step has taken. `ready`: it could be."""

    deadline: int
    group_id: int
    ready: bool


def most_live(staleness: int, groups_per_step: int) -> int:
    """How many groups may hold a place."""
    return (staleness + 1) * groups_per_step


def admission_capacity(live: int, generating: int, max_in_flight: int, depth: int, remaining_groups: int) -> int:
    """How many groups may be dispatched now.

    `live`: groups that hold a place (dispatched, neither retired nor dropped). `depth`: how many may, `most_live` at most.
    `remaining_groups`: how many the run still has to dispatch in order to fill its last step.
    """
    return max(0, min(max_in_flight - generating, depth - live, remaining_groups))


def deadline(oldest_step: int, staleness: int) -> int:
    """The last step that may train on a token of version `oldest_step`."""
    return oldest_step + staleness


def select(live: Iterable[OpenGroup], step: int, places: int, groups_per_step: int, whole: bool = False) -> list[int]:
    """The group ids that `step` takes now, in order of deadline, then id: as many as can be, at most `places`.

    `live` are all open groups; `places` those that are left in `step`, all steps before it being full. With `whole` the
    answer is either `places` ids or none. Raises InvariantViolated when (1) does not hold beforehand.
    """
    taken: list[int] = []
    limit = places
    due = 0
    for last, groups in groupby(sorted(live), attrgetter("deadline")):
        for group in groups:
            due += 1
            if group.ready and len(taken) < limit:
                taken.append(group.group_id)
        limit = min(limit, _room(due, last, step, places, groups_per_step) - due + len(taken))
    return taken if len(taken) == places or not whole else []


def takeable(due_by: Mapping[int, Sequence[int]], step: int, places: int, groups_per_step: int) -> int:
    """How many groups `select` would take, given how many are open, and how many of these ready, for each deadline: there are
    at most η + 1, however many groups. Raises InvariantViolated as it does."""
    taken = due = 0
    limit = places
    for last in sorted(due_by):
        opened, ready = due_by[last]
        due += opened
        taken += min(ready, limit - taken)
        limit = min(limit, _room(due, last, step, places, groups_per_step) - due + taken)
    return taken


def _room(due: int, last: int, step: int, places: int, groups_per_step: int) -> int:
    """How many groups fit into the steps up to `last`: at least those that are `due` by then."""
    room = places + (last - step) * groups_per_step
    if last < step or due > room:
        raise InvariantViolated(f"{due} groups are due by step {last}, but from step {step} on only {max(room, 0)} fit")
    return room


def overdue(live: Iterable[OpenGroup], step: int, groups_per_step: int) -> list[int]:
    """The fewest groups to generate again so that (1) holds for the others from an empty `step` on.

    Empty in a run that goes on as it was; a resume with fewer groups per step or a smaller bound may leave some.
    """
    late: list[int] = []
    kept = 0
    for group in sorted(live):
        if step + kept // groups_per_step > group.deadline:
            late.append(group.group_id)
        else:
            kept += 1
    return late
