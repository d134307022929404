"""`sluice why`: what the steps of a run waited for, from the run's ledger and its processes' spans."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from rich.console import Console

from runtime import run_files
from runtime.errors import UserError
from runtime.ledger.reader import LedgerReader
from runtime.process.spans import SpanFolder, TracedSpan
from runtime.telemetry import critical_path
from runtime.telemetry.critical_path import CauseTotal, ProcessSpans, StepPath
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


def by_process(folder: Path) -> Spans:
    files = SpanFolder(folder)
    files.follow()
    return files.by_process()


def explained(folder: Path, steps: str | None = None, spans: Callable[[], Spans] | None = None) -> list[StepPath]:
    """Return the critical path of each step. `spans`: reads the run's spans, if the caller has them."""
    wanted = range_of("--steps", steps, int, MOST_STEPS)
    with LedgerReader(folder / run_files.LEDGER) as reader:
        before = None if wanted is None else (max(0, wanted[0] - 1), wanted[1])  # its end is the first step's beginning
        found = critical_path.paths(reader.groups(steps=before))
    found = [step for step in found if wanted is None or step.step >= wanted[0]]
    if not found:
        raise UserError(f"{folder}: no step was made" + (f" of --steps {steps}" if steps else " yet"))
    every = by_process(folder) if spans is None else spans()
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
