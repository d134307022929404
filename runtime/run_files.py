"""The names of what lies in a run's folder."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

CONFIG = "config.yaml"
ADDRESS = "coordinator.address"
LOCK = ".lock"  # held while a run is under way; its content names the run
LEDGER = "ledger"
LOGS = "logs"
NODES = "nodes"
CHECKPOINTS = "checkpoints"
MODEL = "model"
EVALUATIONS = "evaluations"
NONFINITE = "nonfinite"
METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"
SUMMARY = "summary.json"
STARTUP = "startup.json"

OF_ONE_RUN = (LEDGER, CHECKPOINTS, MODEL, EVALUATIONS, NONFINITE, METRICS, TENSORBOARD, SUMMARY, STARTUP)
"""What a new run must not find."""


def run_id(folder: Path) -> str:
    """Names the start of the run by its user; "" where nobody has started one."""
    with suppress(FileNotFoundError):
        return (folder / LOCK).read_bytes().hex()
    return ""
