"""What a Prometheus needs to watch a run: whom to ask, when to raise an alarm, and a dashboard for Grafana. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from launcher.render.plan import to_yaml
from runtime.config import Config
from runtime.process.network import host_port

JOB = "sluice"
TOKEN_FILE = "sluice.token"
INTERVAL = "15s"
PANEL_WIDTH, PANEL_HEIGHT, COLUMNS = 12, 8, 2  # in Grafana's grid, which is 24 wide


class Alert(NamedTuple):
    """`expr` in PromQL; it has to hold for `minutes`."""

    name: str
    expr: str
    minutes: int
    severity: str
    summary: str


ALERTS = (
    Alert(
        "SluiceNoStep",
        "time() - sluice_run_step_timestamp_seconds > clamp_min(10 * avg_over_time(sluice_step_timing_all_seconds[1h]), 60)"
        ' and on (run) sluice_run_phase{phase="training"} == 1',
        0,
        "critical",
        "{{ $labels.run }} has made no step for ten times as long as one usually takes",
    ),
    Alert(
        "SluiceCoordinatorUnreachable",
        f'up{{job="{JOB}", role="coordinator"}} == 0',
        2,
        "critical",
        "the coordinator of {{ $labels.run }} does not answer: the run is over, or the coordinator is lost",
    ),
    Alert(
        "SluiceProcessLost",
        "sluice_units_lost > 0",
        2,
        "critical",
        "{{ $labels.run }} does without {{ $value }} of its {{ $labels.of_role }}",
    ),
    Alert(
        "SluiceProcessRestarted",
        "increase(sluice_restarts_total[15m]) > 0",
        0,
        "warning",
        "a {{ $labels.of_role }} of {{ $labels.run }} has been started again",
    ),
    Alert(
        "SluiceRolloutsTooSlow",
        "sluice_step_staleness_max >= sluice_run_staleness_limit and sluice_step_idle_trainer > 0.5"
        " and sluice_run_staleness_limit > 0",
        10,
        "warning",
        "the trainer of {{ $labels.run }} is idle, and its samples are as old as training.staleness allows: more rollouts help",
    ),
    Alert(
        "SluiceOtherWeights",
        "increase(sluice_mismatch_alarms_total[15m]) > 0",
        0,
        "critical",
        "a rollout of {{ $labels.run }} is further from the trainer than mismatch.limit: it may have other weights",
    ),
    Alert(
        "SluiceDiskNearlyFull",
        "sluice_run_disk_free_bytes < 0.1 * sluice_run_disk_size_bytes",
        5,
        "warning",
        "the file system of {{ $labels.run }} has {{ $value | humanize1024 }}B left: without room the run waits",
    ),
    Alert(
        "SluiceSpansDropped",
        "increase(sluice_spans_dropped_total[15m]) > 0",
        0,
        "info",
        "{{ $labels.process }} of {{ $labels.run }} has no room for its spans: sluice why and trace lack them",
    ),
)


class Panel(NamedTuple):
    """`unit`: Grafana's name of it. `lines`: what each is called, by its expression; RUN there stands for the run's label."""

    title: str
    unit: str
    lines: Mapping[str, str]


PANELS = (
    Panel("Steps", "short", {"sluice_run_step{RUN}": "done", "sluice_run_steps{RUN}": "of the run"}),
    Panel(
        "Seconds of a step",
        "s",
        {
            "sluice_step_timing_all_seconds{RUN}": "whole",
            "sluice_step_timing_rollout_seconds{RUN}": "generation",
            "sluice_step_timing_update_seconds{RUN}": "update",
            "sluice_step_timing_weight_sync_seconds{RUN}": "weight sync",
        },
    ),
    Panel(
        "Reward and accuracy", "short", {"sluice_step_score_mean{RUN}": "reward", "sluice_step_eval_accuracy{RUN}": "accuracy"}
    ),
    Panel(
        "Staleness (versions)",
        "short",
        {
            "sluice_step_staleness_mean{RUN}": "mean",
            "sluice_step_staleness_max{RUN}": "largest",
            "sluice_run_staleness_limit{RUN}": "bound",
        },
    ),
    Panel("Idle", "percentunit", {"sluice_step_idle_trainer{RUN}": "trainer", "sluice_step_idle_rollout{RUN}": "rollouts"}),
    Panel(
        "Generated tokens a second",
        "short",
        {"rate(sluice_rollout_tokens_total{RUN}[$__rate_interval])": "{{process}}"},
    ),
    Panel("Groups under way", "short", {'sluice_groups{RUN, state=~"admitted|generating|generated|ready"}': "{{state}}"}),
    Panel(
        "Who is there",
        "short",
        {'sluice_rollouts{RUN, state="serving"}': "rollouts that serve", "sluice_units_lost{RUN}": "lost: {{of_role}}"},
    ),
    Panel(
        "Rollouts and trainer apart (nats)",
        "short",
        {
            "sluice_step_mismatch_abs_logprob_p99{RUN}": "p99",
            "sluice_step_mismatch_worst_rollout{RUN}": "worst rollout",
        },
    ),
    Panel("Memory", "bytes", {"process_resident_memory_bytes{RUN}": "{{process}}"}),
)


def render(config: Config, host: str, *notes: str) -> dict[str, str]:
    """Text by file name; nothing where no metrics are served. `host`: at which the coordinator is reached. `notes`: what else
    is to be known of it."""
    settings = config.metrics.prometheus
    if settings is None:
        return {}
    header = [
        "Written by `sluice render`: the processes of a run, which its coordinator names.",
        "  prometheus --config.file prometheus.yaml      Grafana imports grafana.json",
        *notes,
    ]
    access: dict[str, Any] = {}
    if settings.token is not None:
        header.append(f"  {TOKEN_FILE}, beside this file, has to hold what the variable {settings.token.variable} does.")
        access = {"authorization": {"credentials_file": TOKEN_FILE}}
    discovery = {"url": f"http://{host_port(host, settings.port)}/sd", "refresh_interval": INTERVAL, **access}
    job = {"job_name": JOB, "honor_labels": True, "http_sd_configs": [discovery], **access}
    document = {
        "global": {"scrape_interval": INTERVAL, "evaluation_interval": INTERVAL},
        "rule_files": ["alerts.yaml"],
        "scrape_configs": [job],
    }
    return {"prometheus.yaml": to_yaml(header, document), "alerts.yaml": _alerts(), "grafana.json": _dashboard()}


def _alerts() -> str:
    rules = [
        {
            "alert": each.name,
            "expr": each.expr,
            **({"for": f"{each.minutes}m"} if each.minutes else {}),
            "labels": {"severity": each.severity},
            "annotations": {"summary": each.summary},
        }
        for each in ALERTS
    ]
    return to_yaml(
        ["Written by `sluice render`: alarms, of every run that is watched."], {"groups": [{"name": JOB, "rules": rules}]}
    )


def _dashboard() -> str:
    source = {"type": "prometheus", "uid": "${datasource}"}
    run = {"query": "label_values(sluice_run_step, run)", "refId": "run"}
    document = {
        "uid": "sluice",
        "title": "Sluice",
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus"},
                {"name": "run", "type": "query", "datasource": source, "query": run, "refresh": 2, "sort": 1},
            ]
        },
        "panels": [_panel(index, panel, source) for index, panel in enumerate(PANELS)],
    }
    return json.dumps(document, indent=2) + "\n"


def _panel(index: int, panel: Panel, source: dict[str, str]) -> dict[str, Any]:
    row, column = divmod(index, COLUMNS)
    return {
        "id": index + 1,
        "type": "timeseries",
        "title": panel.title,
        "datasource": source,
        "gridPos": {"x": PANEL_WIDTH * column, "y": PANEL_HEIGHT * row, "w": PANEL_WIDTH, "h": PANEL_HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + at), "expr": expr.replace("RUN", 'run="$run"'), "legendFormat": legend}
            for at, (expr, legend) in enumerate(panel.lines.items())
        ],
    }
