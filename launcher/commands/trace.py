"""`sluice trace`: a run as a trace of Chrome's format, for Perfetto, chrome://tracing and others.

A process of the trace is a process of the run, with a thread for each line of spans, or several where spans overlap. The
process "steps" has the critical paths. A flow follows a group from generation to the step that trains on it. Times are in
microseconds from the first event on, as "Trace Event Format" (Google, 2016) says.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from launcher.commands.why import by_process, explained
from runtime.errors import UserError
from runtime.process.spans import CALLS, OVERLAPPING, TracedSpan
from runtime.telemetry.critical_path import TRAINER, StepPath

FILE = "trace.json"
STEPS = "steps"

Event = dict[str, Any]


def run(options: argparse.Namespace) -> None:
    print(trace(options.run, options.steps, options.output))


def trace(folder: Path, steps: str | None, output: Path | None) -> Path:
    """Write the trace and return its path. Raises UserError as `sluice why` does, or if the file cannot be written."""
    spans = by_process(folder)
    found = explained(folder, steps, lambda: spans)
    path = output or folder / FILE
    made = {"displayTimeUnit": "ms", "traceEvents": list(events(found, spans))}
    try:
        path.write_bytes(msgspec.json.encode(made) + b"\n")
    except OSError as error:
        raise UserError(f"--output: cannot write {path}: {(error.strerror or str(error)).lower()}") from error
    return path


def events(steps: Sequence[StepPath], spans: Mapping[str, Sequence[TracedSpan]]) -> Iterator[Event]:
    begin, end = steps[0].start, steps[-1].end
    shown = {name: [span for span in spans[name] if span.end > begin and span.start < end] for name in sorted(spans)}
    origin = min([begin, *(span.start for found in shown.values() for span in found)])
    yield from _named(0, STEPS, {0: "critical path"})
    for step in steps:
        for part in step.parts:
            arguments = {"step": step.step, "group": part.group, "process": part.process}
            yield _slice(f"{part.cause} {part.process}".strip(), (part.start - origin, part.end - origin), (0, 0), arguments)
    flows: dict[int, list[Event]] = {}
    applied: set[int] = set()
    for pid, (process, within) in enumerate(shown.items(), start=1):
        threads: dict[tuple[str, int], int] = {}
        placed = [(threads.setdefault(row, len(threads)), span) for row, span in in_rows(within, len(within))]
        yield from _named(pid, process, {number: line for (line, _), number in threads.items()})
        for thread, span in placed:
            arguments = {name: value for name, value in (("group", span.group), ("step", span.step)) if value >= 0}
            arguments |= {"detail": span.detail} if span.detail else {}
            yield (one := _slice(span.name, (span.start - origin, span.end - origin), (pid, thread), arguments))
            if span.line == CALLS and span.group >= 0:
                flows.setdefault(span.group, []).append(one)
            elif process == TRAINER and span.name == "command" and span.detail == "Apply":
                middle = (span.start + span.end) / 2
                groups = {group for step in steps if step.start <= middle < step.end for group in step.groups}
                for group in groups - applied:  # phases cut "Apply" into pieces
                    flows.setdefault(group, []).append(one)
                    applied.add(group)
    for group, slices in flows.items():
        yield from _flow(group, sorted(slices, key=_middle))


def in_rows(spans: Iterable[TracedSpan], most: int) -> Iterator[tuple[tuple[str, int], TracedSpan]]:
    """Yield each span with its line and its row there. Spans of a line that overlap go to the first free of `most` rows."""
    free: dict[tuple[str, int], float] = {}
    for span in sorted(spans, key=lambda span: span.start):
        row = 0
        while span.line in OVERLAPPING and row < most - 1 and free.get((span.line, row), 0.0) > span.start:
            row += 1
        free[span.line, row] = span.end
        yield (span.line, row), span


def _slice(name: str, times: tuple[float, float], place: tuple[int, int], arguments: Mapping[str, Any]) -> Event:
    start, end = (round(1e6 * each, 1) for each in times)
    pid, tid = place
    place_of = {"pid": pid, "tid": tid, "ts": start, "dur": end - start}
    return {"ph": "X", "name": name, "cat": "sluice", **place_of, "args": dict(arguments)}


def _named(pid: int, process: str, threads: Mapping[int, str]) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": process}}
    for tid, name in threads.items():
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}


def _middle(one: Event) -> float:
    middle: float = one["ts"] + one["dur"] / 2
    return middle


def _flow(group: int, slices: Sequence[Event]) -> Iterator[Event]:
    """Yield arrows from each slice to the next."""
    for at, one in enumerate(slices if len(slices) > 1 else ()):
        phase = "s" if at == 0 else "f" if at == len(slices) - 1 else "t"
        arrow = {"ph": phase, "id": group, "name": "group", "cat": "group", "pid": one["pid"], "tid": one["tid"]}
        yield {**arrow, "ts": _middle(one), **({"bp": "e"} if phase == "f" else {})}
