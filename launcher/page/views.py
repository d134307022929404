"""The data for the page's views of a run, except samples."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import psutil
import yaml
from msgspec import Struct

from launcher import run_folder
from launcher.commands import why
from launcher.commands.why import in_rows
from launcher.page import panels
from runtime import run_files
from runtime.config import Config, Run
from runtime.config.secret_values import without_secrets
from runtime.config.yaml_text import flat, read_texts
from runtime.errors import UserError
from runtime.evaluation import results as evaluation
from runtime.ledger.reader import DATABASE, LedgerReader
from runtime.ledger.states import Phase
from runtime.process.spans import CALLS, WEIGHT_SYNC, SpanHeader, TracedSpan
from runtime.telemetry import critical_path, record
from runtime.telemetry.record import LoggedHistory, RunRecord, SpanFolder
from runtime.telemetry.summary import Summary

# ---- Lanes: each process over time, at the resolution of a screen

DENSE = "…"  # the name of several spans that are too short to draw
ROWS = 3  # of overlapping calls; further calls overlap in the last row


class LaneSlice(NamedTuple):
    """`start`, `end`: seconds from the window's start. `number`: of the spans that it joins."""

    name: str
    start: float
    end: float
    group: int
    step: int
    detail: str
    number: int


class Lane(Struct):
    """The slices of one line of a process. `depth`: its row, as overlapping calls need several."""

    process: str
    line: str
    depth: int
    slices: list[LaneSlice]


def lanes(spans: Mapping[str, Sequence[TracedSpan]], start: float, end: float, pixels: int) -> list[Lane]:
    """Return the lanes between two times since the epoch. Join spans below a pixel's width: at most two slices a pixel."""
    least = (end - start) / max(1, pixels)
    found = []
    for process in sorted(spans):
        rows: dict[tuple[str, int], list[TracedSpan]] = {}
        seen = (span for span in spans[process] if span.end > start and span.start < end)
        for place, span in in_rows(seen, ROWS):
            rows.setdefault(place, []).append(span)
        for (line, depth), row in sorted(rows.items(), key=lambda one: (one[0][0] == CALLS, one[0])):
            found.append(Lane(process, line, depth, _thinned(row, start, end, least)))
    return found


def epochs(points: Sequence[Mapping[str, Any]]) -> list[TracedSpan]:
    """Return the epochs of the rollouts' membership from the steps' figures, with the number of lost rollouts."""
    points = [point for point in points if point.get("time") is not None]
    found: list[TracedSpan] = []
    for before, point in pairwise(points):
        name = f"epoch {point.get('weight_sync/epoch', 0):.0f}"
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


# ---- Changes in a run's folder, by the sizes and times of its files

Mark = tuple[int, int]  # bytes, nanoseconds since the epoch

_FILES = {
    "metrics": (run_files.METRICS,),
    "ledger": (f"{run_files.LEDGER}/{DATABASE}", f"{run_files.LEDGER}/{DATABASE}-wal"),
    "state": (run_files.ADDRESS, run_files.SUMMARY, run_files.STARTUP, run_files.CONFIG),
}
_FOLDERS = {"spans": run_files.SPANS, "evaluations": run_files.EVALUATIONS, "logs": run_files.LOGS}


def marks(folder: Path) -> dict[str, tuple[Mark, ...]]:
    """Return the marks by kind of file. A missing file has none."""
    found = {kind: tuple(of_files(folder / name for name in names)) for kind, names in _FILES.items()}
    return found | {kind: tuple(of_files(sorted((folder / name).glob("*")))) for kind, name in _FOLDERS.items()}


def of_files(paths: Iterable[Path]) -> Iterator[Mark]:
    for path in paths:
        with suppress(OSError):
            found = path.stat()
            yield found.st_size, found.st_mtime_ns


def changed(before: dict[str, tuple[Mark, ...]], after: dict[str, tuple[Mark, ...]]) -> list[str]:
    return [kind for kind in after if before.get(kind) != after[kind]]


