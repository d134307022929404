"""Each process over time, as far as a screen can show it. Pure, but for the spans that it is given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from msgspec import Struct

from runtime.process.spans import CALLS, OVERLAPPING, TracedSpan

DENSE = "…"  # the name of what is too short to be seen one by one
ROWS = 3  # of calls that overlap; where there are more at once, the last row has them over each other


class LaneSlice(NamedTuple):
    """`start`, `end`: seconds from the window's start. `number`: of spans that are one here."""

    name: str
    start: float
    end: float
    group: int
    step: int
    detail: str
    number: int


class Lane(Struct):
    """What one line of a process was at; `depth`: which of the rows that overlapping calls need."""

    process: str
    line: str
    depth: int
    slices: list[LaneSlice]


def lanes(spans: Mapping[str, Sequence[TracedSpan]], start: float, end: float, pixels: int) -> list[Lane]:
    """Of what went on between `start` and `end`, seconds since the epoch. Spans below a pixel's width that follow each other
    are one, so that no lane has more than twice as many slices as there are pixels."""
    least = (end - start) / max(1, pixels)
    found = []
    for process in sorted(spans):
        rows: dict[tuple[str, int], list[TracedSpan]] = {}
        free: dict[tuple[str, int], float] = {}
        for span in sorted(spans[process], key=lambda span: span.start):
            if span.end <= start or span.start >= end:
                continue
            depth = 0
            while span.line in OVERLAPPING and depth < ROWS - 1 and free.get((span.line, depth), 0.0) > span.start:
                depth += 1
            free[span.line, depth] = span.end
            rows.setdefault((span.line, depth), []).append(span)
        for (line, depth), row in sorted(rows.items(), key=lambda one: (one[0][0] == CALLS, one[0])):
            found.append(Lane(process, line, depth, _thinned(row, start, end, least)))
    return found


def epochs(points: Sequence[Mapping[str, Any]]) -> list[TracedSpan]:
    """Of the rollouts' membership, one after the other, with how many were lost; as the steps' figures tell."""
    points = [point for point in points if point.get("time") is not None]
    found: list[TracedSpan] = []
    for before, point in pairwise(points):
        name = f"epoch {point.get('publication/epoch', 0):.0f}"
        lost = f"lost: {lost:.0f}" if (lost := point.get("rollout/lost", 0.0)) else ""
        if found and found[-1].name == name and not lost:
            found[-1] = found[-1]._replace(end=point["time"])
        else:
            found.append(TracedSpan(name, before["time"], point["time"], step=int(point["step"]), detail=lost))
    return found


def _thinned(row: Iterable[TracedSpan], start: float, end: float, least: float) -> list[LaneSlice]:
    found: list[LaneSlice] = []
    for span in row:
        low, high = max(span.start, start) - start, min(span.end, end) - start
        newest = found[-1] if found else None
        if newest is not None and high - low < least and newest.end - newest.start < least and low - newest.end < least:
            name = newest.name if newest.name == span.name else DENSE
            found[-1] = LaneSlice(name, newest.start, high, -1, -1, "", newest.number + 1)
        else:
            found.append(LaneSlice(span.name, low, high, span.group, span.step, span.detail, 1))
    return found
