"""`sluice bench simulation`: what `sluice simulate` predicts, beside runs as they are.

Each run stands between two runs of the configuration that it is predicted from, and the prediction is the mean of those two
calibrations, so that a machine that slows down does so for all three.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median
from types import MappingProxyType
from typing import Any

import psutil
from msgspec import Struct
from msgspec.structs import replace

from benchmarks.compared import Compared
from benchmarks.inputs import bench_config
from launcher.commands.simulate import calibrated
from runtime import run_files
from runtime.config import Cluster, Config, loading
from runtime.errors import DeadlineExceeded, ServiceFault
from runtime.ledger.reader import LedgerReader
from runtime.simulation.calibration import Calibration, Observed, observe
from runtime.simulation.simulate import Simulation, simulated
from runtime.telemetry.record import read_jsonl
from runtime.telemetry.shown import LiteralTable
from services.rpc.client import command_deadline
from sluice import start

STEPS = 100
LOST_AT = 30  # the step with which the rollout of that case dies
DEADLINE = 300.0  # seconds of one run, whatever else the machine does
POLL = 0.05  # seconds between two looks at a run's progress

SHORT = {"training.staleness": "2"}
LONG = {"training.staleness": "2", "sampling.max_new_tokens": "160", "sampling.temperature": "0.7"}
TWO = {"services.rollout.replicas": "2"}


class LosingSimulation(Simulation):
    """With step `lost_at` the last rollout dies; 0: none."""

    def __init__(self, lost_at: int, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._lost_at = lost_at

    def after_round(self) -> None:
        if self._lost_at and self.training is not None and self.training.buffer.committed >= self._lost_at:
            assert self.cluster is not None
            self.cluster.kill([process for process in self.cluster.processes.values() if process.role == "rollout"][-1])
            self._lost_at = 0


class Case(Struct, frozen=True):
    """`changed` in the configuration `base`, on which the simulation is calibrated."""

    name: str
    changed: Mapping[str, str]
    base: Mapping[str, str] = MappingProxyType(SHORT)
    lost_at: int = 0  # the step with which the last rollout dies
    nodes: bool = False  # three, each in a network namespace


CASES = (
    Case("η 0", {"training.staleness": "0"}),
    Case("η 1", {"training.staleness": "1"}),
    Case("η 4", {"training.staleness": "4"}),
    Case("two rollouts", TWO),
    Case("groups of 16", {"sampling.group_size": "16"}),
    Case("16 slots", {"services.rollout.max_num_seqs": "16"}),
    Case("a rollout of two is lost", TWO, lost_at=LOST_AT),
    Case("three nodes, two rollouts", TWO, nodes=True),
    Case("long replies, η 0", {"training.staleness": "0"}, LONG),
    Case("long replies, two rollouts", TWO, LONG),
)


QUICK = (CASES[1], CASES[3])


class CaseReport(Struct):
    """`slower`: by how much the trainer took longer for its update than in the simulation: the machine, above all."""

    name: str
    measured: Observed
    samples_per_second: float  # predicted
    staleness: float  # predicted
    slower: float

    @property
    def error(self) -> float:
        """Of samples a second, as a share."""
        return self.samples_per_second / self.measured.samples_per_second - 1

    @property
    def corrected(self) -> float:
        """The same with all of the simulation's time scaled to the speed at which the trainer ran."""
        return (1 + self.error) / self.slower - 1


class SimulationReport(Struct):
    calibrations: list[Calibration]
    cases: list[CaseReport]


async def measure(
    folder: Path, show: Callable[[str], None] = lambda line: None, cases: Sequence[Case] = CASES
) -> SimulationReport:
    """Raises ServiceFault where a run fails. Nodes are left out, and that is said, where there can be no namespaces."""
    calibrations: list[Calibration] = []
    found: list[CaseReport] = []
    last: Mapping[str, str] = {}
    for case in cases:
        if case.nodes and (reason := _no_namespaces()):
            show(f"{case.name}: left out: {reason}")
            continue
        if case.base != last:
            show(f"before {case.name}")
            calibrations.append(calibrated(await _run(folder, case.base)))
        show(case.name)
        run = await (_run_on_nodes if case.nodes else _run)(folder, {**case.base, **case.changed}, case.lost_at)
        config = loading.resolve(loading.load(run / run_files.CONFIG, ()))
        with LedgerReader(run / run_files.LEDGER) as reader:
            measured = observe(read_jsonl(run / run_files.METRICS), reader.groups())
        show(f"after {case.name}")
        calibrations.append(calibrated(await _run(folder, case.base)))
        last = case.base
        found.append(_compared(case, config, measured, calibrations[-2:]))
    return SimulationReport(calibrations, found)


