"""What Prometheus reads of a process, in its text format: its status, and at the coordinator the run. Pure, but for what the
system says of the process and of the file system."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, get_args

from prometheus_client import ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from runtime.status import Registration, RunFigures, RunPhase, State, Status

CONTENT_TYPE = "text/plain; version=0.0.4"
_SECONDS = re.compile(r"timing/|(gateway/)?loop_lag")  # figures in seconds whose names do not end with it


def labels(run: str, process: Status | Registration) -> dict[str, str]:
    """Of each of the process's own metrics, and of the process as one that is asked."""
    return {"run": run, "role": process.role, "process": process.name}


def targets(run: str, processes: Iterable[Status | Registration]) -> list[dict[str, Any]]:
    """Those that serve metrics, as Prometheus' HTTP service discovery has it."""
    return [{"targets": [each.metrics], "labels": labels(run, each)} for each in processes if each.metrics]


def text(run: str, status: Status, dropped: int, figures: RunFigures | None) -> bytes:
    """The metrics of a process of that run. `dropped`: spans that its file has not. `figures`: at the coordinator."""
    return generate_latest(_Collected(run, status, dropped, figures))


def metric_name(prefix: str, figure: str) -> str:
    """`timing/all` becomes `PREFIX_timing_all_seconds`. A letter that is not of ASCII becomes its number, anything else `_`."""
    name = re.sub(r"[^a-zA-Z0-9_]", lambda found: "_" if found[0].isascii() else f"u{ord(found[0]):x}", figure)
    return f"{prefix}_{name}{'_seconds' if _SECONDS.match(figure) else ''}"


class _Collected:
    """What the library makes text of. The first of two metrics of the same name counts: another figure's name may become it."""

    def __init__(self, run: str, status: Status, dropped: int, figures: RunFigures | None):
        self._labels = labels(run, status)
        self._found: dict[str, Metric] = {}
        states = _one_of(get_args(State), status.state)
        self._add("sluice_process_state", "1 for the state that the process is in.", states, "state")
        self._add("sluice_spans_dropped_total", "Spans that the process's file has no room for.", dropped)
        if figures is None:
            self._of_service(status)
        else:
            self._of_run(figures)

    def collect(self) -> Iterator[Metric]:
        yield from self._found.values()
        yield from ProcessCollector(registry=None).collect()

    def _add(self, name: str, meaning: str, value: float | Mapping[Any, float], by: str = "") -> None:
        """A counter if its name says so, else a gauge. `value`: one, or several with what the label `by` says of each."""
        if name in self._found:
            return
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        family = kind(name, meaning, labels=[*self._labels, *([by] if by else [])])
        for key, one in value.items() if isinstance(value, Mapping) else [(None, value)]:
            family.add_metric([*self._labels.values(), *([str(key)] if by else [])], one)
        self._found[name] = family

    def _of_service(self, status: Status) -> None:
        calls = status.calls
        ended = {"answered": calls.answered, "failed": calls.failed, "withdrawn": calls.withdrawn}
        self._add("sluice_process_version_step", "Optimizer steps that made the weights that it has.", status.version.step)
        self._add("sluice_calls_open", "Calls to the process that are not answered yet.", calls.open)
        self._add("sluice_calls_total", "Calls to the process that have ended, by how.", ended, "outcome")
        self._add("sluice_call_seconds", "From a call to its answer, the mean over the recent ones.", calls.seconds)
        for name, value in status.gauges.items():
            meaning = f"{name}, as {status.role} tells it with its status."
            self._add(metric_name(f"sluice_{status.role}", name), meaning, value)

    def _of_run(self, run: RunFigures) -> None:
        progress = run.progress
        self._add(
            "sluice_run_phase", "1 for the phase that the run is in.", _one_of(get_args(RunPhase), progress.phase), "phase"
        )
        self._add("sluice_run_step", "Optimizer steps so far.", progress.step)
        self._add("sluice_run_steps", "Optimizer steps of the whole run.", progress.steps)
        self._add("sluice_run_staleness_limit", "Versions that a sample may be old: training.staleness.", run.staleness)
        self._add(
            "sluice_groups", "Groups, by state; of those that are over, since the coordinator's start.", run.groups, "state"
        )
        self._add("sluice_rollouts", "Rollouts, by state.", run.rollouts, "state")
        self._add(
            "sluice_units_lost", "Processes, or groups of ranks, that the run does without, by role.", run.lost, "of_role"
        )
        self._add(
            "sluice_restarts_total", "Processes, or groups of ranks, that came in another's place.", run.restarts, "of_role"
        )
        self._add("sluice_mismatch_alarms_total", "Probes of rollouts over mismatch.limit.", run.alarms)
        with suppress(OSError):
            disk = shutil.disk_usage(run.folder)
            self._add("sluice_run_disk_free_bytes", "Free on the file system of the run's folder.", disk.free)
            self._add("sluice_run_disk_size_bytes", "Size of the file system of the run's folder.", disk.total)
        if run.stepped:
            self._add("sluice_run_step_timestamp_seconds", "When the newest step ended, since the epoch.", run.stepped)
        for name, value in run.newest.items():
            by = "value" if isinstance(value, dict) else ""
            self._add(metric_name("sluice_step", name), f"{name} of the newest step, as in metrics.jsonl.", value, by)


def _one_of(known: Sequence[str], now: str) -> dict[str, float]:
    return {each: float(each == now) for each in known}
