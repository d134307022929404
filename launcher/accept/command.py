"""`sluice accept`: checks this machine's devices, shows each check, and writes the report to send back."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from rich.console import Console

from launcher.accept.checks import accept
from runtime.telemetry.shown import literal, say


def run(options: argparse.Namespace) -> int:
    """Run the checks. Returns the exit code: 1 if a check has failed."""
    console = Console()
    folder = options.out or Path("accept") / options.device
    with console.status("starting") as status:

        def show(check: str) -> None:
            status.update(literal(check))

        report = asyncio.run(accept(options.device, folder, options.config, options.steps, show))
    for one in report.outcomes:
        say(console, f"{one.check}: {one.result}" + (f" ({one.detail.splitlines()[-1]})" if one.detail else ""))
    say(console, f"to send back: {folder / 'report.md'} and {folder / 'report.json'}")
    return 0 if report.passed else 1
