"""`sluice bench train`: samples/s of a whole run, of a plain loop, of TRL, and the bound that the engines alone would allow."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from msgspec import Struct
from msgspec.structs import replace
from rich.console import Console

from benchmarks import train_trl
from benchmarks.inputs import bench_config
from benchmarks.worker import Measured, Worker, total
from launcher.commands.train import train
from launcher.view import View
from runtime.config import Config
from runtime.errors import ServiceFault
from runtime.status import Progress
from runtime.telemetry.shown import LiteralTable

ALONE = ("train", "generate", "reference")
AIM = 0.9  # of the bound
AIM_OVER_TRL = 2.5


class TrainBenchSettings(Struct, frozen=True):
    rounds: int = 2
    seconds: float = 5.0  # of one measure of the plain loop, and of the engines alone
    steps: int = 120  # of one run
    warm: int = 25  # steps at a run's start that are left out, as are those from `tail` before its end
    tail: int = 10
    trl_warm: int = 3  # steps of TRL's that are left out
    trl_steps: int = 12


class TrainBenchReport(Struct):
    """Rates in samples per second; `step_seconds` of the engines alone, by phase; `cpu_seconds` of one step, by process.

    `trl` is by number of threads, and empty where no environment has it.
    """

    samples_per_step: int
    pipeline: float
    plain_two_threads: float
    plain_two_processes: float
    step_seconds: dict[str, float]
    bound: float
    pipeline_over_bound: float
    pipeline_over_plain: float  # over the faster of the two plain ways
    cpu_seconds: dict[str, float]
    trl: dict[int, float]
    pipeline_over_trl: float | None  # over the faster number of threads


class SteadyWindow(Struct):
    """The steady part of one run: from one step to another, with the processor seconds that each process used."""

    steps: int
    seconds: float
    cpu: dict[str, float]


class Probe(View):
    """Watches a run's steps in the place of the progress bars."""

    def __init__(self, first: int, last: int):
        super().__init__(Console(quiet=True))
        self._first, self._last = first, last
        self._begin: tuple[int, float, dict[str, float]] | None = None
        self._end: tuple[int, float, dict[str, float]] | None = None

    def progress(self, progress: Progress) -> None:
        if progress.phase != "training":
            return
        if self._begin is None and progress.step >= self._first:
            self._begin = progress.step, time.monotonic(), cpu_seconds()
        if self._end is None and progress.step >= self._last:
            self._end = progress.step, time.monotonic(), cpu_seconds()

    def window(self) -> SteadyWindow:
        """Raises ServiceFault when the run did not come so far."""
        if self._begin is None or self._end is None:
            raise ServiceFault("bench", "run", f"the run did not reach step {self._last}")
        (first, begun, before), (last, ended, after) = self._begin, self._end
        return SteadyWindow(last - first, ended - begun, {name: after[name] - before[name] for name in after if name in before})


def cpu_seconds() -> dict[str, float]:
    """Processor seconds so far of this process (the launcher) and of each process of the run, by name."""
    own = psutil.Process()
    out = {"launcher": _seconds(own)}
    for child in own.children(recursive=True):
        try:
            command = child.cmdline()
            if "services.coordinator" in command:
                out["coordinator"] = _seconds(child)
            elif "--name" in command:
                out[command[command.index("--name") + 1]] = _seconds(child)
        except psutil.NoSuchProcess:
            continue
    return out


def _seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


async def measure(
    folder: Path, settings: TrainBenchSettings, trl_python: str | None = None, show: Callable[[str], None] = lambda line: None
) -> TrainBenchReport:
    """Runs, the plain loop, TRL where there is an interpreter that has it, and the engines alone, in turn.

    Raises UserError, ServiceFault.
    """
    config = bench_config(folder)
    windows: list[SteadyWindow] = []
    plain: list[Measured] = []
    pairs: list[tuple[Measured, Measured]] = []
    alone: dict[str, list[Measured]] = {what: [] for what in ALONE}
    trl: dict[int, list[Measured]] = {threads: [] for threads in train_trl.THREADS if trl_python is not None}
    async with (
        Worker.started(config, 1) as first,
        Worker.started(config, 1) as second,
        Worker.started(config, 2) as both,
    ):
        for number in range(settings.rounds):
            show(f"round {number + 1} of {settings.rounds}: a run of {settings.steps} steps")
            windows.append(await _run(config, settings))
            show(f"round {number + 1} of {settings.rounds}: the plain loop")
            for seconds in (0.1, settings.seconds):  # the first time warms up
                threaded = await both.measure("plain", seconds)
                pair = await asyncio.gather(first.measure("plain", seconds), second.measure("plain", seconds))
            plain.append(threaded)
            pairs.append(pair)
            for threads, found in trl.items():
                show(f"round {number + 1} of {settings.rounds}: TRL, threads: {threads}")
                assert trl_python is not None
                found.append(await train_trl.trial(config, trl_python, threads, settings.trl_warm, settings.trl_steps))
            show(f"round {number + 1} of {settings.rounds}: the engines alone")
            for what in ALONE:
                await first.measure(what, 0.1)
                alone[what].append(await first.measure(what, settings.seconds))
    processes = sum(total(side).rate for side in zip(*pairs, strict=True))
    return _report(config, windows, total(plain).rate, processes, alone, trl)


