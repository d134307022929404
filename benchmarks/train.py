"""`sluice bench train`: samples/s of a whole run, of a plain loop, of TRL, and the bound that the engines alone would allow."""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

import psutil
from msgspec import Struct
from msgspec.structs import replace
from rich.console import Console

from benchmarks import train_trl
from benchmarks.compared import Compared
from benchmarks.train_trl import TrlMeasured
from benchmarks.worker import Measured, Worker, total
from launcher.commands.train import train
from launcher.view import View
from runtime import run_files
from runtime.config import Config
from runtime.errors import ServiceFault
from runtime.status import Progress
from runtime.telemetry.record import read_jsonl
from runtime.telemetry.shown import LiteralTable

ALONE = ("train", "generate", "reference")
ARITHMETIC = ("train products", "products")
SERVICES = ("coordinator", "reward-0", "launcher")  # what is no engine, whole; of the others' processes the engines are most
AIM_OF_MEMORY = 0.5  # of TRL's
AIM_OF_PRODUCTS = 0.7  # of the rate of matrix products
GOAL = 0.5  # mean reward of two steps in a row, to which the seconds are measured


class TrainBenchSettings(Struct, frozen=True):
    workload: str = "tiny Qwen2, float32, replies of 15 tokens on average and 64 at most"
    aim: float = 0.85  # of the bound
    aim_over_trl: float = 5
    pretrained: bool = False  # the model learns, and is of a size at which its memory and its arithmetic count
    rounds: int = 2
    seconds: float = 5.0  # of one measure of the plain loop, and of the engines alone
    steps: int = 120  # of one run
    warm: int = 25  # steps at a run's start that are left out, as are those from `tail` before its end
    tail: int = 10
    trl_warm: int = 3  # steps of TRL's that are left out
    trl_steps: int = 12
    trl_threads: tuple[int, ...] = (1, 2)


QUICK = TrainBenchSettings(seconds=3.0, steps=80, trl_steps=6)
PRETRAINED = TrainBenchSettings(
    workload="SmolLM2-135M-Instruct, float32, replies of 10 tokens at most",
    aim=0.9,
    aim_over_trl=6,
    pretrained=True,
    rounds=1,  # takes a quarter of an hour
    seconds=12.0,
    steps=16,
    warm=3,
    tail=1,
    trl_warm=1,
    trl_steps=5,
    trl_threads=(2,),
)
PRETRAINED_QUICK = replace(PRETRAINED, seconds=6.0, steps=10, trl_steps=3)


class TrainRound(Struct):
    """Rates of one round in samples per second, in the order in which they were measured."""

    run: float
    plain: float  # the faster of the two plain ways
    trl: float | None  # the faster number of threads
    bound: float


class TrainBenchReport(Struct):
    """Rates in samples per second, over all rounds; `step_seconds` of the engines alone, by phase. By process: `cpu_seconds` of
    one step, and `wake_ups` of one sample (what the kernel calls voluntary switches; Linux).

    `peak_bytes` of a run are proportional (PSS) and of all processes, those of TRL resident. `seconds_to_goal`: the median of
    the rounds that came to GOAL. `step_flops`: of the products that a step of training computes; `products`: floating-point
    operations per second of large float32 products, one thread; both 0 where the settings are not `pretrained`.

    `bound_with_services` is that of two cores that never wait, and do the engines' work as alone and that of the `SERVICES` as
    in the run. `trl` is by number of threads, and empty where no environment has it.
    """

    settings: TrainBenchSettings
    samples_per_step: int
    pipeline: float
    plain_two_threads: float
    plain_two_processes: float
    step_seconds: dict[str, float]
    bound: float
    bound_with_services: float
    pipeline_over_bound: float
    pipeline_over_plain: float  # over the faster of the two plain ways
    cpu_seconds: dict[str, float]
    wake_ups: dict[str, float]
    rounds: list[TrainRound]
    trl: dict[int, float]
    pipeline_over_trl: float | None  # over the faster number of threads
    peak_bytes: dict[str, int]
    seconds_to_goal: dict[str, float | None]
    step_flops: float
    products: float

    @property
    def product_share(self) -> float:
        """The trainer's rate of floating-point operations, alone, over that of large products."""
        return self.step_flops / self.step_seconds["train"] / self.products


