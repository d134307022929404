"""`sluice why`: what the steps of a run waited for, from the run's ledger and its processes' spans; `sluice trace`: a trace."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from rich.console import Console

from runtime import run_files
from runtime.errors import UserError
from runtime.ledger.reader import LedgerReader
from runtime.process.spans import CALLS, OVERLAPPING, TracedSpan
from runtime.telemetry import critical_path
from runtime.telemetry.critical_path import TRAINER, CauseTotal, ProcessSpans, StepPath
from runtime.telemetry.record import SpanFolder
from runtime.telemetry.shown import LiteralTable, say

N = TypeVar("N", int, float)


def range_of(option: str, text: str | None, kind: Callable[[str], N], most: N) -> tuple[N, N] | None:
    """Return both ends of `a:b`, or a value twice; `most` for an end left out. None without the option. Raises UserError."""
    if text is None:
        return None
    low, colon, high = text.partition(":")
    try:
        if not colon:
            return kind(low), kind(low)
        bounds = (kind(low) if low else -most), (kind(high) if high else most)
    except ValueError:
        raise UserError(f"{option}: {text!r} is neither a number nor a range a:b") from None
    if bounds[0] > bounds[1]:
        raise UserError(f"{option}: {text!r} ends before it begins; a range is a:b, with a at most b")
    return bounds


MOST_STEPS = 1 << 62
SLOWEST = 5  # steps that are shown one by one
INSIDE = 5  # phases of a process that are shown
LEAST = 0.005  # share of the time from which on a cause is shown
CAUSES = msgspec.yaml.decode(Path(__file__).with_name("causes.yaml").read_bytes(), type=dict[str, tuple[str, str]])


def run(options: argparse.Namespace) -> None:
    """Print what the steps waited for. Raises UserError if the folder holds no run, or no such step was made."""
    found = explained(options.run, options.steps)
    if options.json:
        print(json.dumps(msgspec.to_builtins({"steps": found, "totals": critical_path.totals(found)})))
        return
    console = Console()
    seconds = sum(step.seconds for step in found)
    say(console, f"{len(found)} steps, {found[0].step} to {found[-1].step}, {seconds:.1f} s: {verdict(found)}")
    whole = [total for total in critical_path.totals(found) if total.seconds >= LEAST * seconds]
    waits = LiteralTable(
        *("waited for", "by", "seconds", "share", "steps", "which meanwhile was at"), title="what the steps waited for"
    )
    for total in whole:
        share, number = f"{total.seconds / seconds:.0%}", str(total.steps)
        waits.add_row(total.cause, total.process, f"{total.seconds:.2f}", share, number, _inside(total))
    console.print(waits)
    causes = LiteralTable("waited for", "what that is", "what changes it", title="what that means")
    for cause in dict.fromkeys(total.cause for total in whole):
        causes.add_row(cause, *CAUSES[cause])
    console.print(causes)
    console.print(_slowest(found))


Spans = Mapping[str, Sequence[TracedSpan]]


def explained(folder: Path, steps: str | None = None, spans: Callable[[], Spans] | None = None) -> list[StepPath]:
    """Return the critical path of each step. `spans`: reads the run's spans, if the caller has them."""
    wanted = range_of("--steps", steps, int, MOST_STEPS)
    with LedgerReader(folder / run_files.LEDGER) as reader:
        before = None if wanted is None else (max(0, wanted[0] - 1), wanted[1])  # its end is the first step's beginning
        found = critical_path.paths(reader.groups(steps=before))
    found = [step for step in found if wanted is None or step.step >= wanted[0]]
    if not found:
        raise UserError(f"{folder}: no step was made" + (f" of --steps {steps}" if steps else " yet"))
    every = (spans or SpanFolder(folder).by_process)()
    start = found[0].start
    index = ProcessSpans({process: [span for span in own if span.end > start] for process, own in every.items()})
    return [index.explain(step) for step in found]


def verdict(steps: Sequence[StepPath]) -> str:
    """Return a sentence on what the steps waited for most, and how long they waited for that process in all."""
    totals = critical_path.totals(steps)
    if not totals:  # the clock was put back
        return "they took no time"
    first, whole = totals[0], sum(step.seconds for step in steps)
    process = f" by {first.process}" if first.process else ""
    most = f"{first.seconds / whole:.0%} of the time went to {first.cause}{process} – {CAUSES[first.cause][0]}"
    others = sum(total.seconds for total in totals[1:] if total.process == first.process and first.process)
    return most if others < 2 * LEAST * whole else f"{most}; in all {(first.seconds + others) / whole:.0%} to {first.process}"


def _inside(total: CauseTotal) -> str:
    phases = sorted(total.inside.items(), key=lambda phase: -phase[1])[:INSIDE]
    return ", ".join(f"{name} {seconds / total.seconds:.0%}" for name, seconds in phases if seconds >= LEAST * total.seconds)


def _slowest(steps: Sequence[StepPath]) -> LiteralTable:
    table = LiteralTable("step", "seconds", "group", "its time", title="the slowest steps")
    for step in sorted(steps, key=lambda step: -step.seconds)[:SLOWEST]:
        group = next((part.group for part in step.parts if part.group >= 0), None)
        causes = [total for total in critical_path.totals([step]) if total.seconds >= LEAST * step.seconds]
        parts = ", ".join(f"{total.cause} {total.process} {total.seconds:.2f}".replace("  ", " ") for total in causes)
        table.add_row(str(step.step), f"{step.seconds:.2f}", "" if group is None else str(group), parts)
    return table


# ---- sluice trace
#
# A run as a trace of Chrome's format, for Perfetto, chrome://tracing and others. A process of the trace is a process of the
# run, with a thread for each line of spans, or several where spans overlap. The process "steps" has the critical paths. A flow
# follows a group from generation to the step that trains on it. Times are in microseconds from the first event on, as "Trace
# Event Format" (Google, 2016) says.

FILE = "trace.json"
STEPS = "steps"

Event = dict[str, Any]


def run_trace(options: argparse.Namespace) -> None:
    print(trace(options.run, options.steps, options.output))


def trace(folder: Path, steps: str | None, output: Path | None) -> Path:
    """Write the trace and return its path. Raises UserError as `sluice why` does, or if the file cannot be written."""
    spans = SpanFolder(folder).by_process()
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
