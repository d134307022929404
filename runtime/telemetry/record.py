"""Reads a run's folder except its ledger: during the run, after it, and after a kill."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import yaml
from msgspec import Struct

from runtime import run_files
from runtime.config.secret_values import without_secrets
from runtime.config.yaml_text import read_texts, write_texts
from runtime.errors import UserError
from runtime.evaluation import results as evaluation
from runtime.evaluation.results import EvaluationResult
from runtime.process.spans import HEADER, SUFFIX, WEIGHT_SYNC, SpanHeader, TracedSpan
from runtime.telemetry import metrics, startup

# ---- The logged points that count, if a run returned to a checkpoint and repeated steps

Point = Mapping[str, Any]

STEP_ENDED = "timing/all"  # in every point of a training step, and in no point of an evaluation


@dataclass
class RecordedLineage:
    """Training steps `first` to `last` (numbers of steps done) without a return to a checkpoint. `times`: seconds since the
    epoch. A later lineage repeated the steps after `kept`; `kept` < `first` if no step is left."""

    incarnation: int
    first: int
    last: int
    kept: int
    times: tuple[float, float]


@dataclass(frozen=True)
class LoggedHistory:
    """The history of a run. `steps` and `evaluations`: the points that count, in order of steps. `done_again`: the others."""

    steps: list[Point] = field(default_factory=list)
    evaluations: list[Point] = field(default_factory=list)
    lineages: list[RecordedLineage] = field(default_factory=list)

    @property
    def done_again(self) -> int:
        return sum(lineage.last - max(lineage.kept, lineage.first - 1) for lineage in self.lineages)

    @property
    def returns(self) -> list[int]:
        """The steps after which later lineages went on."""
        return [lineage.first - 1 for lineage in self.lineages[1:]]


def history(points: Sequence[Point]) -> LoggedHistory:
    """Build the history from `points` in logged order. A lineage begins if the incarnation changes, or the step decreases."""
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


class _Run(Struct):
    name: str = ""


class _RecordedTraining(Struct):
    steps: int | None = None
    groups_per_step: int | None = None
    staleness: int | None = None


class _RecordedMismatch(Struct):
    limit: float = 0.0


class RecordedSettings(Struct):
    """The keys of a resolved configuration that a page shows by name. Ignores others: runs of other versions have them."""

    run: _Run = msgspec.field(default_factory=_Run)
    training: _RecordedTraining = msgspec.field(default_factory=_RecordedTraining)
    mismatch: _RecordedMismatch = msgspec.field(default_factory=_RecordedMismatch)


class Ended(Struct):
    stop_reason: str


class RunRecord(Struct):
    """A run's folder. `ended`: None for a run without a summary, or that went on after its summary."""

    configuration: str  # as YAML, `without_secrets`; "" when there is none
    settings: RecordedSettings
    points: list[Point]  # in logged order
    torn: bool  # whether the last line of the metrics is incomplete
    ended: Ended | None
    startup: str
    evaluations: list[EvaluationResult]


def read(folder: Path, points: PointFile | None = None) -> RunRecord:
    """Read a run's folder. `points`: of an earlier read. Raises UserError for another kind of folder, or unreadable files."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder" if not folder.exists() else f"{folder}: not a folder")
    if not (folder / run_files.CONFIG).is_file() and not (folder / run_files.METRICS).is_file():
        raise UserError(f"{folder}: not a run's folder: neither {run_files.CONFIG} nor {run_files.METRICS} is in it")
    configuration = _text(folder / run_files.CONFIG)
    settings = _settings(folder / run_files.CONFIG, configuration)
    points = points or PointFile(folder / run_files.METRICS)
    points.follow()
    started = startup.Startup.read(folder)
    line, ended = startup.line(started) if started else "", _ended(folder / run_files.SUMMARY, points.points)
    return RunRecord(_shown(configuration), settings, points.points, points.torn, ended, line, evaluation.read(folder))


def _text(path: Path) -> str:
    with run_files.reading(path), suppress(FileNotFoundError):
        return run_files.regular(path).read_text(encoding="utf-8", errors="replace")
    return ""


@lru_cache(maxsize=4)  # a page that follows a run reads the same text repeatedly
def _shown(text: str) -> str:
    raw = without_secrets(read_texts(text) or {})
    return write_texts(raw) if raw else ""


@lru_cache(maxsize=4)
def _settings(path: Path, text: str) -> RecordedSettings:
    try:
        return msgspec.convert(read_texts(text) or {}, RecordedSettings, strict=False)
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not YAML: {str(error).splitlines()[0]}") from error
    except msgspec.ValidationError as error:
        raise UserError(f"{path}: not a run's configuration: {error}") from error


LARGEST = 1 << 32  # of steps and of seconds since the epoch
CLOCKS = 1.0  # seconds that a file's time may lag behind the clock


class PointFile:
    """The points of a run in logged order. `torn`: the last line is not whole, and left out."""

    def __init__(self, path: Path):
        self._path = path
        self._read = 0  # bytes
        self.points: list[Point] = []
        self.torn = False

    def follow(self) -> None:
        """Read the new points. Raises UserError with the number of a line that is no point."""
        path = self._path
        if not path.exists():
            return
        with run_files.reading(path), run_files.regular(path).open("rb") as file:
            if file.seek(0, os.SEEK_END) < self._read:  # another run has replaced this one
                self._read, self.points = 0, []
            file.seek(self._read)
            data = file.read()
        *lines, rest = data.split(b"\n")
        for line in lines:
            number = len(self.points) + 1
            try:
                point = msgspec.json.decode(line, type=dict[str, int | float | dict[str, int] | None])
            except run_files.NOT_DECODED as error:
                raise UserError(f"{path}: line {number} is not a point of metrics: {error}") from error
            if fault := _fault(point):
                raise UserError(f"{path}: line {number} is not a point of metrics: {fault}")
            self.points.append(metrics.ours(point))
            self._read += len(line) + 1
        self.torn = bool(rest)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Return a run's points by step; of a repeated step the later line counts. Raises UserError, also for a missing file."""
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    file, steps = PointFile(path), dict[int, dict[str, Any]]()
    file.follow()
    for point in file.points:
        steps.setdefault(point["step"], {}).update(point)
    return [steps[step] for step in sorted(steps)]


