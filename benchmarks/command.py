"""`sluice bench NAME`: what this machine does with Sluice, beside plain ways of doing it in the same minutes.

Everything that is compared is measured in turn, several rounds of each, so that a machine that slows down does so for both
sides; figures are sums over the rounds.
"""

from __future__ import annotations

import asyncio
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from rich.console import Console

from runtime.errors import UserError
from runtime.process.command_line import ended_as_by_ctrl_c
from runtime.telemetry.shown import LiteralTable, literal

FOLDER = Path("runs") / ".cache" / "bench"
INPUTS = FOLDER / "inputs"  # made at once by a rename, so that nothing else may lie in it

DATA = {"rewards": "a folder that holds cases/ and data/gsm8k/", "scale": "a folder that holds real replies"}
QUICK = ("concurrency", "gateway", "staleness")
VLLM = ("gateway", "rollout")

Measured = tuple[Any, list[LiteralTable]]  # the figures, and how they are shown
Show = Callable[[str], None]


class Options(Struct, frozen=True, kw_only=True):
    """Of the command line. All but `json` are for one bench or two."""

    json: Path | None = None
    quick: bool = False
    data: Path | None = None
    vllm_python: Path | None = None
    trl_python: Path | None = None
    sizes: str | None = None
    receivers: int | None = None
    depth: str = "auto"


class BenchMachine(Struct):
    """Where it was measured."""

    cores: int
    processor: str
    python: str


def run(name: str, options: Options) -> None:
    """Measure, print a table, and write the figures to `options.json`. Raises UserError, ServiceFault."""
    _check(name, options)
    console = Console()
    with ended_as_by_ctrl_c(), console.status("starting") as status:
        report, tables = BENCHES[name](options, lambda told: status.update(literal(told)))
    for table in tables:
        console.print(table)
    if options.json is not None:
        figures = {"bench": name, "machine": msgspec.to_builtins(machine()), **msgspec.to_builtins(report)}
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=2) + b"\n")


def _check(name: str, options: Options) -> None:
    for option, given in (("--sizes", options.sizes), ("--receivers", options.receivers)):
        if given is not None and name != "publication":
            raise UserError(f"{option}: bench {name} publishes nothing; publication is the only one that does")
    if options.depth != "auto" and name != "staleness":
        raise UserError(f"--depth: bench {name} has none to choose; staleness is the only one that has")
    if options.quick and name not in QUICK:
        raise UserError(f"--quick: bench {name} has no shorter form; {', '.join(QUICK[:-1])} and {QUICK[-1]} have one")
    if (options.data is not None) != (name in DATA):
        needs = f"bench {name} needs" if name in DATA else f"only bench {' and bench '.join(DATA)} take"
        raise UserError(f"--data: {needs} {DATA.get(name, 'a folder of data')}")
    if options.vllm_python is not None and name not in VLLM:
        raise UserError(f"--vllm-python: bench {name} runs no vLLM; {' and '.join(VLLM)} do")
    if options.trl_python is not None and name != "train":
        raise UserError(f"--trl-python: bench {name} runs no TRL; train is the only one that does")
    if options.json is not None and not options.json.parent.is_dir():
        raise UserError(f"--json: there is no folder {options.json.parent}")


def machine() -> BenchMachine:
    return BenchMachine(cores=len(os.sched_getaffinity(0)), processor=platform.machine(), python=platform.python_version())


def _scale(options: Options, show: Show) -> Measured:
    from benchmarks import scale as bench

    assert options.data is not None
    report = asyncio.run(bench.measure(options.data, show))
    return report, bench.render(report)


def _simulation(options: Options, show: Show) -> Measured:
    from benchmarks import simulation as bench

    folder = FOLDER / "simulation"
    folder.mkdir(parents=True, exist_ok=True)
    report = asyncio.run(bench.measure(folder, show))
    return report, bench.render(report)


def _concurrency(options: Options, show: Show) -> Measured:
    from benchmarks import concurrency as bench

    report = bench.run(bench.QUICK if options.quick else bench.ConcurrencySettings(), show)
    return report, bench.render(report)


def _coordinator(options: Options, show: Show) -> Measured:
    from benchmarks import coordinator as bench

    report = asyncio.run(bench.measure(INPUTS, bench.CoordinatorBenchSettings(), show))
    return report, bench.render(report)


