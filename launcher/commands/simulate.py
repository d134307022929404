"""`sluice simulate`: what a configuration would do, and what would change that. Starts no run."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

import msgspec
from msgspec.structs import replace
from rich.console import Console

from runtime import run_files
from runtime.config import Config, loading
from runtime.config.checks import chosen_names
from runtime.errors import SluiceError, UserError
from runtime.ledger.reader import LedgerReader
from runtime.process.os_process import ended_as_by_ctrl_c
from runtime.registry import OWN
from runtime.simulation.calibration import LEAST, Calibration, assumed, calibrate
from runtime.simulation.engine import Costs, Fixed
from runtime.simulation.simulate import Prediction, death_costs, refuse, simulated, variations
from runtime.telemetry.record import read_jsonl
from runtime.telemetry.shown import LiteralTable, say
from runtime.telemetry.startup import Startup, collect_rarely
from services.rpc.client import command_deadline

STEPS = 40  # of a calibration, and of a prediction without --steps
_DEATH = "lost in an hour with one death of a trainer rank"
_NOT_MODELLED = "not modelled: caches and memory, what else the machine does, and lengths that change as a policy learns"


class Row(msgspec.Struct):
    """One configuration: its name, and its prediction or the reason why the run would end."""

    name: str
    prediction: Prediction | None
    fault: str = ""


def run(options: argparse.Namespace) -> None:
    with ended_as_by_ctrl_c():
        simulate(options)


def simulate(options: argparse.Namespace) -> None:
    """Print the prediction and the table of what-ifs, or of a sweep. Raises ConfigError, UserError."""
    steps, source = options.steps, options.source
    if steps < LEAST:
        raise UserError(f"--steps: {steps}; must be at least {LEAST}")
    collect_rarely()
    began, console = time.monotonic(), Console()
    config = loading.resolve(loading.load(options.config, options.overrides))
    refuse(config)
    calibration = calibrated(source, config) if source else Calibration(_assumed(config))
    costs = calibration.costs
    base = _row("as it is", config, costs, steps)
    if base.prediction is None:
        raise SluiceError(f"the simulated run ends: {base.fault}")
    roles = LiteralTable("role", "processes", "busy", title="what each role does")
    for role, shares in base.prediction.busy.items():
        roles.add_row(role, str(len(shares)), f"{fmean(shares):.0%}")
    console.print(roles)
    others = [*(_sweep(options, costs) if options.sweep else variations(config, costs))]
    rows = [base, *(_row(name, tried, own, steps) for name, tried, own in others)]
    console.print(_table(rows))
    console.print(_deaths(config, costs))
    for line in (*_sure(calibration, source), _NOT_MODELLED):
        say(console, line)
    say(console, f"{steps} steps of {len(rows)} configurations in {time.monotonic() - began:.1f} s")


def what_if(source: Path) -> tuple[list[Row], list[str]]:
    """Return what would change a run, calibrated on its folder, and how sure that is; "as it is" first. Raises UserError."""
    calibration, config = calibrated(source), loading.resolve(loading.load(source / run_files.CONFIG, ()))
    refuse(config)
    base = _row("as it is", config, calibration.costs, STEPS)
    if base.prediction is None:
        raise UserError(f"the simulated run ends: {base.fault}")
    others = [_row(name, tried, own, STEPS) for name, tried, own in variations(config, calibration.costs)]
    return [base, *others], [*_sure(calibration, source), _NOT_MODELLED]


def calibrated(source: Path, given: Config | None = None) -> Calibration:
    """Return a calibration on a run's folder. Raises UserError if the folder holds too little or is of another version.

    Raises UserError also for a function of a user's file that `given` does not name: looking at a folder must run no code."""
    if not (source / run_files.CONFIG).is_file():
        raise UserError(f"--from {source}: not a run's folder: {run_files.CONFIG} is not in it")
    config = loading.resolve(loading.load(source / run_files.CONFIG, ()))
    if others := _own_functions(config) - (set() if given is None else _own_functions(given)):
        raise UserError(
            f"{source}: {', '.join(sorted(others))}: not executed; name it in CONFIG of `sluice simulate CONFIG --from RUN`"
        )
    points = [point for point in read_jsonl(source / run_files.METRICS) if "timing/all" in point]
    with LedgerReader(source / run_files.LEDGER) as reader:
        groups = list(reader.groups())
    steps = min(STEPS, len(points))
    costs, started = _assumed(config), Startup.read(source)
    if started is not None:
        costs = replace(costs, start=Fixed(started.phases["services"]))
    return calibrate(costs, points, groups, lambda costs: simulated(config, costs, command_deadline, steps).observed)


