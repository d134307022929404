"""`sluice bench NAME`: what this machine does with Sluice, beside plain ways of doing it in the same minutes.

Everything that is compared is measured in turn, several rounds of each, so that a machine that slows down does so for both
sides; figures are sums over the rounds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from rich.console import Console

from benchmarks.compared import Measurement
from runtime.errors import UserError
from runtime.process.os_process import ended_as_by_ctrl_c
from runtime.telemetry.shown import literal

FOLDER = Path("runs") / ".cache" / "bench"
INPUTS = FOLDER / "inputs"  # made at once by a rename, so that nothing else may lie in it

DATA = {"rewards": "a folder that holds cases/ and data/gsm8k/", "scale": "a folder that holds real replies"}
VLLM = ("gateway", "rollout")
ALL = "all"

Measured = tuple[Any, Any]  # the bench's module, and its report
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
    depth: str | None = None
    pretrained: bool = False


def run(name: str, options: Options) -> None:
    """Measure, print a table, and write the figures to `options.json`. Raises UserError, ServiceFault."""
    _check(name, options)
    console = Console()
    with ended_as_by_ctrl_c(), console.status("starting") as status:
        bench, report = BENCHES[name](options, lambda told: status.update(literal(told)))
    for table in bench.render(report):
        console.print(table)
    if options.json is not None:
        figures = {"bench": name, "measured": msgspec.to_builtins(Measurement.here()), **msgspec.to_builtins(report)}
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=2) + b"\n")
    if name == ALL:
        report.check()


def _check(name: str, options: Options) -> None:
    for option, given in (("--sizes", options.sizes), ("--receivers", options.receivers)):
        if given is not None and name not in ("weight_sync", ALL):
            raise UserError(f"{option}: bench {name} publishes nothing; weight_sync is the only one that does")
    if options.depth is not None and name != "staleness":
        raise UserError(f"--depth: bench {name} has none to choose; staleness is the only one that has")
    if options.data is not None and name not in (*DATA, ALL):
        raise UserError(f"--data: only bench {' and bench '.join(DATA)} take a folder of data")
    if options.vllm_python is not None and name not in (*VLLM, ALL):
        raise UserError(f"--vllm-python: bench {name} runs no vLLM; {' and '.join(VLLM)} do")
    if options.trl_python is not None and name not in ("train", ALL):
        raise UserError(f"--trl-python: bench {name} runs no TRL; train is the only one that does")
    if options.pretrained and name != "train":
        raise UserError(f"--pretrained: bench {name} has a model of its own; train takes the published one too")
    if options.json is not None and not options.json.parent.is_dir():
        raise UserError(f"--json: there is no folder {options.json.parent}")


def _usual(name: str, folder: Path | None = None) -> Callable[[Options, Show], Measured]:
    """A bench whose module has `measure(folder, settings, show)`, and settings `FULL` and `QUICK`."""

    def measured(options: Options, show: Show) -> Measured:
        bench = import_module(f"benchmarks.{name}")
        return bench, asyncio.run(bench.measure(folder or FOLDER / name, bench.QUICK if options.quick else bench.FULL, show))

    return measured


def _data(name: str, options: Options) -> Path:
    if options.data is None:
        raise UserError(f"--data: bench {name} needs {DATA[name]}")
    return options.data


def _scale(options: Options, show: Show) -> Measured:
    from benchmarks import scale as bench

    report = asyncio.run(bench.measure(_data("scale", options), show, bench.QUICK if options.quick else bench.TRIALS))
    return bench, report


def _simulation(options: Options, show: Show) -> Measured:
    from benchmarks import simulation as bench

    folder = FOLDER / "simulation"
    folder.mkdir(parents=True, exist_ok=True)
    report = asyncio.run(bench.measure(folder, show, bench.QUICK if options.quick else bench.CASES))
    return bench, report


def _concurrency(options: Options, show: Show) -> Measured:
    from benchmarks import concurrency as bench

    report = bench.run(bench.QUICK if options.quick else bench.ConcurrencySettings(), show)
    return bench, report


def _gateway(options: Options, show: Show) -> Measured:
    from benchmarks import gateway as bench

    report = bench.run(bench.QUICK if options.quick else bench.GatewayBenchSettings(), options.vllm_python, show)
    return bench, report


def _messages(options: Options, show: Show) -> Measured:
    from benchmarks import messages as bench

    report = bench.run(bench.QUICK if options.quick else bench.MessagesSettings(), show)
    return bench, report


def _weight_sync(options: Options, show: Show) -> Measured:
    from benchmarks.weight_sync import bench

    settings = bench.settings(options.sizes, options.receivers, options.quick)
    report = asyncio.run(bench.measure(FOLDER, settings, show))
    return bench, report


def _rewards(options: Options, show: Show) -> Measured:
    from benchmarks import rewards as bench

    report = asyncio.run(
        bench.measure(_data("rewards", options), bench.QUICK if options.quick else bench.RewardsBenchSettings(), show)
    )
    return bench, report


def _rollout(options: Options, show: Show) -> Measured:
    from benchmarks import rollout as bench

    python = bench.interpreter(options.vllm_python or bench.DEFAULT_PYTHON)
    report = asyncio.run(
        bench.measure(FOLDER / "rollout", python, bench.QUICK if options.quick else bench.RolloutBenchSettings(), show)
    )
    return bench, report


def _staleness(options: Options, show: Show) -> Measured:
    from benchmarks.staleness import bench

    settings = bench.QUICK if options.quick else bench.StalenessSettings()
    settings = replace(settings, depth=options.depth or settings.depth)
    report = asyncio.run(bench.measure(FOLDER / "staleness" / settings.depth, settings, show, print))
    return bench, report


def _train(options: Options, show: Show) -> Measured:
    from benchmarks import inputs, train_trl
    from benchmarks import train as bench

    python = train_trl.interpreter(options.trl_python)
    if options.pretrained:
        config, settings = inputs.pretrained_config(), bench.PRETRAINED_QUICK if options.quick else bench.PRETRAINED
    else:
        config, settings = inputs.bench_config(INPUTS), bench.QUICK if options.quick else bench.TrainBenchSettings()
    return bench, asyncio.run(bench.measure(config, settings, python, show))


def _all(options: Options, show: Show) -> Measured:
    from benchmarks import every

    quick = replace(options, quick=True)
    each = {name: partial(bench, quick, show) for name, bench in BENCHES.items() if name != ALL}
    return every, every.measure(each, show)


BENCHES: dict[str, Callable[[Options, Show], Measured]] = {
    ALL: _all,
    "concurrency": _concurrency,
    "coordinator": _usual("coordinator", INPUTS),
    "depth": _usual("depth"),
    "engine": _usual("engine", INPUTS),
    "engines": _usual("engines"),
    "gateway": _gateway,
    "learning": _usual("learning"),
    "messages": _messages,
    "packing": _usual("packing"),
    "page": _usual("page"),
    "placement": _usual("placement"),
    "weight_sync": _weight_sync,
    "rewards": _rewards,
    "rollout": _rollout,
    "scale": _scale,
    "simulation": _simulation,
    "staleness": _staleness,
    "startup": _usual("startup"),
    "storm": _usual("storm"),
    "train": _train,
}
