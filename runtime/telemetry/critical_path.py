"""Why a step took as long as it did: its wall time, by cause, along the critical path. Pure.

::

    the step before is committed                                                            this one is committed
    ├─ admit ─┼─ dispatch ─┼─ generate ────────────┼─ score | reference | value ─┼─ train ────────┼─ publish ──┤
              the group that came last: admitted   generated                     ready            applied
              given to a rollout or gateway

It is walked from its end. A version is committed once it is published, and published once the update is applied; the trainer
could complete that when the step's last group was ready, or, where it was ready before, had only itself to wait for; and that
group was ready when whoever had it was done. So the parts are as long as the step together, and what went on beside the path is
not on it: it made no step longer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from runtime.ledger.reader import GroupRow
from runtime.process.spans import CALLS, TracedSpan

ADMIT, DISPATCH, GENERATE, TRAIN, PUBLISH = "admit", "dispatch", "generate", "train", "publish"
AGAIN = "generate again"  # what was generated before was lost
MARKS = {"scored": "score", "referenced": "reference", "valued": "value"}
CALLED = {"score": "Score", "reference": "Logprobs", "value": "Values"}  # by cause: the command whose call has the group
PUBLISHED = ("receive", "await sender", "swap")
TRAINER = "trainer-0"


class PathPart(NamedTuple):
    """`start`, `end`: seconds since the epoch. `process`: who was waited for, "" where that is nobody. `group`: -1 for none."""

    cause: str
    start: float
    end: float
    process: str = ""
    group: int = -1

    @property
    def seconds(self) -> float:
        return self.end - self.start


class StepPath(Struct):
    """A step, which trained on `groups`, from the commit before it to its own; `parts` in order of time, without gaps.
    `inside`: of each part, the seconds of what its process did meanwhile, by phase."""

    step: int
    start: float
    end: float
    groups: list[int]
    parts: list[PathPart]
    inside: list[dict[str, float]] = []

    @property
    def seconds(self) -> float:
        return self.end - self.start


def paths(rows: Iterable[GroupRow]) -> list[StepPath]:
    """Of the steps that `rows` were trained in and whose versions were committed, by step. The first of all begins when its
    first group was admitted; so does one whose predecessor is not among them."""
    batches: dict[int, list[GroupRow]] = {}
    for row in rows:
        if row.step is not None and "retired" in row.times:
            batches.setdefault(row.step, []).append(row)
    found: list[StepPath] = []
    for step in sorted(batches):
        before = found[-1].end if found and found[-1].step == step - 1 else None
        found.append(path(step, batches[step], before))
    return found


def path(step: int, batch: Sequence[GroupRow], before: float | None) -> StepPath:
    """Of one step; `before`: when the version that it trains was committed."""
    start = min(row.times["admitted"] for row in batch) if before is None else before
    end = max(start, *(row.times["retired"] for row in batch))
    applied = min(end, max(start, *(row.times["consumed"] for row in batch)))
    last = max(batch, key=lambda row: row.times["ready"])
    ready = min(applied, max(start, last.times["ready"]))
    parts = [*_of_group(last, start, ready), PathPart(TRAIN, ready, applied, TRAINER), PathPart(PUBLISH, applied, end)]
    return StepPath(step, start, end, [row.group_id for row in batch], [part for part in parts if part.end > part.start])


def _of_group(row: GroupRow, start: float, end: float) -> list[PathPart]:
    """The group's own life within these times."""
    times = row.times
    mark = max(MARKS, key=lambda mark: times.get(mark, 0.0))
    turns = (  # each lasts until its time
        (ADMIT, times["admitted"], ""),
        (AGAIN if row.attempt > 1 else DISPATCH, times["generating"], ""),
        (GENERATE, times["generated"], row.replica or ""),
        (MARKS[mark], end, ""),
    )
    parts = []
    for cause, until, process in turns:
        until = min(end, max(start, until))
        parts.append(PathPart(cause, start, until, process, row.group_id))
        start = until
    return parts


# ------------------------------------------------------------------------------------------ what processes did meanwhile


class ProcessSpans:
    """The spans of each process, to be asked what lies in a stretch of time."""

    def __init__(self, spans: Mapping[str, Sequence[TracedSpan]]):
        """`spans`: by process, in any order."""
        self._spans = {process: sorted(found, key=lambda span: span.end) for process, found in spans.items()}
        self._ends = {process: [span.end for span in found] for process, found in self._spans.items()}
        self._longest = {process: max((s.end - s.start for s in found), default=0.0) for process, found in self._spans.items()}

    def within(self, process: str, start: float, end: float) -> list[TracedSpan]:
        """Those of `process` that go on at some time between `start` and `end`."""
        ends = self._ends.get(process, [])
        first, last = bisect_right(ends, start), bisect_right(ends, end + self._longest.get(process, 0.0))
        return [span for span in self._spans.get(process, [])[first:last] if span.start < end]

    def explain(self, step: StepPath) -> StepPath:
        """`step`, with who was waited for where the ledger does not know, and what they did."""
        parts = [part._replace(process=part.process or self._who(part, step.step)) for part in step.parts]
        return StepPath(step.step, step.start, step.end, step.groups, parts, [self._inside(part) for part in parts])

    def _who(self, part: PathPart, step: int) -> str:
        """The process that had the group longest, or that came last with the version."""
        latest, found = 0.0, ""
        for process in self._spans:
            for span in self.within(process, part.start, part.end):
                if part.cause == PUBLISH:
                    known = span.name in PUBLISHED and span.step == step + 1
                else:
                    known = span.line == CALLS and span.group == part.group and span.name == CALLED.get(part.cause)
                if known and span.end > latest:
                    latest, found = span.end, process
        return found

    def _inside(self, part: PathPart) -> dict[str, float]:
        seconds: dict[str, float] = {}
        for span in self.within(part.process, part.start, part.end):
            if span.line == CALLS:
                continue
            name = span.detail if span.name == "command" else span.name
            overlap = min(span.end, part.end) - max(span.start, part.start)
            seconds[name] = seconds.get(name, 0.0) + overlap
        return seconds


# ------------------------------------------------------------------------------------------ several steps


class CauseTotal(Struct):
    """What of all steps' time a cause took, and what its process did then, by phase: seconds."""

    cause: str
    process: str
    seconds: float = 0.0
    steps: int = 0
    inside: dict[str, float] = {}


def totals(steps: Sequence[StepPath]) -> list[CauseTotal]:
    """The longest first; together as long as the steps."""
    found: dict[tuple[str, str], CauseTotal] = {}
    for step in steps:
        for part, inside in zip(step.parts, step.inside or [{}] * len(step.parts), strict=True):
            total = found.setdefault((part.cause, part.process), CauseTotal(part.cause, part.process))
            total.seconds += part.seconds
            total.steps += 1
            for phase, seconds in inside.items():
                total.inside[phase] = total.inside.get(phase, 0.0) + seconds
    return sorted(found.values(), key=lambda total: -total.seconds)
