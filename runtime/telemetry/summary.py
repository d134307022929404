"""The summary of a run: summary.json, and the short table at the end."""

from __future__ import annotations

import copy
import errno
import logging
import os
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from runtime import run_files, types
from runtime.process import spans
from runtime.telemetry import startup
from runtime.telemetry.metrics import SCORE_ERRORS
from runtime.telemetry.shown import LiteralTable
from runtime.telemetry.startup import Memory, Startup

# ---- Trained tokens: their log-probabilities at the step's beginning, and their advantages
# Each rank appends what it had of a step, up to `KEPT_TOKENS` of runtime/trainer/step.py, to a file of its own in the run's
# folder. The file is begun anew at half of the size that both parts may have, and the part before it stays: the newest steps
# are kept.

MOST_BYTES = 64 << 20  # of a rank's two parts
SUFFIX, OLDER = ".tokens", ".tokens.1"
_HEAD = struct.Struct("<II")  # step, bytes of the body

log = logging.getLogger("sluice")


class TrainedTokens(Struct):
    """N tokens of one step: token `position` of row `row` of group `group`, each int64 [N]. The other arrays: float32 [N]."""

    step: int
    group: np.ndarray
    row: np.ndarray
    position: np.ndarray
    logprob: np.ndarray
    advantage: np.ndarray


class TrainedTokenLog:
    """The token log of one rank."""

    def __init__(self, run: Path, name: str):
        self._path = run / run_files.TRAINED / f"{name}{SUFFIX}"
        self._broken, self._new = False, True

    def append(self, tokens: TrainedTokens) -> None:
        """Append tokens. After a failed write, drops these tokens and all later tokens of the run."""
        if self._broken or not len(tokens.group):
            return
        body = types.encode(tokens)
        record = _HEAD.pack(tokens.step, len(body)) + body
        try:
            with spans.at(spans.DISK, str(self._path)):
                self._write(record)
        except OSError as error:
            self._broken = True
            log.warning("%s: no more log-probabilities of trained tokens are kept: %s", self._path, error)

    def _write(self, record: bytes) -> None:
        self._path.parent.mkdir(exist_ok=True)
        if self._path.exists() and self._path.stat().st_size + len(record) > MOST_BYTES // 2:
            self._path.replace(self._path.with_suffix(OLDER))
        with self._path.open("ab", buffering=0) as file:
            at = file.tell()
            if self._new and (whole := _whole(self._path)) < at:  # a kill tore the last record
                file.truncate(at := whole)
            self._new = False
            if file.write(record) < len(record):
                file.truncate(at)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _whole(path: Path) -> int:
    """Return the bytes of the whole records."""
    whole, size = 0, path.stat().st_size
    with path.open("rb") as file:
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            end = file.seek(_HEAD.unpack(head)[1], os.SEEK_CUR)
            if end > size:
                break
            whole = end
    return whole


def read(run: Path, step: int) -> Iterator[TrainedTokens]:
    """Yield the tokens that all ranks have kept of `step`, for a repeated step also the earlier tokens."""
    for path in sorted((run / run_files.TRAINED).glob(f"*{SUFFIX}*")):
        with run_files.regular(path, None).open("rb") as file:
            while len(head := file.read(_HEAD.size)) == _HEAD.size:
                found, length = _HEAD.unpack(head)
                if found != step:
                    file.seek(length, 1)
                elif len(body := file.read(length)) == length:
                    yield types.decode(TrainedTokens, body)


LAUNCHER = "launcher"
CONTROL = ("coordinator", LAUNCHER)  # the processes that do not compute
MISMATCH = "mismatch/"
MEANS = ("abs_logprob", "k1", "k3", "over_0.1", "older_keys_abs_logprob")
EXTREMES = ("abs_logprob_p99", "max", "worst_rollout", "older_keys_max")  # the other mismatch figures are sums
OLDER_KEYS = "older_keys_"