class SteadyWindow(Struct):
    """The steady part of one run: from one step to another, with the processor seconds and wake-ups of each process.

    Of the whole run: the largest memory, and the seconds since training began and the mean reward of each step.
    """

    steps: int
    seconds: float
    cpu: dict[str, float]
    wake_ups: dict[str, int]
    peak_bytes: int = 0
    points: list[tuple[float, float]] = []


class ProcessUse(NamedTuple):
    """Of one process so far, all its threads together."""

    cpu: float
    wake_ups: int


class Probe(View):
    """Watches a run's steps in the place of the progress bars."""

    def __init__(self, first: int, last: int):
        super().__init__(Console(quiet=True))
        self._first, self._last = first, last
        self._begin: tuple[int, float, dict[str, ProcessUse]] | None = None
        self._end: tuple[int, float, dict[str, ProcessUse]] | None = None
        self.training_since = 0.0  # the epoch's seconds

    def progress(self, progress: Progress) -> None:
        if progress.phase != "training":
            return
        self.training_since = self.training_since or time.time()
        if self._begin is None and progress.step >= self._first:
            self._begin = progress.step, time.monotonic(), used()
        if self._end is None and progress.step >= self._last:
            self._end = progress.step, time.monotonic(), used()

    def window(self) -> SteadyWindow:
        """Raises ServiceFault when the run did not come so far."""
        if self._begin is None or self._end is None:
            raise ServiceFault("bench", "run", f"the run did not reach step {self._last}")
        (first, begun, before), (last, ended, after) = self._begin, self._end
        both = [name for name in after if name in before]
        return SteadyWindow(
            steps=last - first,
            seconds=ended - begun,
            cpu={name: after[name].cpu - before[name].cpu for name in both},
            wake_ups={name: after[name].wake_ups - before[name].wake_ups for name in both},
        )


def used() -> dict[str, ProcessUse]:
    """What this process (the launcher) and each process of the run have used so far, by name."""
    own = psutil.Process()
    out = {"launcher": _used(own)}
    for child in own.children(recursive=True):
        with suppress(psutil.NoSuchProcess, OSError):  # it has ended meanwhile
            command = child.cmdline()
            if "services.coordinator" in command:
                out["coordinator"] = _used(child)
            elif "--name" in command:
                out[command[command.index("--name") + 1]] = _used(child)
    return out


def _used(process: psutil.Process) -> ProcessUse:
    times = process.cpu_times()
    threads = Path(f"/proc/{process.pid}/task").glob("*/status")
    return ProcessUse(times.user + times.system, sum(int(_WAKE_UPS.findall(thread.read_text())[0]) for thread in threads))


_WAKE_UPS = re.compile(r"^voluntary_ctxt_switches:\s*(\d+)", re.MULTILINE)


async def measure(
    config: Config, settings: TrainBenchSettings, trl_python: str | None = None, show: Callable[[str], None] = lambda line: None
) -> TrainBenchReport:
    """Runs, the plain loop, TRL where there is an interpreter that has it, and the engines alone, in turn.

    Raises UserError, ServiceFault.
    """
    windows: list[SteadyWindow] = []
    plain: list[Measured] = []
    pairs: list[tuple[Measured, Measured]] = []
    trl: dict[int, list[TrlMeasured]] = {threads: [] for threads in settings.trl_threads if trl_python is not None}
    alone: dict[str, list[Measured]] = {what: [] for what in ALONE if what != "reference" or config.algorithm.kl_coefficient}
    arithmetic: list[Measured] = []
    for number in range(settings.rounds):
        say = partial("round {} of {}: {}".format, number + 1, settings.rounds)
        show(say(f"a run of {settings.steps} steps"))
        windows.append(await _run(config, settings))
        # Workers end before TRL begins: each of them has a model and its optimizer in memory.
        async with Worker.started(config, 1) as first, Worker.started(config, 1) as second, Worker.started(config, 2) as both:
            show(say("the plain loop"))
            for seconds in (0.1, settings.seconds):  # the first time warms up
                threaded = await both.measure("plain", seconds)
                pair = await asyncio.gather(first.measure("plain", seconds), second.measure("plain", seconds))
            plain.append(threaded)
            pairs.append(pair)
            show(say("the engines alone"))
            for what in alone:
                await first.measure(what, 0.1)
                alone[what].append(await first.measure(what, settings.seconds))
            if settings.pretrained:
                arithmetic = [await first.measure(what, settings.seconds) for what in ARITHMETIC]
        for threads, found in trl.items():
            show(say(f"TRL, threads: {threads}"))
            assert trl_python is not None
            found.append(await train_trl.trial(config, trl_python, threads, settings.trl_warm, settings.trl_steps))
    return _report(config, settings, windows, plain, pairs, alone, trl, arithmetic)


