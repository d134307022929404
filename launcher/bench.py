"""`sluice bench NAME`: what this machine does with Sluice, beside plain ways of doing it in the same minutes.

Everything that is compared is measured in turn, several rounds of each, so that a machine that slows down does so for both
sides; figures are sums over the rounds.
"""

from __future__ import annotations

import asyncio
import os
import platform
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from runtime.errors import UserError

FOLDER = Path("runs") / ".cache" / "bench"
MATERIAL = FOLDER / "material"  # made at once by a rename, so that nothing else may lie in it


class Machine(Struct):
    """Where it was measured."""

    cores: int
    processor: str
    python: str


def run(
    name: str,
    json_path: Path | None,
    quick: bool = False,
    data: Path | None = None,
    vllm_python: Path | None = None,
    sizes: str | None = None,
    receivers: int | None = None,
) -> None:
    """Measure, print a table, and write the figures to `json_path`. Raises UserError, ServiceFault."""
    from launcher import (
        bench_engine,
        bench_engines,
        bench_packing,
        bench_publication,
        bench_rewards,
        bench_rollout,
        bench_staleness,
        bench_startup,
        bench_train,
    )

    for option, given in (("--sizes", sizes), ("--receivers", receivers)):
        if given is not None and name != "publication":
            raise UserError(f"{option}: bench {name} publishes nothing; publication is the only one that does")
    if quick and name != "staleness":
        raise UserError(f"--quick: bench {name} has no shorter form; staleness is the only one that has")
    if (data is not None) != (name == "rewards"):
        raise UserError(
            f"--data: {'bench rewards needs' if name == 'rewards' else 'only bench rewards takes'} a folder of cases"
        )
    if vllm_python is not None and name != "rollout":
        raise UserError(f"--vllm-python: bench {name} runs no vLLM; rollout is the only one that does")
    if json_path is not None and not json_path.parent.is_dir():
        raise UserError(f"--json: there is no folder {json_path.parent}")
    console = Console()
    tables: list[Table]
    report: Any
    with console.status("starting") as status:
        if name == "engine":
            report = asyncio.run(bench_engine.measure(MATERIAL, bench_engine.Settings(), status.update))
            tables = [bench_engine.render(report)]
        elif name == "engines":
            report = asyncio.run(bench_engines.measure(FOLDER / name, bench_engines.Settings(), status.update))
            tables = bench_engines.render(report)
        elif name == "staleness":
            settings = bench_staleness.QUICK if quick else bench_staleness.Settings()
            report = asyncio.run(bench_staleness.measure(FOLDER / name, settings, status.update, console.print))
            tables = bench_staleness.render(report)
        elif data is not None:
            report = asyncio.run(bench_rewards.measure(data, bench_rewards.Settings(), status.update))
            tables = bench_rewards.render(report)
        elif name == "rollout":
            python = bench_rollout.interpreter(vllm_python or bench_rollout.DEFAULT_PYTHON)
            measuring = bench_rollout.measure(FOLDER / name, python, bench_rollout.Settings(), status.update)
            rollouts = asyncio.run(measuring)
            report, tables = rollouts, bench_rollout.render(rollouts)
        elif name == "publication":
            report = asyncio.run(bench_publication.measure(FOLDER, bench_publication.settings(sizes, receivers), status.update))
            tables = bench_publication.render(report)
        elif name == "startup":
            report = asyncio.run(bench_startup.measure(FOLDER / name, bench_startup.Settings(), status.update))
            tables = bench_startup.render(report)
        elif name == "packing":
            report = asyncio.run(bench_packing.measure(FOLDER / name, bench_packing.Settings(), status.update))
            tables = bench_packing.render(report)
        else:
            report = asyncio.run(bench_train.measure(MATERIAL, bench_train.Settings(), status.update))
            tables = bench_train.render(report)
    for table in tables:
        console.print(table)
    if json_path is not None:
        figures = {"bench": name, "machine": msgspec.to_builtins(machine()), **msgspec.to_builtins(report)}
        json_path.write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=2) + b"\n")


def machine() -> Machine:
    return Machine(cores=len(os.sched_getaffinity(0)), processor=platform.machine(), python=platform.python_version())