class Summary(Struct, kw_only=True, forbid_unknown_fields=True):
    """Durations in seconds, rates over `rl_seconds`, idle as fractions; an accuracy is None if it was not measured."""

    stop_reason: str
    steps: int
    accuracy_before: float | None
    accuracy_after: float | None
    rl_seconds: float  # from the first prompt admitted to the last step
    total_seconds: float  # from the command to the end
    startup: dict[str, float]  # until the first step is submitted, by phase
    startup_processes: dict[str, dict[str, float]] = {}  # by phase, of each process
    samples_per_second: float  # trained samples
    tokens_per_second: float  # trained reply tokens
    staleness_mean: float
    staleness_max: int
    staleness_histogram: dict[int, int]  # samples by staleness
    idle_trainer: float
    idle_rollout: float
    masked: int = 0  # unscored samples of the steps, left out of the loss
    score_errors: dict[str, int] = {}  # by reason, one for each scorer that failed
    mismatch: dict[str, float] = {}  # of rollouts and trainer: `mismatch/*` over all steps
    mismatch_alarm: str = ""  # the last rollout over `mismatch.limit`, with its value
    mismatch_alarms: int = 0  # probes over the limit
    groups: dict[str, int]  # by final state
    dropped: dict[str, int] = {}  # dropped groups by reason
    timing: dict[str, float]  # by phase over all steps; phases overlap, so their sum exceeds `all`
    peak_pss_bytes: int  # of all processes together
    memory: dict[str, Memory] = {}  # peak of each process with its descendants, and of the launcher

    def write(self, run_dir: str | Path) -> None:
        """Write summary.json under `run_dir`, whole or not at all."""
        run_files.write_json(Path(run_dir) / run_files.SUMMARY, self)

    @classmethod
    def read(cls, run_dir: str | Path) -> Summary:
        """Read the summary in the folder `run_dir`. Raises UserError if the summary is missing or damaged."""
        return run_files.read_json(Path(run_dir) / run_files.SUMMARY, cls, "a summary")


def _add(sums: dict[Any, float], name: Any, value: float) -> None:
    sums[name] = sums.get(name, 0.0) + value


class Totals(Struct):
    """Sums of the steps' metrics (`metrics.step_metrics`), for the summary of the whole run."""

    steps: int = 0
    samples: float = 0.0
    tokens: float = 0.0
    masked: float = 0.0
    timing: dict[str, float] = {}
    staleness: dict[int, float] = {}
    score_errors: dict[str, float] = {}
    idle_seconds: dict[str, float] = {}
    mismatch: dict[str, float] = {}

    def copy(self) -> Totals:
        """Return a copy that later additions do not change."""
        return copy.deepcopy(self)

    def add(self, metrics: Mapping[str, Any]) -> None:
        self.steps += 1
        self.samples += metrics.get("samples", 0)
        self.tokens += metrics.get("tokens", 0)
        self.masked += metrics.get("score/masked", 0)
        for name, value in metrics.items():
            group, _, rest = name.partition("/")
            if group == "timing":
                _add(self.timing, rest, value)
            elif name.startswith(SCORE_ERRORS):
                _add(self.score_errors, name.removeprefix(SCORE_ERRORS), value)
            elif group == "idle":
                _add(self.idle_seconds, rest, value * metrics["timing/all"])
        self._add_mismatch({name.removeprefix(MISMATCH): metrics[name] for name in metrics if name.startswith(MISMATCH)})
        for age, count in metrics.get("staleness/histogram", {}).items():
            _add(self.staleness, int(age), count)

    def _add_mismatch(self, step: Mapping[str, float]) -> None:
        """Add a step's figures: means over all tokens, maxima, sums. `steps` counts the steps with a compared token."""
        known = self.mismatch
        for name, value in step.items():
            if name in EXTREMES:
                known[name] = max(known.get(name, value), value)
            elif name in MEANS:
                of = f"{OLDER_KEYS}tokens" if name.startswith(OLDER_KEYS) else "tokens"
                before, tokens = known.get(of, 0.0), step.get(of, 0)
                known[name] = (known.get(name, 0.0) * before + value * tokens) / (before + tokens)
        for name in step.keys() - {*EXTREMES, *MEANS}:
            _add(known, name, step[name])
        _add(known, "steps", bool(step.get("tokens", 0)))

    def summary(self, *, rl_seconds: float, **rest: Any) -> Summary:
        """Make the summary of the added steps. `rest`: the fields that steps do not give."""
        samples, wall = sum(self.staleness.values()), self.timing.get("all", 0.0)
        return Summary(
            steps=self.steps,
            rl_seconds=rl_seconds,
            samples_per_second=self.samples / rl_seconds if rl_seconds else 0.0,
            tokens_per_second=self.tokens / rl_seconds if rl_seconds else 0.0,
            staleness_mean=sum(value * count for value, count in self.staleness.items()) / samples if samples else 0.0,
            staleness_max=max(self.staleness, default=0),
            staleness_histogram={age: round(count) for age, count in sorted(self.staleness.items())},
            idle_trainer=self.idle_seconds.get("trainer", 0.0) / wall if wall else 0.0,
            idle_rollout=self.idle_seconds.get("rollout", 0.0) / wall if wall else 0.0,
            timing=dict(self.timing),
            mismatch=dict(self.mismatch),
            masked=round(self.masked),
            score_errors={reason: round(count) for reason, count in Counter(self.score_errors).most_common()},
            **rest,
        )


