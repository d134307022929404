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

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from runtime.errors import InvariantViolated


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
