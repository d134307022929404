"""Bounded staleness: how many groups may be under way, and which groups a step may take. Pure arithmetic.

**The rule.** A step may train on a group only if the version of the group's oldest token + η ≥ the step's number. So no
token is more than η versions older than the weights that it trains.

`Buffer` enforces the rule: `capacity` admits groups, `generated` refuses a group with a token older than its dispatch allows,
`take` selects groups, and `consume` ends the run if an applied step has broken the rule. Deadlines are step numbers here.

Terms. Step v trains the weights of version v and makes version v + 1. c is the committed version, η the bound, B the
groups per step. A group *holds a place* from its dispatch until it is retired (when the version that it trained commits) or
dropped. A group is *open* while no step has taken it. Its deadline is the last step that may take it: the version of its
oldest token + η. Until it arrives, the version committed at its dispatch bounds this from below, so deadlines only move later.

**The invariant.** Let v be the next step with room and r ≥ 1 its open places. For every d ≥ v::

    U(d) ≤ r + (d − v)·B          U(d): open groups with a deadline ≤ d                          (1)

The right side is how many groups the steps v … d can still take. By (1), taking the earliest deadline first meets every
deadline. By (1) at d = v, no group is overdue: v − version of the oldest token ≤ η, exactly. `admission_capacity` and `select`
keep (1); docs/adr/training.md has the proof. No group starves, and none is dropped for being slow: step d at the latest takes a
group with deadline d. A step that can take no group waits for one in generation, which depends on no step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from runtime.errors import InvariantViolated

# ---- Depth
#
# How many groups hold a place at once: as many as keep the trainer busy by measured times, if that is fewer than the staleness
# bound allows (ADR 35). A step of the trainer takes S seconds and B groups, while B groups have to become ready for the next
# one. So beside the groups of the current step it needs B · max(1, L / S) groups, where L is the time from a group's dispatch
# until it is ready (Little's law).
#
# These times have the mean m and the standard deviation s. A batch that is sent whole waits for its slowest group: the largest
# of B numbers from a normal distribution is at most m + s √(2 ln B) on average (Boucheron, Lugosi, Massart: Concentration
# Inequalities, 2013, theorem 2.5). A trainer that gets parts begins with the ready groups: L = m + s, which five of six meet.

FIRST = 3  # steps whose groups hold a place before the times are measured
STEPS = 4  # over which the measured times are averaged
LATE = 4.0  # a group is late if the trainer waits for it longer than this factor times the slowest group of a step


class MovingMoments:
    """Mean and variance of numbers, with exponentially smaller weights for older numbers."""

    def __init__(self, memory: float):
        """Create without numbers. `memory`: about how many numbers count."""
        self._share = 1 / max(1.0, memory)
        self.count = 0
        self.mean = self.variance = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        share = max(self._share, 1 / self.count)  # the plain mean until `memory` numbers are there
        gap = value - self.mean
        self.mean += share * gap
        self.variance = (1 - share) * (self.variance + share * gap * gap)


class PipelineDepth:
    """The number of groups that may hold a place. `bound`: the most that staleness allows, (η + 1) · B."""

    def __init__(self, groups_per_step: int, bound: int, measured: bool = True, streams: bool = True):
        """Create the depth. `measured`: False always allows `bound`. `streams`: the trainer gets parts of a batch."""
        self._size, self._bound, self._measured, self._streams = groups_per_step, bound, measured, streams
        self._ready = MovingMoments(STEPS * groups_per_step)  # seconds
        self._step = MovingMoments(STEPS)  # seconds
        self._spent = 0.0  # seconds spent on dropped groups since a group last became ready

    def became_ready(self, seconds: float) -> None:
        """Record that a group became ready `seconds` after its dispatch."""
        self._ready.add(seconds + self._spent)
        self._spent = 0.0

    def dropped(self, seconds: float) -> None:
        """Record a dropped group: the next group becomes ready later by `seconds`."""
        self._spent += seconds

    def stepped(self, seconds: float) -> None:
        """Record the trainer's working time for one step, without waits."""
        self._step.add(seconds)

    @property
    def target(self) -> int:
        """The number of groups that may hold a place: `FIRST` steps' groups until both times are known."""
        needed = self._ready_within(1.0) if self._streams else self.slowest
        if not self._measured:
            return self._bound
        if not self._step.mean or needed is None:
            return min(self._bound, FIRST * self._size)
        return min(self._bound, round(self._size * (1 + max(1.0, needed / self._step.mean))))

    @property
    def slowest(self) -> float | None:
        """Seconds until the slowest group of a step is ready; None: not known yet."""
        return self._ready_within(math.sqrt(2 * math.log(self._size)))

    def _ready_within(self, deviations: float) -> float | None:
        if self._ready.count < self._size:
            return None
        return self._ready.mean + deviations * math.sqrt(self._ready.variance)


class OpenGroup(NamedTuple):
    """A dispatched group that no step has taken. `ready`: a step could take it."""

    deadline: int
    group_id: int
    ready: bool


def most_live(staleness: int, groups_per_step: int) -> int:
    """Return how many groups may hold a place."""
    return (staleness + 1) * groups_per_step


def admission_capacity(live: int, generating: int, max_in_flight: int, depth: int, remaining_groups: int) -> int:
    """Return how many groups may be dispatched now. `live`: groups that hold a place. `depth`: how many may hold one, at most
    `most_live`. `remaining_groups`: how many groups the run still has to dispatch to fill its last step."""
    return max(0, min(max_in_flight - generating, depth - live, remaining_groups))


def deadline(oldest_step: int, staleness: int) -> int:
    """Return the last step that may train on a token of version `oldest_step`."""
    return oldest_step + staleness


def select(live: Iterable[OpenGroup], step: int, places: int, groups_per_step: int, whole: bool = False) -> list[int]:
    """Return the group ids that `step` takes now, in order of deadline, then id: as many as possible, at most `places`, its
    room. With `whole`, `places` ids or none. Raises InvariantViolated if (1) does not hold beforehand."""
    ordered = sorted(live)
    opened, ready = Counter(group.deadline for group in ordered), Counter(group.deadline for group in ordered if group.ready)
    count = takeable({last: (opened[last], ready[last]) for last in opened}, step, places, groups_per_step)
    taken = [group.group_id for group in ordered if group.ready][:count]
    return taken if count == places or not whole else []


def takeable(due_by: Mapping[int, Sequence[int]], step: int, places: int, groups_per_step: int) -> int:
    """Return how many groups `select` takes. `due_by` has the numbers of open and of ready groups for each deadline; there are
    at most η + 1 deadlines. Raises InvariantViolated if more groups are due by a step than fit into the steps up to it."""
    taken = due = 0
    limit = places
    for last in sorted(due_by):
        opened, ready = due_by[last]
        due += opened
        room = places + (last - step) * groups_per_step
        if last < step or due > room:
            raise InvariantViolated(f"{due} groups are due by step {last}, but from step {step} on only {max(room, 0)} fit")
        taken += min(ready, limit - taken)
        limit = min(limit, room - due + taken)
    return taken


def overdue(live: Iterable[OpenGroup], step: int, groups_per_step: int) -> list[int]:
    """Return the fewest groups to generate again so that (1) holds for the other groups from an empty `step` on. A smaller
    `groups_per_step` or bound than before may make groups overdue."""
    late: list[int] = []
    kept = 0
    for group in sorted(live):
        if step + kept // groups_per_step > group.deadline:
            late.append(group.group_id)
        else:
            kept += 1
    return late