def _own_functions(config: Config) -> set[str]:
    return {name for _, name, _ in chosen_names(config) if OWN in name}


def _assumed(config: Config) -> Costs:
    """Return assumed costs: of this machine's processors, unless the configuration is for devices."""
    devices = config.services.platform or config.cluster.nodes != "auto"
    return assumed(config, "device", 0) if devices else assumed(config, "cpu", len(os.sched_getaffinity(0)))


def _row(name: str, config: Config, costs: Costs, steps: int) -> Row:
    try:
        return Row(name, simulated(config, costs, command_deadline, steps))
    except UserError:
        raise
    except SluiceError as error:  # a run that would end is an answer
        return Row(name, None, str(error))


def _sweep(options: argparse.Namespace, costs: Costs) -> Iterator[tuple[str, Config, Costs]]:
    key, found, values = options.sweep.partition("=")
    if not found or not values:
        raise UserError(f"--sweep: {options.sweep!r} names no values; must be like training.staleness=0,1,2")
    for value in values.split(","):
        yield f"{key}={value}", loading.resolve(loading.load(options.config, [*options.overrides, f"{key}={value}"])), costs


def _table(rows: Sequence[Row]) -> LiteralTable:
    table = LiteralTable("", "samples/s", "", "ms a step", "staleness", "idle trainer", "idle rollouts", title="what if")
    assert rows[0].prediction is not None
    base = rows[0].prediction.observed.samples_per_second
    for row in rows:
        if row.prediction is None:
            table.add_row(row.name, f"ends: {row.fault}", "", "", "", "", "")
            continue
        seen = row.prediction.observed
        change = "" if row is rows[0] else f"{seen.samples_per_second / base - 1:+.0%}"
        idle = (f"{seen.idle[role]:.0%}" for role in ("trainer", "rollout"))
        step = f"{1000 * seen.seconds['step']:.0f}"
        table.add_row(row.name, f"{seen.samples_per_second:.1f}", change, step, f"{seen.staleness:.2f}", *idle)
    return table


def _deaths(config: Config, costs: Costs) -> LiteralTable | str:
    """Return what a death costs, or why the run would end."""
    try:
        found = death_costs(config, costs, command_deadline)
    except SluiceError as error:
        return f"the death of a trainer rank ends the run: {error}"
    table = LiteralTable("checkpoint.in_memory", "by the death", "by copying", "of the hour", title=_DEATH)
    for name, cost in found.items():
        table.add_row(name, f"{cost.death:.1f} s", f"{cost.copying:.1f} s" if cost.copying else "", f"{cost.share:.2%}")
    return table


def _sure(calibration: Calibration, source: Path | None) -> Iterator[str]:
    """Yield lines on the origin of the costs and how well they hold."""
    measured, simulated = calibration.measured, calibration.simulated
    if measured is None or simulated is None:
        yield "calibrated on nothing: costs are assumed from the model's size. Compare rows; do not trust seconds (--from RUN)"
        return
    yield f"calibrated on {source}: {measured.steps} steps, whose mean is known to ± {2 * measured.error:.1%}"
    gaps = [f"{phase} {simulated.seconds.get(phase, 0.0) / value - 1:+.1%}" for phase, value in measured.seconds.items()]
    yield f"simulated against that run: {', '.join(gaps)}; staleness {simulated.staleness:.2f} and {measured.staleness:.2f}"