def _compared(case: Case, config: Config, measured: Observed, calibrations: list[Calibration]) -> CaseReport:
    config = replace(config, cluster=Cluster())  # namespaces share the machine's processors, as one node's processes do
    found = [
        simulated(config, each.costs, command_deadline, STEPS, partial(LosingSimulation, case.lost_at)).observed
        for each in calibrations
    ]
    return CaseReport(
        name=case.name,
        measured=measured,
        samples_per_second=1 / fmean(1 / each.samples_per_second for each in found),
        staleness=fmean(each.staleness for each in found),
        slower=measured.seconds["update"] / fmean(each.seconds["update"] for each in found),
    )


def _no_namespaces() -> str:
    from tests.system import namespaces

    return namespaces.why_not()


def _given(folder: Path, changed: Mapping[str, str]) -> tuple[Path, list[str]]:
    source = folder / "bench.yaml"
    source.write_text(loading.to_yaml(bench_config(folder / "inputs")), encoding="utf-8")
    return source, [f"{key}={value}" for key, value in {"training.steps": str(STEPS), **changed}.items()]


async def _run(folder: Path, changed: Mapping[str, str], lost_at: int = 0) -> Path:
    """A run's folder, once it has ended."""
    source, overrides = _given(folder, changed)
    run = folder / "run"
    command = start.command("launcher.cli", "train", str(source), f"run.dir={run}", *overrides)
    child = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    losing = asyncio.create_task(_lose(child.pid, run, lost_at)) if lost_at else None
    try:
        said, _ = await asyncio.wait_for(child.communicate(), DEADLINE)
    except TimeoutError:
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


async def _run_on_nodes(folder: Path, changed: Mapping[str, str], lost_at: int) -> Path:
    """The same over three nodes, each in a namespace: rollouts on the second and the third, all else on the first."""
    from tests.system.cluster import NAMES, cluster

    assert not lost_at, "who dies is looked for among this machine's processes"
    source, overrides = _given(folder, changed)
    run, first = folder / "run", f"[{NAMES[0]}]"
    shutil.rmtree(run, ignore_errors=True)
    placed = [f"services.{role}.placement={first}" for role in ("trainer", "reference", "reward")]
    placed.append(f"services.rollout.placement=[{', '.join(NAMES[1:])}]")
    nodes = "cluster.nodes=[" + ", ".join(f"{{name: {name}}}" for name in NAMES) + "]"

    def through() -> None:
        with cluster(source, nodes, *placed, *overrides, folder=run) as made:
            codes = [made.agents[name].wait(DEADLINE) for name in NAMES]
            if any(codes):
                raise ServiceFault("bench", "run", f"agents ended with {codes}: {made.said().strip().splitlines()[-1]}")

    await asyncio.to_thread(through)
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


def compared(report: SimulationReport) -> list[Compared]:
    """One value a case, at the speed at which the trainer ran."""
    return [Compared("samples/s, simulated / measured", [1 + case.corrected for case in report.cases])]


def render(report: SimulationReport) -> list[LiteralTable]:
    head = ("run", "samples/s", "predicted", "error", "at the run's own speed", "staleness", "predicted")
    table = LiteralTable(*head, title="simulation")
    for case in report.cases:
        rates = (f"{case.measured.samples_per_second:.0f}", f"{case.samples_per_second:.0f}")
        errors = (f"{case.error:+.1%}", f"{case.corrected:+.1%}")
        table.add_row(case.name, *rates, *errors, f"{case.measured.staleness:.2f}", f"{case.staleness:.2f}")
    whole = [
        f"{median(map(abs, found)):.1%}, {max(map(abs, found)):.1%}"
        for found in ([case.error for case in report.cases], [case.corrected for case in report.cases])
    ]
    table.add_row("median and largest error", "", "", *whole, "", "")
    fits = LiteralTable("figure", "simulated / measured, each calibration", title="calibration")
    pairs: list[tuple[Any, Any]] = [(each.measured, each.simulated) for each in report.calibrations]
    for phase in pairs[0][0].seconds:
        shares = ", ".join(f"{simulated.seconds[phase] / measured.seconds[phase]:.2f}" for measured, simulated in pairs)
        fits.add_row(phase, shares)
    return [table, fits]
