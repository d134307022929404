"""What a Prometheus needs to watch a run: whom to ask, when to raise an alarm (alerts.yaml), and a dashboard for Grafana
(panels.yaml)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from launcher.render.plan import to_yaml
from runtime.config import Config
from runtime.process.network import host_port

TOKEN_FILE = "sluice.token"
INTERVAL = "15s"
_HERE = Path(__file__).parent
_COLUMNS, _WIDTH, _HEIGHT = 2, 12, 8  # of panels, in Grafana's grid, which is 24 wide


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
        # Prometheus 2.42, Debian's, leaves the type out of requests to http_sd where it is not said.
        access = {"authorization": {"type": "Bearer", "credentials_file": TOKEN_FILE}}
    discovery = {"url": f"http://{host_port(host, settings.port)}/sd", "refresh_interval": INTERVAL, **access}
    document = {
        "global": {"scrape_interval": INTERVAL, "evaluation_interval": INTERVAL},
        "rule_files": ["alerts.yaml"],
        "scrape_configs": [{"job_name": "sluice", "honor_labels": True, "http_sd_configs": [discovery], **access}],
    }
    alerts = (_HERE / "alerts.yaml").read_text(encoding="utf-8")
    return {"prometheus.yaml": to_yaml(header, document), "alerts.yaml": alerts, "grafana.json": _dashboard()}


def _dashboard() -> str:
    source = {"type": "prometheus", "uid": "${datasource}"}
    query = {"query": "label_values(sluice_run_step, run)", "refId": "run"}
    variables = [
        {"name": "datasource", "type": "datasource", "query": "prometheus"},
        {"name": "run", "type": "query", "datasource": source, "query": query, "refresh": 2, "sort": 1},
    ]
    panels = yaml.safe_load((_HERE / "panels.yaml").read_text(encoding="utf-8"))
    document = {
        "uid": "sluice",
        "title": "Sluice",
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": variables},
        "panels": [{**_panel(index, panel), "datasource": source} for index, panel in enumerate(panels)],
    }
    return json.dumps(document, indent=2) + "\n"


def _panel(index: int, panel: dict[str, Any]) -> dict[str, Any]:
    row, column = divmod(index, _COLUMNS)
    lines = [(expr.replace("RUN", 'run="$run"'), legend) for expr, legend in panel["lines"].items()]
    return {
        "id": index + 1,
        "type": "timeseries",
        "title": panel["title"],
        "gridPos": {"x": _WIDTH * column, "y": _HEIGHT * row, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel["unit"]}, "overrides": []},
        "targets": [{"refId": chr(65 + at), "expr": expr, "legendFormat": legend} for at, (expr, legend) in enumerate(lines)],
    }