STATIC = resources.files("launcher.page") / "static"  # the page's own files
THIS = "_"  # the name of a run whose own folder was given
POINTS = 1000  # of a curve over time
NEWEST = 200  # steps
LOG_LINES = 40
STEPS, EPOCHS = " steps", " epochs"  # names that sort before all processes
STARTS = "starts"  # the line for the time between a process's end and its next start
CHANGED = 20  # examples of changed replies between two evaluations
LIVE = (Phase.ADMITTED, Phase.GENERATING, Phase.GENERATED, Phase.READY, Phase.CONSUMED)


PLAIN = ("summary", "curves", "occupancy", "weights", "evaluations", "processes")  # views of a run that take nothing


class RunView:
    """One run's folder. Its methods block, and any thread may call them. Raises UserError if the folder holds no run."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._lock = threading.Lock()
        self._spans = SpanFolder(folder)
        self._marks: dict[str, tuple[Mark, ...]] = {}
        self._record: RunRecord | None = None
        self._points = record.PointFile(folder / run_files.METRICS)
        self._lanes: tuple[int, Mapping[str, Sequence[TracedSpan]], float, float] = (0, {}, 0.0, 0.0)

    @property
    def history(self) -> LoggedHistory:
        return record.history(self.record().points)

    def record(self) -> RunRecord:
        """Return the run's record; read it anew if its files have changed."""
        with self._lock:
            found = marks(self.folder)
            if self._record is None or set(changed(self._marks, found)) - {"spans", "logs"}:
                self._record, self._marks = record.read(self.folder, self._points), found
            return self._record

    def by_process(self) -> Mapping[str, Sequence[TracedSpan]]:
        with self._lock:
            return self._spans.by_process()

    def spans(self) -> Mapping[str, Sequence[TracedSpan]]:
        """Return spans by process and rank, over all incarnations. A span "down" fills the time between two of them."""
        with self._lock:
            self._spans.follow()
            found: dict[str, list[TracedSpan]] = {}
            for file in sorted(self._spans.files.values(), key=lambda file: file.spans[0].start if file.spans else math.inf):
                header = file.header
                own = found.setdefault(header.process if not header.rank else f"{header.process}.{header.rank}", [])
                if own and file.spans:
                    ended = max(span.end for span in own[-100:])  # spans are nearly in order
                    own.append(TracedSpan("down", ended, file.spans[0].start, STARTS, detail=f"start {header.incarnation}"))
                own += file.spans
            return found

    def lanes(self, start: float | None, end: float | None, pixels: int) -> dict[str, Any]:
        """Return the lanes of a window of the run. Without `start` and `end` the window is the whole run."""
        spans, first, last = self._every_lane()
        if not spans:
            return {"first": 0, "last": 1, "start": 0, "end": 1, "lanes": []}
        start, end = first if start is None else start, last if end is None else end
        return {"first": first, "last": last, "start": start, "end": end, "lanes": lanes(spans, start, end, pixels)}

    def _every_lane(self) -> tuple[Mapping[str, Sequence[TracedSpan]], float, float]:
        """Return the spans of each process and of the steps' waits, and the first and the last time. Kept until new spans."""
        spans = self.spans()
        number = sum(map(len, spans.values()))
        if number != self._lanes[0]:
            shown = {**self._above(), **spans}
            every = [span for found in shown.values() for span in found]
            first, last = min((span.start for span in every), default=0.0), max((span.end for span in every), default=0.0)
            self._lanes = number, shown, first, last
        return self._lanes[1:]

    def _above(self) -> Mapping[str, Sequence[TracedSpan]]:
        """Return critical paths and epochs, which the page shows above the processes."""
        try:
            paths = why.explained(self.folder, None, self.by_process)
        except UserError:  # no step yet
            return {}
        waited = [
            TracedSpan(f"{part.cause} {part.process}".strip(), part.start, part.end, "", part.group, step.step)
            for step in paths
            for part in step.parts
        ]
        return {STEPS: waited, EPOCHS: epochs(self.history.steps)}

    def waited(self) -> dict[str, Any]:
        """Return the newest steps' mean time and what they waited for most. Reads only the ledger, which is quick."""
        newest = self.newest()
        try:
            found = why.explained(self.folder, f"{max(0, newest - NEWEST)}:{newest}", dict)
        except UserError:  # no step yet
            return {}
        seconds, most = sum(step.seconds for step in found), critical_path.totals(found)[0]
        said = f"{most.cause} {most.process} {most.seconds / seconds:.0%}".replace("  ", " ")
        return {"seconds": seconds / len(found), "most": said}

    def newest(self) -> int:
        with self.ledger() as reader:
            return reader.newest_step() or 0

    def ledger(self) -> LedgerReader:
        return LedgerReader(self.folder / run_files.LEDGER)

    def summary(self) -> dict[str, Any]:
        found = self.record()
        history = record.history(found.points)
        steps, under_way = history.steps, run_folder.under_way(self.folder)
        state = f"stopped: {found.ended.stop_reason}" if found.ended else "ended without a summary: it was killed, or failed"
        return {
            "name": found.settings.run.name or self.folder.resolve().name,
            "state": "under way" if under_way else state,
            "under_way": under_way,
            "facts": panels.facts(found, history),
            "notes": self._notes(found, history),
            "steps": int(steps[-1]["step"]) if steps else 0,
            "of": found.settings.training.steps,
            "alarm": _alarm(found, steps),
        }

    def _notes(self, found: RunRecord, history: LoggedHistory) -> list[str]:
        notes = []
        if not (self.folder / run_files.METRICS).is_file():
            notes.append(f"There is no {run_files.METRICS}: the run logged nothing yet, or has no tracker of that name.")
        elif not history.steps:
            notes.append("No training step has been logged.")
        if found.torn:
            notes.append(f"The last line of {run_files.METRICS} is not whole, and left out.")
        if history.done_again:
            notes.append(f"{history.done_again:,} steps were done again from a checkpoint, and are left out.")
        return notes

    def curves(self) -> dict[str, Any]:
        history = self.history
        return {"sections": panels.sections(history), "returns": history.returns, "lineages": panels.lineages(history)}

    def metric(self, name: str) -> dict[str, Any]:
        """Return one figure of each step, and of each evaluation."""
        history = self.history
        points = [point for point in [*history.steps, *history.evaluations] if isinstance(point.get(name), int | float)]
        points.sort(key=lambda point: point["step"])
        return {"steps": [point["step"] for point in points], "values": [point[name] for point in points]}

    def why(self, first: int | None, last: int | None) -> dict[str, Any]:
        """Return the critical paths of the steps from `first` to `last`, else of the NEWEST; and what the run waits for now."""
        waits = self._waits()
        try:
            newest = self.newest()
            low = first if first is not None else 0 if last is not None else max(0, newest - NEWEST + 1)
            found = why.explained(self.folder, f"{low}:{newest if last is None else last}", self.by_process)
        except UserError as none:
            return {"steps": [], "totals": [], "verdict": str(none), "waits": waits}
        totals = critical_path.totals(found)
        shown = {"totals": totals, "verdict": why.verdict(found), "waits": waits, "causes": why.CAUSES, "newest": newest}
        return {"steps": found, **shown}

    def _waits(self) -> list[dict[str, Any]]:
        """Return the groups that have waited longest in their state; nothing if the run has ended."""
        if not run_folder.under_way(self.folder):
            return []
        now = time.time()
        with self.ledger() as reader:
            rows = list(reader.groups(states=LIVE[:3]))
        since = {row.group_id: max(row.times.values(), default=now) for row in rows}
        oldest = sorted(rows, key=lambda row: since[row.group_id])[:5]
        return [
            {"group": row.group_id, "state": row.phase.value, "at": row.replica or "", "seconds": now - since[row.group_id]}
            for row in oldest
        ]

    def occupancy(self) -> dict[str, Any]:
        """Return groups by state over time, ages of trained tokens by step, and losses on the way by reason."""
        with self.ledger() as reader:
            times, dropped, counts = reader.times(), reader.dropped(), reader.counts()
        training = self.record().settings.training
        steps = self.history.steps
        return {
            **occupied(times, POINTS),
            "bound": None if training.staleness is None else (training.staleness + 1) * (training.groups_per_step or 0),
            "depth": [point.get("queue/depth") for point in steps],
            "steps": [point["step"] for point in steps],
            "ages": [point.get("staleness/histogram") or {} for point in steps],
            "staleness": training.staleness,
            "groups": {state: count for state, count in counts.items() if count},
            "dropped": dropped,
            "reasons": _reasons(steps),
        }

    def weights(self) -> dict[str, Any]:
        """Return the weight syncs by step, and for each rollout the newest version in use and the time to receive it."""
        history = self.history
        names = [f"weight_sync/{name}" for name in ("seconds", "pause_seconds", "bytes", "aborts")]
        names += ["step", "mismatch/abs_logprob", "mismatch/worst_rollout"]
        rows = [{name: point.get(name) for name in names} for point in history.steps]
        replicas: list[dict[str, Any]] = []
        for process, spans in sorted(self.spans().items()):
            swaps = [span for span in spans if span.line == WEIGHT_SYNC and span.name == "swap"]
            if swaps:
                receptions = [span.end - span.start for span in spans if span.line == WEIGHT_SYNC and span.name == "receive"]
                newest = max(span.step for span in swaps)
                verified = [span.detail for span in spans if span.name == "verified" and span.step == newest]
                swapped = {"version": newest, "checksum": (verified or [""])[-1], "swaps": len(swaps)}
                median, worst = float(np.median(receptions)) if receptions else None, max(receptions, default=None)
                replicas.append({"rollout": process, **swapped, "median": median, "worst": worst})
        committed = max((replica["version"] for replica in replicas), default=0)
        return {"steps": rows, "replicas": replicas, "committed": committed, "disagree": _disagree(replicas)}

    def evaluations(self) -> dict[str, Any]:
        results = self.record().evaluations
        pairs = [_changed(self.folder, one.step, other.step) for one, other in pairwise(results[-4:])]
        return {"table": panels.evaluations(results), "changed": pairs}

    def processes(self) -> dict[str, Any]:
        """Return each process that kept spans, oldest first, and the last lines of every log."""
        with self._lock:
            self._spans.follow()
            rows = [
                {
                    **msgspec.to_builtins(file.header),
                    **_alive(file.header),
                    "spans": len(file.spans),
                    "last": file.spans[-1].end if file.spans else None,
                }
                for file in self._spans.files.values()
            ]
        paths, own = sorted((self.folder / run_files.LOGS).glob("*.log")), self.folder.resolve()
        logs = {
            path.name: _tail(path) for path in paths if path.is_file() and path.resolve().is_relative_to(own)
        }  # no links out
        summary = Summary.read(self.folder) if (self.folder / run_files.SUMMARY).is_file() else None
        return {
            "memory": {} if summary is None else summary.memory,
            "processes": rows,
            "startup": self.record().startup,
            "logs": logs,
            "failures": panels.failures(self.history),
        }

    def configuration(self, other: RunView | None) -> dict[str, Any]:
        """Return the configuration as YAML, and its differences from the defaults or from another run's."""
        text = self.record().configuration
        base = _defaults() if other is None else dict(flat(read_texts(other.record().configuration) or {}))
        own = dict(flat(read_texts(text) or {}))
        sections = {key.rpartition(".")[0] for key in {*own, *base}}
        differing = sorted(key for key in {*own, *base} if own.get(key) != base.get(key) and key not in sections)
        return {"text": text, "differs": [[key, base.get(key), own.get(key)] for key in differing]}

    def what_if(self) -> dict[str, Any]:
        """Return the simulator's predictions, calibrated on this run. Raises UserError if that is not possible."""
        from launcher.commands import simulate

        rows, sure = simulate.what_if(self.folder)
        return {"rows": rows, "sure": sure}