def render(summary: Summary) -> LiteralTable:
    """Format the table at the end of a run."""
    table = LiteralTable(show_header=False, title=f"Stopped: {summary.stop_reason}", title_justify="left", title_style="bold")
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    accuracies = summary.accuracy_before, summary.accuracy_after
    table.add_row("held-out accuracy", " → ".join("not measured" if each is None else f"{each:.1%}" for each in accuracies))
    table.add_row("steps", f"{summary.steps} in {summary.rl_seconds:.1f} s; {summary.total_seconds:.1f} s in all")
    table.add_row("throughput", f"{summary.samples_per_second:,.0f} samples/s, {summary.tokens_per_second:,.0f} tokens/s")
    counts = ", ".join(f"{value}: {count:,}" for value, count in summary.staleness_histogram.items())
    ages = f"mean {summary.staleness_mean:.2f}, max {summary.staleness_max}  (samples by value  {counts or '–'})"
    table.add_row("staleness", ages)
    table.add_row("log p gap", _mismatch(summary))
    table.add_row("idle", f"trainer {summary.idle_trainer:.0%}, rollouts {summary.idle_rollout:.0%}")
    table.add_row("groups", _groups(summary) or "–")
    if summary.masked:
        why = ", ".join(f"{count:,} {reason}" for reason, count in summary.score_errors.items())
        of = f" of {sum(summary.staleness_histogram.values()):,} samples, left out of the loss"
        raised = any("exception:" in each for each in summary.score_errors)
        where = "; the first of each exception is in logs/reward-*.log" * raised
        table.add_row("not scored", f"{summary.masked:,}{of}" + f" ({why}{where})" * bool(why))
    table.add_row("time by phase", _phases(summary.timing))
    if startup.TOTAL in summary.startup:
        table.add_row("start-up", startup.line(Startup(phases=summary.startup)))
    table.add_row("peak memory", _memory(summary))
    return table


def _mismatch(summary: Summary) -> str:
    found = summary.mismatch
    if not found.get("tokens"):
        return "rollouts and trainer were not compared"
    far = f"{found['over_0.1']:.2%} over 0.1" if found["over_0.1"] else "none over 0.1"
    compared = f"{found['tokens']:,.0f} tokens in {found['steps']:,.0f} of {summary.steps:,} steps"
    return f"mean {found['abs_logprob']:.1e}, max {found['max']:.1e} nats, {far}  ({compared})"


def alarm(summary: Summary) -> str:
    return f"{summary.mismatch_alarm} ({summary.mismatch_alarms:,} probes were over the limit)"


def _groups(summary: Summary) -> str:
    why = ", ".join(f"{count:,} {reason}" for reason, count in summary.dropped.items())
    entries = {state: f"{count:,} {state}" for state, count in summary.groups.items()}
    if why:
        entries["dropped"] += f" ({why})"
    return ", ".join(entries.values())


def _memory(summary: Summary) -> str:
    entries = [f"{summary.peak_pss_bytes / 2**30:.2f} GiB (PSS, all processes)"]
    resident = {name: summary.memory[name].rss_bytes for name in CONTROL if name in summary.memory}
    return ", ".join(entries + [f"{name} {size / 2**20:.0f} MiB resident" for name, size in resident.items()])


def _phases(seconds: Mapping[str, float]) -> str:
    """Format the phases, longest first. `all` and the non-overlapping parts are only in summary.json."""
    shown = {name: value for name, value in seconds.items() if name != "all" and not name.startswith("non_overlap_")}
    return ", ".join(f"{name} {value:.1f} s" for name, value in sorted(shown.items(), key=lambda item: -item[1])) or "–"
