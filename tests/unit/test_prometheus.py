"""The text that Prometheus reads: names, labels, and what of a process and of a run is in it."""

from __future__ import annotations

import string
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from runtime.config import Config, Run
from runtime.coordinator.register import Register
from runtime.coordinator.run import run_figures
from runtime.status import CallStats, Progress, Registration, RunFigures, Status
from runtime.telemetry.scraping import metric_name, text
from runtime.types import PolicyVersion

ROLLOUT = {"run": "a run", "role": "rollout", "process": "rollout-1"}


def status(**more: Any) -> Status:
    return Status(role="rollout", name="rollout-1", state="asleep", version=PolicyVersion(1, 7), **more)


def of_run(**more: Any) -> RunFigures:
    plain: dict[str, Any] = {"rollouts": {}, "lost": {}, "restarts": {}, "folder": "/", "staleness": 2, "processes": []}
    return RunFigures(**plain | {"progress": Progress(phase="training", step=3, steps=9)} | more)


def samples(told: Status, dropped: int = 0, run: RunFigures | None = None) -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = {}
    for family in text_string_to_metric_families(text("a run", told, dropped, run).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


def by(found: list[Sample], label: str) -> dict[str, float]:
    return {sample.labels[label]: sample.value for sample in found}


NAMES = {
    "staleness/mean": "staleness_mean",
    "timing/all": "timing_all_seconds",
    "gateway/loop_lag_p99": "gateway_loop_lag_p99_seconds",
    "weight_sync/seconds": "weight_sync_seconds",
    "mismatch/over_0.1": "mismatch_over_0_1",
    "eval/数学/pass@1": "eval_u6570u5b66_pass_1",
}


def test_figures_have_names_that_prometheus_allows() -> None:
    assert {figure: metric_name("step", figure) for figure in NAMES} == {
        figure: f"step_{name}" for figure, name in NAMES.items()
    }


@given(st.text(min_size=1))
def test_any_name_that_a_run_makes_becomes_one(figure: str) -> None:
    assert set(metric_name("sluice_step", figure)) <= set(string.ascii_letters + string.digits + "_")


def test_a_process_tells_its_state_calls_and_gauges_under_its_labels() -> None:
    calls = CallStats(open=1, answered=5, failed=2, withdrawn=3, seconds=0.25)
    found = samples(status(calls=calls, gauges={"running": 4.0, "tokens_total": 99.0}), dropped=6)
    of_sluice = [each for name, several in found.items() if name.startswith("sluice_") for each in several]
    assert all(ROLLOUT.items() <= each.labels.items() for each in of_sluice)
    assert {state for state, now in by(found["sluice_process_state"], "state").items() if now} == {"asleep"}
    assert by(found["sluice_calls_total"], "outcome") == {"answered": 5, "failed": 2, "withdrawn": 3}
    single = {name: several[0].value for name, several in found.items() if len(several) == 1}
    expected = {"sluice_calls_open": 1, "sluice_call_seconds": 0.25, "sluice_spans_dropped_total": 6}
    expected |= {"sluice_rollout_running": 4, "sluice_rollout_tokens_total": 99, "sluice_process_version_step": 7}
    assert expected.items() <= single.items()
    assert single["process_resident_memory_bytes"] > 1 << 20
    assert not any(name.startswith("sluice_run") for name in found)


def test_the_coordinator_tells_of_the_run_and_of_its_newest_step() -> None:
    newest = {"staleness/mean": 0.5, "staleness/histogram": {0: 3, 2: 1}}
    run = of_run(newest=newest, groups={"ready": 4}, rollouts={"serving": 2}, lost={"reward": 1}, restarts={"reward": 3})
    found = samples(status(gauges={"step": 3.0}), run=run)
    assert by(found["sluice_step_staleness_histogram"], "value") == {"0": 3, "2": 1}
    assert by(found["sluice_groups"], "state") == {"ready": 4} and by(found["sluice_rollouts"], "state") == {"serving": 2}
    assert by(found["sluice_units_lost"], "of_role") == {"reward": 1}
    assert by(found["sluice_restarts_total"], "of_role") == {"reward": 3}
    assert {phase for phase, now in by(found["sluice_run_phase"], "phase").items() if now} == {"training"}
    single = {name: several[0].value for name, several in found.items()}
    assert (single["sluice_run_step"], single["sluice_run_steps"], single["sluice_step_staleness_mean"]) == (3, 9, 0.5)
    assert 0 <= single["sluice_run_disk_free_bytes"] <= single["sluice_run_disk_size_bytes"]
    assert "sluice_run_step_timestamp_seconds" not in found  # before the first step
    assert "sluice_rollout_step" not in found


def test_of_two_figures_with_one_name_the_first_counts() -> None:
    """Prometheus refuses all metrics of a process that tells one of them twice."""
    found = samples(status(), run=of_run(newest={"eval/a-b/errors": 1.0, "eval/a_b/errors": 2.0}))
    assert [sample.value for sample in found["sluice_step_eval_a_b_errors"]] == [1.0]


def registration(name: str, incarnation: int, metrics: str = "127.0.0.1:9") -> Registration:
    role = name.partition("-")[0]
    own = {"address": "", "pid": 1, "host": "", "metrics": metrics}
    return Registration(role=role, name=name, incarnation=incarnation, **own)  # type: ignore[arg-type]


def test_the_runs_processes_follow_restarts_and_leave_with_the_dismissed() -> None:
    register, config = Register(), Config(run=Run(name="a run"))
    for name in ("rollout-0", "rollout-1"):
        register.place("rollout", [name])
        register.admit(registration(name, 0, f"{name}:0"))
    register.lose(registration("rollout-0", 0), "killed")
    figures = run_figures(config, register, Progress(), None)
    assert [one.metrics for one in figures.processes] == ["rollout-0:0", "rollout-1:0"]
    assert (figures.rollouts["lost"], figures.rollouts["registered"], figures.lost) == (1, 1, {"rollout": 1})
    register.admit(registration("rollout-0", 1, "rollout-0:1"))
    register.dismiss("rollout-1", "scaled down")
    figures = run_figures(config, register, Progress(), None)
    assert [one.metrics for one in figures.processes] == ["rollout-0:1"]
    assert (figures.lost, figures.restarts) == ({"rollout": 0}, {"rollout": 1})