def _depth(options: Options, show: Show) -> Measured:
    from benchmarks import depth as bench

    report = asyncio.run(bench.measure(FOLDER / "depth", bench.DepthSettings(), show))
    return report, bench.render(report)


def _engine(options: Options, show: Show) -> Measured:
    from benchmarks import engine as bench

    report = asyncio.run(bench.measure(INPUTS, bench.EngineBenchSettings(), show))
    return report, bench.render(report)


def _engines(options: Options, show: Show) -> Measured:
    from benchmarks import engines as bench

    report = asyncio.run(bench.measure(FOLDER / "engines", bench.EnginesSettings(), show))
    return report, bench.render(report)


def _gateway(options: Options, show: Show) -> Measured:
    from benchmarks import gateway as bench

    report = bench.run(bench.QUICK if options.quick else bench.GatewayBenchSettings(), options.vllm_python, show)
    return report, bench.render(report)


def _learning(options: Options, show: Show) -> Measured:
    from benchmarks import learning as bench

    report = asyncio.run(bench.measure(FOLDER / "learning", bench.LearningSettings(), show))
    return report, bench.render(report)


def _messages(options: Options, show: Show) -> Measured:
    from benchmarks import messages as bench

    report = bench.run(bench.MessagesSettings(), show)
    return report, bench.render(report)


def _packing(options: Options, show: Show) -> Measured:
    from benchmarks import packing as bench

    report = asyncio.run(bench.measure(FOLDER / "packing", bench.PackingSettings(), show))
    return report, bench.render(report)


def _page(options: Options, show: Show) -> Measured:
    from benchmarks import page as bench

    report = asyncio.run(bench.measure(FOLDER / "page", bench.PageSettings(), show))
    return report, bench.render(report)


def _publication(options: Options, show: Show) -> Measured:
    from benchmarks.publication import bench

    report = asyncio.run(bench.measure(FOLDER, bench.settings(options.sizes, options.receivers), show))
    return report, bench.render(report)


def _rewards(options: Options, show: Show) -> Measured:
    from benchmarks import rewards as bench

    assert options.data is not None
    report = asyncio.run(bench.measure(options.data, bench.RewardsBenchSettings(), show))
    return report, bench.render(report)


def _rollout(options: Options, show: Show) -> Measured:
    from benchmarks import rollout as bench

    python = bench.interpreter(options.vllm_python or bench.DEFAULT_PYTHON)
    report = asyncio.run(bench.measure(FOLDER / "rollout", python, bench.RolloutBenchSettings(), show))
    return report, bench.render(report)


def _staleness(options: Options, show: Show) -> Measured:
    from benchmarks.staleness import bench

    settings = replace(bench.QUICK if options.quick else bench.StalenessSettings(), depth=options.depth)
    report = asyncio.run(bench.measure(FOLDER / "staleness" / options.depth, settings, show, print))
    return report, bench.render(report)


def _startup(options: Options, show: Show) -> Measured:
    from benchmarks import startup as bench

    report = asyncio.run(bench.measure(FOLDER / "startup", bench.StartupSettings(), show))
    return report, bench.render(report)


def _storm(options: Options, show: Show) -> Measured:
    from benchmarks import storm as bench

    report = asyncio.run(bench.measure(FOLDER / "storm", bench.StormSettings(), show))
    return report, bench.render(report)


def _train(options: Options, show: Show) -> Measured:
    from benchmarks import train as bench
    from benchmarks import train_trl

    python = train_trl.interpreter(options.trl_python)
    report = asyncio.run(bench.measure(INPUTS, bench.TrainBenchSettings(), python, show))
    return report, bench.render(report)


BENCHES: dict[str, Callable[[Options, Show], Measured]] = {
    "concurrency": _concurrency,
    "coordinator": _coordinator,
    "depth": _depth,
    "engine": _engine,
    "engines": _engines,
    "gateway": _gateway,
    "learning": _learning,
    "messages": _messages,
    "packing": _packing,
    "page": _page,
    "publication": _publication,
    "rewards": _rewards,
    "rollout": _rollout,
    "scale": _scale,
    "simulation": _simulation,
    "staleness": _staleness,
    "startup": _startup,
    "storm": _storm,
    "train": _train,
}