def occupied(times: Mapping[str, np.ndarray], points: int) -> dict[str, Any]:
    """Count the groups in each live state at `points` moments. `times`: [groups] by state, NaN for a state never reached."""
    left = np.fmin(times[Phase.RETIRED.value], times[Phase.DROPPED.value])
    entered = np.stack([*(times[phase.value] for phase in LIVE), left])  # [states, groups]
    if np.isnan(entered[0]).all():
        return {"start": 0.0, "seconds": [], "states": {}}
    start = np.nanmin(entered[0])
    moments = np.linspace(start, np.nanmax(entered), points)
    # A group has left a state once it is in any later state.
    past = np.fmin.accumulate(entered[::-1])[::-1]
    since = [np.searchsorted(np.sort(each[~np.isnan(each)]), moments, side="right") for each in past]
    counts = {phase.value: (since[at] - since[at + 1]).tolist() for at, phase in enumerate(LIVE)}
    return {"start": float(start), "seconds": (moments - start).tolist(), "states": counts}


def _reasons(points: Sequence[record.Point]) -> dict[str, float]:
    """Count what was cut off, left out or played again, over all steps."""
    found: dict[str, float] = {}
    for point in points:
        for name, value in point.items():
            if isinstance(value, int | float) and ("/ended/" in name or name.endswith(("/left_out", "/repeated"))):
                key = name.removeprefix("environment/")
                found[key] = found.get(key, 0.0) + value
    return found


