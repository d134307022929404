"""`sluice data prepare`: the preparation with its progress, and what became of the rows."""

from __future__ import annotations

import argparse
import os
import time

from rich.console import Console

from launcher.view import View
from runtime.data.prepare import load, prepare
from runtime.telemetry.shown import say


def run(options: argparse.Namespace) -> None:
    settings = load(options.config, options.overrides)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # `workers` is the number of threads
    console = Console()
    began = time.monotonic()
    with View(console, line_interval=0) as view:  # `log_interval` limits the lines instead
        view.phase("prepare", detail=", ".join(path for path, _ in settings.inputs))

        def progress(done: int) -> None:
            speed = done / max(time.monotonic() - began, 1e-3)
            view.phase("prepare", detail=f"{done} rows, {speed:.0f} rows/s")

        outcome = prepare(settings, progress)
    for line in outcome.report():
        say(console, line)
