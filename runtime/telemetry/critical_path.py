"""The wall time of a step by cause, along the critical path. Pure.

::

    the step before is committed                                                           this step is committed
    ├─ admit ─┼─ dispatch ─┼─ generate ────────────┼─ score | reference | value ─┼─ train ────────┼─ publish ──┤
              the group that came last: admitted   generated                     ready            applied
              given to a rollout or gateway

The path is traced back from its end. The weight sync follows the update, the update waits for the trainer and the step's last
group, and the group for the process that works on it. So the parts sum to the step. Work beside the path made no step longer.

`probe` is the part of `train` in which the trainer waited for a rollout's probe, `restart` the time until the trainer served
again. With agents, `generate` is divided by the activities of the group's last episode: place, setup, agent, policy, tool,
agent's score, cleanup. The rest, after the episode's end, stays `generate`."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from msgspec import Struct

from runtime.ledger.reader import GroupRow
from runtime.process.spans import CALLS, EPISODES, OVERLAPPING, POLICY, STATE, TOOL, WEIGHT_SYNC, TracedSpan

ADMIT, DISPATCH, GENERATE, TRAIN, PUBLISH = "admit", "dispatch", "generate", "train", "publish"
AGAIN = "generate again"  # earlier replies were lost
RESTART = "restart"  # the run, or its trainer, was down
MARKS = {"scored": "score", "referenced": "reference", "valued": "value"}
CALLED = {"score": "Score", "reference": "Logprobs", "value": "Values"}  # by cause: the command with the group
PLACE = "place"  # of an episode before it begins
PHASES = {"run": "agent", "score": "agent's score"}  # of an episode, if the cause's name differs
# The factor of each weight sync span in the time that its process itself took.
PUBLISHED = {"gather": 1, "ReceiveWeights": 1, "await sender": -1, "CommitWeights": 1}
WEIGHT_SYNC_PHASES = ("gather", "wait", "copy", "hash", "stage")
PROBE = "probe"  # the update waits until a probe has checked every rollout's weights
TRAINER, COORDINATOR = "trainer-0", "coordinator"
SERVING = "serving"  # the state of a working process


class PathPart(NamedTuple):
    """A part of a step. `start`, `end`: seconds since the epoch. `process`: awaited, "" for none. `group`: -1 for none."""

    cause: str
    start: float
    end: float
    process: str = ""
    group: int = -1

    @property
    def seconds(self) -> float:
        return self.end - self.start


class StepPath(Struct):
    """A step that trained on `groups`. `parts`: from commit to commit, without gaps. `inside`: their processes' phases."""

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
    """Return the paths of the committed steps, by step. One without its predecessor begins at its first group's admission."""
    batches: dict[int, list[GroupRow]] = {}
    for row in rows:
        if row.step is not None and "retired" in row.times:
            batches.setdefault(row.step, []).append(row)
    found: dict[int, StepPath] = {}
    for step, batch in sorted(batches.items()):
        found[step] = path(step, batch, found[step - 1].end if step - 1 in found else None)
    return list(found.values())


def path(step: int, batch: Sequence[GroupRow], before: float | None) -> StepPath:
    """Return the path of one step. `before`: the commit time of the version that the step trains."""
    start = min(row.times["admitted"] for row in batch) if before is None else before
    end = max(start, *(row.times["retired"] for row in batch))
    applied = min(end, max(start, *(row.times["consumed"] for row in batch)))
    last = max(batch, key=lambda row: row.times["ready"])
    ready = min(applied, max(start, last.times["ready"]))
    parts = [*_of_group(last, start, ready), PathPart(TRAIN, ready, applied, TRAINER), PathPart(PUBLISH, applied, end)]
    return StepPath(step, start, end, [row.group_id for row in batch], [part for part in parts if part.end > part.start])


