"""`sluice bench simulation`: what `sluice simulate` predicts, calibrated on two runs, beside other runs as they are."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from msgspec import Struct

from benchmarks.inputs import bench_config
from launcher.commands.simulate import calibrated
from runtime import run_files
from runtime.config import loading
from runtime.errors import DeadlineExceeded, ServiceFault
from runtime.ledger.reader import LedgerReader
from runtime.simulation.calibration import Calibration, Observed, observe
from runtime.simulation.prediction import simulated
from runtime.telemetry.shown import LiteralTable
from runtime.telemetry.trackers import read_jsonl
from services.rpc.client import ContractDeadlines
from sluice import start

STEPS = 100
LOST_AT = 30  # the step with which the rollout of that case dies
DEADLINE = 300.0  # seconds of one run, whatever else the machine does
POLL = 0.05  # seconds between two looks at a run's progress

LONG = {"sampling.max_new_tokens": "160", "sampling.temperature": "0.7"}
CALIBRATED_ON: dict[str, dict[str, str]] = {
    "η 2, one rollout": {"training.staleness": "2"},
    "long replies": {**LONG, "training.staleness": "2"},
}
CASES: dict[str, tuple[str, dict[str, str]]] = {  # each with the run whose calibration it takes
    "η 0": ("η 2, one rollout", {"training.staleness": "0"}),
    "η 1": ("η 2, one rollout", {"training.staleness": "1"}),
    "η 4": ("η 2, one rollout", {"training.staleness": "4"}),
    "two rollouts": ("η 2, one rollout", {"training.staleness": "2", "services.rollout.replicas": "2"}),
    "groups of 16": ("η 2, one rollout", {"training.staleness": "2", "sampling.group_size": "16"}),
    "16 slots": ("η 2, one rollout", {"training.staleness": "2", "services.rollout.slots": "16"}),
    "long replies, η 0": ("long replies", {**LONG, "training.staleness": "0"}),
    "long replies, two rollouts": ("long replies", {**LONG, "training.staleness": "2", "services.rollout.replicas": "2"}),
    "a rollout of two is lost": ("η 2, one rollout", {"training.staleness": "2", "services.rollout.replicas": "2"}),
}


class SimulationCase(Struct):
    name: str
    measured: Observed
    predicted: Observed

    @property
    def error(self) -> float:
        """Of samples a second, as a share."""
        return self.predicted.samples_per_second / self.measured.samples_per_second - 1


class SimulationReport(Struct):
    calibrations: dict[str, Calibration]
    cases: list[SimulationCase]


async def measure(folder: Path, show: Callable[[str], None] = lambda line: None) -> SimulationReport:
    """Raises ServiceFault where a run fails."""
    calibrations: dict[str, Calibration] = {}
    cases: list[SimulationCase] = []
    for name, overrides in CALIBRATED_ON.items():
        show(f"calibration: {name}")
        calibrations[name] = calibrated(await _run(folder, overrides))
    for name, (source, overrides) in CASES.items():
        show(name)
        lost_at = LOST_AT if "lost" in name else 0
        run = await _run(folder, overrides, lost_at)
        config = loading.resolve(loading.load(run / run_files.CONFIG, ()))
        with LedgerReader(run / run_files.LEDGER) as reader:
            measured = observe(read_jsonl(run / run_files.METRICS), reader.groups())
        predicted = simulated(config, calibrations[source].costs, ContractDeadlines(config), STEPS, lost_at).observed
        cases.append(SimulationCase(name, measured, predicted))
    return SimulationReport(calibrations, cases)


async def _run(folder: Path, overrides: Mapping[str, str], lost_at: int = 0) -> Path:
    """A run's folder, once it has ended."""
    run, source = folder / "run", folder / "bench.yaml"
    source.write_text(loading.to_yaml(bench_config(folder / "inputs")), encoding="utf-8")
    given = {"run.dir": str(run), "training.steps": str(STEPS), **overrides}
    command = start.command("launcher.cli", "train", str(source), *(f"{key}={value}" for key, value in given.items()))
    child = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    losing = asyncio.create_task(_lose(child.pid, run, lost_at)) if lost_at else None
    try:
        said, _ = await asyncio.wait_for(child.communicate(), DEADLINE)
    except asyncio.TimeoutError:
        raise DeadlineExceeded("bench", "run", "did not end", DEADLINE) from None
    finally:
        if losing is not None:
            losing.cancel()
        if child.returncode is None:
            child.terminate()
            await child.wait()
    if child.returncode:
        raise ServiceFault("bench", "run", said.decode(errors="replace").strip().splitlines()[-1])
    return run


async def _lose(launcher: int, run: Path, step: int) -> None:
    """Kill the last rollout with that step."""
    metrics = run / run_files.METRICS
    while not metrics.is_file() or metrics.read_bytes().count(b"\n") < step:  # noqa: ASYNC110 - a file of other processes
        await asyncio.sleep(POLL)
    rollouts = [
        child for child in psutil.Process(launcher).children(recursive=True) if "services.rollout" in " ".join(child.cmdline())
    ]
    os.kill(max(child.pid for child in rollouts), signal.SIGKILL)


def render(report: SimulationReport) -> list[LiteralTable]:
    table = LiteralTable("run", "samples/s", "predicted", "error", "staleness", "predicted", title="simulation")
    for case in report.cases:
        seen, said = case.measured, case.predicted
        row = (f"{seen.samples_per_second:.0f}", f"{said.samples_per_second:.0f}", f"{case.error:+.1%}")
        table.add_row(case.name, *row, f"{seen.staleness:.2f}", f"{said.staleness:.2f}")
    errors = [abs(case.error) for case in report.cases]
    table.add_row("median and largest error", "", "", f"{median(errors):.1%}, {max(errors):.1%}", "", "")
    fits = LiteralTable("calibrated on", "figure", "measured", "simulated", title="calibration, milliseconds")
    for name, calibration in report.calibrations.items():
        pairs: tuple[Any, Any] = (calibration.measured, calibration.simulated)
        for phase, seconds in pairs[0].seconds.items():
            fits.add_row(name, phase, f"{1000 * seconds:.2f}", f"{1000 * pairs[1].seconds.get(phase, 0.0):.2f}")
    return [table, fits]
