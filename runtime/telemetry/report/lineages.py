"""Which of the logged points count, where a run went back to a checkpoint and did steps again. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Point = Mapping[str, Any]

STEP_ENDED = "timing/all"  # in every point of a training step, and in no evaluation's


@dataclass
class RecordedLineage:
    """Training steps `first` to `last` (numbers of steps done) without a return to a checkpoint; `times` in seconds since the
    epoch. Steps after `kept` were done again by a later lineage; `kept` < `first` when none of them is left."""

    incarnation: int
    first: int
    last: int
    kept: int
    times: tuple[float, float]


@dataclass(frozen=True)
class LoggedHistory:
    """What came to be of a run. `steps` and `evaluations` are points by step, in order; `done_again` counts the steps of
    `lineages` that are not among them."""

    steps: list[Point] = field(default_factory=list)
    evaluations: list[Point] = field(default_factory=list)
    lineages: list[RecordedLineage] = field(default_factory=list)

    @property
    def done_again(self) -> int:
        return sum(lineage.last - max(lineage.kept, lineage.first - 1) for lineage in self.lineages)

    @property
    def returns(self) -> list[int]:
        """The steps after which a later lineage went on."""
        return [lineage.first - 1 for lineage in self.lineages[1:]]


def history(points: Sequence[Point]) -> LoggedHistory:
    """`points` as they were logged. A lineage begins where the incarnation changes, or where steps are counted back."""
    lineages: list[RecordedLineage] = []
    steps: dict[int, Point] = {}
    evaluations: dict[int, Point] = {}
    for point in points:
        step, time = point["step"], point.get("time", 0.0)
        if STEP_ENDED not in point:
            evaluations[step] = point
            continue
        newest = lineages[-1] if lineages else None
        incarnation = int(point.get("incarnation") or 0) if newest is None or "incarnation" in point else newest.incarnation
        if newest is None or step <= newest.last or incarnation != newest.incarnation:
            for earlier in lineages:
                earlier.kept = min(earlier.kept, step - 1)
            steps = {done: kept for done, kept in steps.items() if done < step}
            evaluations = {done: kept for done, kept in evaluations.items() if done < step}
            number = incarnation if newest is None or incarnation != newest.incarnation else newest.incarnation + 1
            newest = RecordedLineage(number, step, step, step, (time, time))
            lineages.append(newest)
        newest.last = newest.kept = step
        newest.times = (newest.times[0], time)
        steps[step] = point
    return LoggedHistory([steps[step] for step in sorted(steps)], [evaluations[step] for step in sorted(evaluations)], lineages)