def _fault(point: Point) -> str:
    """Check the keys that are not plain figures. Returns the fault, or ""."""
    step, time, ages = point.get("step"), point.get("time", 0.0), point.get("staleness/histogram")
    if not isinstance(step, int) or not 0 <= step < LARGEST:
        return "it names no step"
    if isinstance(time, dict) or not 0 <= (time or 0) < LARGEST:
        return "its time is none"
    if not isinstance(ages, dict | None):
        return "staleness/histogram is no histogram"
    figures = (value for name, value in point.items() if name != "staleness/histogram")
    return "a figure is a mapping" if any(isinstance(value, dict) for value in figures) else ""


def _ended(path: Path, points: list[Point]) -> Ended | None:
    if not path.exists():
        return None
    written, ended = path.stat().st_mtime, run_files.read_json(path, Ended, "a summary")
    newest = points[-1].get("time") if points else None
    return ended if not isinstance(newest, float) or newest <= written + CLOCKS else None


# ---- The spans of its processes


_decode_span = msgspec.json.Decoder(tuple[str, float, float, str, int, int, str]).decode


def _span(written: bytes) -> TracedSpan:
    """Decode a span, with interned texts: few texts occur in many spans."""
    name, start, end, line, group, step, detail = _decode_span(written)
    line = WEIGHT_SYNC if line == "publication" else line  # as 0.2 wrote it
    return TracedSpan(sys.intern(name), start, end, sys.intern(line), group, step, sys.intern(detail))


class SpanFile:
    """One file: its writer, once it has been read, and its spans so far."""

    header: SpanHeader

    def __init__(self, path: Path):
        self.path, self._read = path, HEADER  # bytes
        self.spans: list[TracedSpan] = []

    def follow(self) -> None:
        """Read the new spans. An incomplete last line is read later. A line torn by a kill is left out."""
        with run_files.regular(self.path).open("rb") as file:
            self.header = msgspec.json.decode(file.read(HEADER), type=SpanHeader)
            file.seek(self._read)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._read += len(whole) + len(newline)
        for line in whole.splitlines():
            with suppress(*run_files.NOT_DECODED):
                self.spans.append(_span(line))


class SpanFolder:
    """The spans of a run written so far."""

    def __init__(self, run: Path):
        self._folder = run / run_files.SPANS
        self.files: dict[str, SpanFile] = {}

    def follow(self) -> None:
        """Read the new spans. Forgets removed files: another run may have replaced the folder."""
        former, self.files = self.files, {}
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            file = former.get(path.name) or SpanFile(path)
            with suppress(*run_files.NOT_DECODED):  # the header is not complete yet
                file.follow()
                self.files[path.name] = file

    def by_process(self) -> dict[str, list[TracedSpan]]:
        """Read the new spans. Return all by process name, over all starts; of a group of ranks the spans of rank 0."""
        self.follow()
        found: dict[str, list[TracedSpan]] = {}
        for file in self.files.values():
            if file.header.rank == 0:
                found.setdefault(file.header.process, []).extend(file.spans)
        return found