def _of_group(row: GroupRow, start: float, end: float) -> list[PathPart]:
    times = row.times
    mark = max(MARKS, key=lambda mark: times.get(mark, 0.0))
    turns = (  # each with its end
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


def conversation(part: PathPart, spans: Iterable[TracedSpan]) -> list[PathPart]:
    """Divide `part`, a group's generation, by the activities of its last episode. `spans`: of its episodes, in any order."""
    phases = [span for span in spans if span.name not in (POLICY, TOOL)]
    if not phases:
        return [part]
    last = max(phases, key=lambda span: span.end)
    index, _, player = last.detail.partition(" ")
    own = [span for span in spans if span.detail.partition(" ")[0] == index]
    cuts = {min(part.end, max(part.start, time)) for span in own for time in (span.start, span.end)}
    parts: list[PathPart] = []
    waiting, at = sorted(own, key=lambda span: span.start, reverse=True), list[TracedSpan]()
    for start, end in pairwise(sorted(cuts | {part.start, part.end})):
        while waiting and waiting[-1].start <= start:
            at.append(waiting.pop())
        at = [span for span in at if span.end >= end]
        one = part._replace(start=start, end=end)
        if at:
            span = max(at, key=lambda span: (span.name == POLICY, span.name == TOOL, span.end))
            one = one._replace(cause=PHASES.get(span.name, span.name), process=span.detail.partition(" ")[2])
        elif end <= last.end:
            one = one._replace(cause=PLACE, process=player)
        if parts and (parts[-1].cause, parts[-1].process) == (one.cause, one.process):
            one = one._replace(start=parts.pop().start)
        parts.append(one)
    return parts


class ProcessSpans:
    """The spans of each process, with queries by time."""

    def __init__(self, spans: Mapping[str, Sequence[TracedSpan]]):
        """Index the `spans`: by process, in any order. Leaves out states, which may last as long as a run."""
        chosen = {process: [span for span in found if not span.line.startswith(STATE)] for process, found in spans.items()}
        states = [span for span in spans.get(COORDINATOR, ()) if span.line == STATE + TRAINER]
        self._absent = [span for span in states if span.name != SERVING]
        self._spans = {process: sorted(found, key=lambda span: span.end) for process, found in chosen.items()}
        self._ends = {process: [span.end for span in found] for process, found in self._spans.items()}
        self._longest = {process: max((s.end - s.start for s in found), default=0.0) for process, found in self._spans.items()}

    def within(self, process: str, start: float, end: float) -> list[TracedSpan]:
        """Return the spans of `process` that overlap `start` to `end`."""
        ends = self._ends.get(process, [])
        first, last = bisect_right(ends, start), bisect_right(ends, end + self._longest.get(process, 0.0))
        return [span for span in self._spans.get(process, [])[first:last] if span.start < end]

    def explain(self, step: StepPath) -> StepPath:
        """Return `step` with the awaited processes that the ledger does not know, and with the phases of all processes."""
        parts = [each for part in self._restarted(step) for each in self._cut(part)]
        parts = [part._replace(process=part.process or self._who(part, step.step)) for part in parts]
        return StepPath(step.step, step.start, step.end, step.groups, parts, [self._inside(part) for part in parts])

    def _restarted(self, step: StepPath) -> list[PathPart]:
        """Return the step's parts, with one part for the time before the trainer's last start."""
        back = max((span.end for span in self._absent if step.start < span.end <= step.end), default=step.start)
        first = PathPart(RESTART, step.start, back)
        parts = [first, *(part._replace(start=max(part.start, back)) for part in step.parts)]
        return [part for part in parts if part.end > part.start]

    def _cut(self, part: PathPart) -> list[PathPart]:
        if part.cause == TRAIN:
            return self._probed(part)
        if part.cause != GENERATE:
            return [part]
        found = self.within(part.process, part.start, part.end)
        return conversation(part, [span for span in found if span.line == EPISODES and span.group == part.group])

    def _probed(self, part: PathPart) -> list[PathPart]:
        """Divide the trainer's `part`: split off the times in which the trainer was idle, waiting for a rollout's probe."""
        reported = self.within(COORDINATOR, part.start, part.end)
        worked = [span for span in self.within(TRAINER, part.start, part.end) if span.line not in OVERLAPPING]
        parts, left = [], part
        for wait in sorted(span for span in reported if span.name == span.line == PROBE):
            end = min(part.end, wait.end)
            start = max([left.start, wait.start, *(min(span.end, end) for span in worked if span.start < end)])
            answers = [span for span in reported if span.name == PROBE and span.line == CALLS and start < span.end <= wait.end]
            if answers and start < end:
                last = max(answers, key=lambda span: span.end)
                parts += [left._replace(end=start), PathPart(PROBE, start, end, last.detail)]
                left = left._replace(start=end)
        return [each for each in (*parts, left) if each.end > each.start]

    def _who(self, part: PathPart, step: int) -> str:
        """Return the process that had the group last; for a weight sync the process that took longest."""
        found: dict[str, float] = {}
        for process in self._spans:
            for span in self.within(process, part.start, part.end):
                if part.cause == PUBLISH and span.name in PUBLISHED and span.step == step + 1:
                    seconds = min(span.end, part.end) - max(span.start, part.start)
                    found[process] = found.get(process, 0.0) + PUBLISHED[span.name] * seconds
                elif span.line == CALLS and span.group == part.group and span.name == CALLED.get(part.cause):
                    found[process] = max(found.get(process, 0.0), span.end)
        return max(found, key=lambda process: found[process], default="")

    def _inside(self, part: PathPart) -> dict[str, float]:
        seconds: dict[str, float] = {}
        for span in self.within(part.process, part.start, part.end):
            name = "" if span.line in (CALLS, EPISODES) else span.detail if span.name == "command" else span.name
            if part.cause == PUBLISH:  # the weight sync's phases, as their metrics are named; a swap waits for the decode step
                name = span.name if span.line == WEIGHT_SYNC and span.name in WEIGHT_SYNC_PHASES else ""
                name = "swap" if (span.line, span.name) == (CALLS, "CommitWeights") else name
            if name:
                seconds[name] = seconds.get(name, 0.0) + (min(span.end, part.end) - max(span.start, part.start))
        return seconds


class CauseTotal(Struct):
    """The seconds of all steps that a cause took, and the seconds of its process's phases."""

    cause: str
    process: str
    seconds: float = 0.0
    steps: int = 0
    inside: dict[str, float] = {}


def totals(steps: Sequence[StepPath]) -> list[CauseTotal]:
    """Sum the parts of all steps by cause, longest first. The sums add up to the steps' time."""
    found: dict[tuple[str, str], CauseTotal] = {}
    for step in steps:
        for cause in dict.fromkeys((part.cause, part.process) for part in step.parts):
            found.setdefault(cause, CauseTotal(*cause)).steps += 1
        for part, inside in zip(step.parts, step.inside or [{}] * len(step.parts), strict=True):
            total = found[part.cause, part.process]
            total.seconds += part.seconds
            for phase, seconds in inside.items():
                total.inside[phase] = total.inside.get(phase, 0.0) + seconds
    return sorted(found.values(), key=lambda total: -total.seconds)
