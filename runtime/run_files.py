"""The names of what lies in a run's folder."""

from __future__ import annotations

CONFIG = "config.yaml"
ADDRESS = "coordinator.address"
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