def _alarm(found: RunRecord, steps: Sequence[record.Point]) -> str:
    """Return a warning if a rollout may have other weights than the trainer, by the newest step's probes; else ""."""
    limit = found.settings.mismatch.limit
    worst = steps[-1].get("mismatch/worst_rollout") if steps else None
    return f"a rollout's log-probabilities are {worst:.3g} from the trainer's" if limit and worst and worst > limit else ""


def _disagree(replicas: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the rollouts whose checksum of a version differs within an epoch."""
    sums = {(each["version"], *each["checksum"].split(": ")) for each in replicas if each["checksum"]}
    several = Counter((version, epoch) for version, epoch, _ in sums)
    return [each["rollout"] for each in replicas if several[each["version"], each["checksum"].partition(": ")[0]] > 1]


def _alive(header: SpanHeader) -> dict[str, Any]:
    """Return a living process's memory in bytes, its allowed cores, and the mean of used cores. Empty if it is not here."""
    if header.host != socket.gethostname():
        return {}
    try:
        process = psutil.Process(header.pid)
        if header.process not in " ".join(process.cmdline()):  # another process has its pid by now
            return {}
        times, age = process.cpu_times(), max(1e-3, time.time() - process.create_time())
        used = (times.user + times.system) / age
        return {"rss": process.memory_info().rss, "cores": len(process.cpu_affinity()), "used": used}
    except psutil.Error:
        return {}


def _changed(folder: Path, one: int, other: int) -> dict[str, Any]:
    """Return the problems whose first reply was right in only one of two evaluations."""
    before, after = (_firsts(evaluation.folder_for(folder, step)) for step in (one, other))
    both = [key for key in before if key in after and before[key].correct != after[key].correct]
    shown = [
        {"problem": key[1], "before": before[key].reply, "after": after[key].reply, "now": after[key].correct}
        for key in both[:CHANGED]
    ]
    return {"from": one, "to": other, "number": len(both), "examples": shown}


def _firsts(folder: Path) -> dict[tuple[str, str], evaluation.Generation]:
    replies = (each for path in sorted(folder.glob(f"*{evaluation.SUFFIX}")) for each in evaluation.read_replies(path))
    return {(each.set, each.problem): each for each in replies if each.sample == 0}


def _tail(path: Path) -> list[str]:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 16384))
        return file.read().decode("utf-8", "replace").splitlines()[-LOG_LINES:]


@cache
def _defaults() -> dict[str, Any]:
    return dict(flat(read_texts(yaml.safe_dump(without_secrets(Config(run=Run(name="")))))))
