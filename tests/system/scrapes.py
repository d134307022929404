"""A run as Prometheus sees it: the processes that its coordinator names, and the metrics of each."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from runtime import run_files

SECONDS = 60.0  # of one answer, on a busy machine


def fetched(address: str, path: str, token: str = "") -> str:
    """Raises HTTPError."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with urlopen(Request(f"http://{address}{path}", headers=headers), timeout=SECONDS) as response:
        return response.read().decode()


def metrics_address(folder: Path) -> str:
    """Of the coordinator, by its log."""
    log = (folder / run_files.LOGS / "coordinator.log").read_text()
    return re.findall(r"metrics for Prometheus at http://(\S+)/metrics", log)[-1]


def discovered(folder: Path, token: str = "") -> dict[str, str]:
    """HOST:PORT by process."""
    named: list[dict[str, Any]] = json.loads(fetched(metrics_address(folder), "/sd", token))
    return {each["labels"]["process"]: each["targets"][0] for each in named}


def scraped(address: str, token: str = "") -> list[Sample]:
    families = text_string_to_metric_families(fetched(address, "/metrics", token))
    return [sample for family in families for sample in family.samples]


def value(samples: list[Sample], name: str, **labels: str) -> float:
    """Of the only such sample."""
    (found,) = (each.value for each in samples if each.name == name and labels.items() <= each.labels.items())
    return found