async def _run(config: Config, settings: TrainBenchSettings) -> SteadyWindow:
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
        run = replace(config.run, dir=folder)
        probe = Probe(settings.warm, settings.steps - settings.tail)
        await train(replace(config, run=run, training=replace(config.training, steps=settings.steps)), probe)
        window, rows = probe.window(), read_jsonl(Path(folder) / run_files.METRICS)
        window.points = [(row["time"] - probe.training_since, row["score/mean"]) for row in rows if "score/mean" in row]
        summary = json.loads((Path(folder) / run_files.SUMMARY).read_text(encoding="utf-8"))
        window.peak_bytes = summary["peak_pss_bytes"]
        return window


def _seconds_to_goal(rounds: Iterable[Sequence[tuple[float, float]]]) -> float | None:
    """The median, over the rounds, of the seconds until a step and the one before it have a mean reward of GOAL or more."""
    reached = [
        next((seconds for (_, before), (seconds, reward) in pairwise(points) if (before + reward) / 2 >= GOAL), None)
        for points in rounds
    ]
    found = [seconds for seconds in reached if seconds is not None]
    return median(found) if found else None


def _report(
    config: Config,
    settings: TrainBenchSettings,
    windows: list[SteadyWindow],
    plain: list[Measured],
    pairs: list[tuple[Measured, Measured]],
    alone: dict[str, list[Measured]],
    trl: dict[int, list[TrlMeasured]],
    arithmetic: Sequence[Measured] = (),
) -> TrainBenchReport:
    samples = config.training.groups_per_step * config.sampling.group_size
    steps = sum(window.steps for window in windows)
    pipeline = samples * steps / sum(window.seconds for window in windows)
    seconds = {what: samples / total(rounds).rate for what, rounds in alone.items()}
    bound = bound_of(samples, seconds)
    trl_rates = {threads: total(rounds).rate for threads, rounds in trl.items()}
    threaded, processes = total(plain).rate, sum(total(side).rate for side in zip(*pairs, strict=True))
    cpu = {name: sum(window.cpu[name] for window in windows) / steps for name in windows[0].cpu}
    trials = [trial for rounds in trl.values() for trial in rounds]
    work = sum(seconds.values()) + sum(cpu.get(name, 0.0) for name in SERVICES)
    return TrainBenchReport(
        samples_per_step=samples,
        pipeline=pipeline,
        plain_two_threads=threaded,
        plain_two_processes=processes,
        step_seconds=seconds,
        bound=bound,
        bound_with_services=samples / max(1 / bound * samples, work / 2),
        pipeline_over_bound=pipeline / bound,
        pipeline_over_plain=pipeline / max(threaded, processes),
        cpu_seconds=cpu,
        wake_ups={name: sum(window.wake_ups[name] for window in windows) / steps / samples for name in cpu},
        rounds=[
            TrainRound(
                run=samples * window.steps / window.seconds,
                plain=max(plain[number].rate, sum(side.rate for side in pairs[number])),
                trl=max((rounds[number].rate for rounds in trl.values()), default=None),
                bound=bound_of(samples, {what: samples / rounds[number].rate for what, rounds in alone.items()}),
            )
            for number, window in enumerate(windows)
        ],
        trl=trl_rates,
        pipeline_over_trl=pipeline / max(trl_rates.values()) if trl_rates else None,
        peak_bytes={
            "run": max(window.peak_bytes for window in windows),
            **({"trl": max(trial.peak_bytes for trial in trials)} if trials else {}),
        },
        seconds_to_goal={
            "run": _seconds_to_goal(window.points for window in windows),
            **({"trl": _seconds_to_goal(trial.points for trial in trials)} if trials else {}),
        },
        settings=settings,
        step_flops=arithmetic[0].count if arithmetic else 0.0,
        products=arithmetic[1].rate if arithmetic else 0.0,
    )