async def _run(config: Config, settings: TrainBenchSettings) -> SteadyWindow:
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
        run = replace(config.run, dir=folder)
        probe = Probe(settings.warm, settings.steps - settings.tail)
        await train(replace(config, run=run, training=replace(config.training, steps=settings.steps)), probe)
        return probe.window()


def _report(
    config: Config,
    windows: list[SteadyWindow],
    threaded: float,
    processes: float,
    alone: dict[str, list[Measured]],
    trl: dict[int, list[Measured]],
) -> TrainBenchReport:
    samples = config.training.groups_per_step * config.sampling.group_size
    steps = sum(window.steps for window in windows)
    pipeline = samples * steps / sum(window.seconds for window in windows)
    seconds = {what: samples / total(rounds).rate for what, rounds in alone.items()}
    bound = bound_of(samples, seconds)
    trl_rates = {threads: total(rounds).rate for threads, rounds in trl.items()}
    return TrainBenchReport(
        samples_per_step=samples,
        pipeline=pipeline,
        plain_two_threads=threaded,
        plain_two_processes=processes,
        step_seconds=seconds,
        bound=bound,
        pipeline_over_bound=pipeline / bound,
        pipeline_over_plain=pipeline / max(threaded, processes),
        cpu_seconds={name: sum(window.cpu[name] for window in windows) / steps for name in windows[0].cpu},
        trl=trl_rates,
        pipeline_over_trl=pipeline / max(trl_rates.values()) if trl_rates else None,
    )


def bound_of(samples: int, seconds: dict[str, float]) -> float:
    """Samples per second of two cores that never wait, one training, the other generating and referring."""
    return samples / max(seconds["train"], seconds["generate"] + seconds["reference"])


def render(report: TrainBenchReport) -> list[LiteralTable]:
    rates = LiteralTable(title="Training, samples/s", title_justify="left", title_style="bold", show_header=False)
    rates.add_column()
    rates.add_column(justify="right")
    rates.add_row("whole run (every service), steady state", f"{report.pipeline:,.0f}")
    rates.add_row("plain loop, one process of two threads", f"{report.plain_two_threads:,.0f}")
    rates.add_row("plain loop, two independent processes of one thread", f"{report.plain_two_processes:,.0f}")
    for threads, rate in report.trl.items():
        rates.add_row(f"TRL's GRPOTrainer, one process, threads: {threads}", f"{rate:,.0f}")
    seconds = report.step_seconds
    parts = ", ".join(f"{what} {value * 1e3:.1f} ms" for what, value in seconds.items())
    rates.add_row(f"bound of the engines alone ({parts})", f"{report.bound:,.0f}")
    rates.add_row(f"run / bound (aim {AIM})", f"{report.pipeline_over_bound:.2f}")
    rates.add_row("run / faster plain loop", f"{report.pipeline_over_plain:.2f}")
    if report.pipeline_over_trl is not None:
        rates.add_row(f"run / faster TRL (aim {AIM_OVER_TRL})", f"{report.pipeline_over_trl:.2f}")
    rates.caption = (
        f"tiny Qwen2, float32, {report.samples_per_step} samples a step, replies of 15 tokens on average and 64 at most; "
        f"bound = {report.samples_per_step} / max(train, generate + reference)"
    )
    if report.pipeline_over_trl is None:
        rates.caption += f"\n{train_trl.MISSING}"
    rates.caption_justify = "left"
    cpu = LiteralTable(title="Processor time of a run, ms a step", title_justify="left", title_style="bold")
    cpu.add_column("process")
    cpu.add_column("ms", justify="right")
    for name, value in sorted(report.cpu_seconds.items(), key=lambda item: -item[1]):
        cpu.add_row(name, f"{value * 1e3:.1f}")
    cpu.add_section()
    cpu.add_row("all", f"{sum(report.cpu_seconds.values()) * 1e3:.1f}")
    wall = report.samples_per_step / report.pipeline
    cpu.caption = f"a step takes {wall * 1e3:.1f} ms"
    cpu.caption_justify = "left"
    return [rates, cpu]