def compared(report: TrainBenchReport) -> list[Compared]:
    rounds, settings, peak = report.rounds, report.settings, report.peak_bytes
    out = [
        Compared.of("run / bound of the engines alone", [one.run / one.bound for one in rounds], f"≥ {settings.aim:g}"),
        Compared.of("run / faster plain loop", [one.run / one.plain for one in rounds]),
        Compared.of("run / faster TRL", [one.run / one.trl for one in rounds if one.trl], f"≥ {settings.aim_over_trl:g}"),
    ]
    if settings.pretrained:
        memory = [peak["run"] / peak["trl"]] if "trl" in peak else []
        out.append(Compared("memory of a run / of TRL", memory, f"≤ {AIM_OF_MEMORY}"))
        out.append(Compared("trainer / rate of products", [report.product_share], f"≥ {AIM_OF_PRODUCTS}"))
    return out


def bound_of(samples: int, seconds: dict[str, float]) -> float:
    """Samples per second of two cores that never wait, one training, the other generating and referring."""
    return samples / max(seconds["train"], seconds["generate"] + seconds.get("reference", 0.0))


_WAYS = {"run": "whole run", "trl": "TRL"}


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def render(report: TrainBenchReport) -> list[LiteralTable]:
    rates = LiteralTable(title="Training, samples/s", title_justify="left", title_style="bold", show_header=False)
    rates.add_column()
    rates.add_column(justify="right")
    rates.add_row("whole run (every service), steady state", _rate(report.pipeline))
    rates.add_row("plain loop, one process of two threads", _rate(report.plain_two_threads))
    rates.add_row("plain loop, two independent processes of one thread", _rate(report.plain_two_processes))
    for threads, rate in report.trl.items():
        rates.add_row(f"TRL's GRPOTrainer, one process, threads: {threads}", _rate(rate))
    seconds, settings = report.step_seconds, report.settings
    parts = ", ".join(f"{what} {value * 1e3:,.1f} ms" for what, value in seconds.items())
    rates.add_row(f"bound of the engines alone ({parts})", _rate(report.bound))
    rates.add_row(f"run / bound (aim {settings.aim:g})", f"{report.pipeline_over_bound:.2f}")
    with_services = report.pipeline / report.bound_with_services
    rates.add_row(f"run / bound with the services' own work ({_rate(report.bound_with_services)})", f"{with_services:.2f}")
    rates.add_row("run / faster plain loop", f"{report.pipeline_over_plain:.2f}")
    if report.pipeline_over_trl is not None:
        rates.add_row(f"run / faster TRL (aim {settings.aim_over_trl:g})", f"{report.pipeline_over_trl:.2f}")
    for way, held in report.peak_bytes.items():
        rates.add_row(f"memory at most, GiB: {_WAYS[way]}", f"{held / 2**30:.2f}")
    for way, reached in report.seconds_to_goal.items() if settings.pretrained else ():
        told = "not reached" if reached is None else f"{reached:.0f}"
        rates.add_row(f"seconds of training until {GOAL:.0%} of two steps' replies are right: {_WAYS[way]}", told)
    if settings.pretrained:
        told = f"{report.step_flops / 1e9:,.0f} GFLOP a step; products do {report.products / 1e9:.0f} GFLOP/s"
        rates.add_row(f"trainer alone / rate of products ({told}; aim {AIM_OF_PRODUCTS})", f"{report.product_share:.2f}")
    rates.caption = (
        f"{settings.workload}; {report.samples_per_step} samples a step; "
        f"bound = {report.samples_per_step} / max(train, generate + reference)"
    )
    if report.pipeline_over_trl is None:
        rates.caption += f"\n{train_trl.MISSING}"
    rates.caption_justify = "left"
    cpu = LiteralTable(title="A run's processes", title_justify="left", title_style="bold")
    for column in ("process", "processor time, ms a step", "wake-ups a sample"):
        cpu.add_column(column, justify="left" if column == "process" else "right")
    for name, value in sorted(report.cpu_seconds.items(), key=lambda item: -item[1]):
        cpu.add_row(name, f"{value * 1e3:.1f}", f"{report.wake_ups[name]:.2f}")
    cpu.add_section()
    cpu.add_row("all", f"{sum(report.cpu_seconds.values()) * 1e3:.1f}", f"{sum(report.wake_ups.values()):.2f}")
    wall = report.samples_per_step / report.pipeline
    cpu.caption = f"a step takes {wall * 1e3:.1f} ms"
    cpu.caption_justify = "left"
    return [rates, cpu]
