"""`sluice bench rollout`: tokens/s of the embedded rollout engine and of vLLM, the pause of an update, and the start."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import product
from pathlib import Path
from statistics import median

from msgspec import Struct
from msgspec.structs import replace

from benchmarks.compared import Compared
from benchmarks.packing import PackingShape
from benchmarks.worker import Measured, Worker, total
from runtime.config import Config, Rollout
from runtime.errors import UserError
from runtime.telemetry.shown import LiteralTable

ENGINES = ("torch", "vllm")
TRIAL = "benchmarks.rollout_trial"
DEFAULT_PYTHON = Path(".venv-vllm/bin/python")


class RolloutBenchSettings(Struct, frozen=True):
    shapes: tuple[PackingShape, ...] = (PackingShape(128, 4, 4, 2, 384), PackingShape(512, 4, 8, 4, 1536))
    sequences: tuple[int, ...] = (32, 128)  # generated at once
    rounds: int = 3
    seconds: float = 3.0  # of one measure of tokens
    updates: int = 34  # of one measure of pauses


QUICK = RolloutBenchSettings(shapes=(PackingShape(128, 4, 4, 2, 384),), sequences=(32,), rounds=2, updates=10)


class Pauses(Struct):
    """Seconds for which an update of the weights holds generation up."""

    p50: float
    p99: float
    updates: int


class RolloutCase(Struct):
    """`ratios`: vLLM's rate over the embedded engine's, round by round. `own_pauses`: vLLM's by its own pause and load, and
    `own_ratios` the medians of an update's over those, round by round."""

    shape: PackingShape
    sequences: int
    tokens_per_second: dict[str, float]
    ratios: list[float]
    pauses: dict[str, Pauses]
    own_pauses: Pauses
    own_ratios: list[float]


class RolloutBenchReport(Struct):
    cases: list[RolloutCase]
    start_seconds: dict[str, dict[str, float]]  # by shape and engine


def interpreter(path: Path) -> str:
    """Raises UserError where there is none."""
    if shutil.which(path) is None:
        hint = "; run make install-vllm" if path == DEFAULT_PYTHON else ""
        raise UserError(f"--vllm-python: '{path}' is not an executable{hint}")
    return str(path)


async def measure(
    folder: Path, vllm_python: str, settings: RolloutBenchSettings, show: Callable[[str], None] = lambda line: None
) -> RolloutBenchReport:
    """Both engines in processes of their own of one thread, in turn. Raises UserError, ServiceFault."""
    cases: list[RolloutCase] = []
    starts: dict[str, dict[str, float]] = {}
    for shape in settings.shapes:
        async with AsyncExitStack() as stack:
            workers: dict[str, Worker] = {}
            starts[shape.name] = {}
            for engine, python in zip(ENGINES, (sys.executable, vllm_python), strict=True):
                show(f"{shape.name}: starting {engine}")
                config = rollout_config(folder, shape, engine, max(settings.sequences))
                workers[engine] = await stack.enter_async_context(Worker.started(config, 1, python, TRIAL))
                starts[shape.name][engine] = Measured(**await workers[engine].hear("start")).seconds
            cases += [await _case(shape, sequences, workers, settings, show) for sequences in settings.sequences]
    return RolloutBenchReport(cases, starts)


def rollout_config(folder: Path, shape: PackingShape, engine: str, slots: int) -> Config:
    config = shape.bench_config(folder)
    fleet = Rollout(engine=engine, max_num_seqs=slots, dtype="float32")  # type: ignore[arg-type]
    return replace(config, services=replace(config.services, rollout=fleet))


async def _case(
    shape: PackingShape,
    sequences: int,
    workers: Mapping[str, Worker],
    settings: RolloutBenchSettings,
    show: Callable[[str], None],
) -> RolloutCase:
    for engine, worker in workers.items():  # the first of each is not counted
        await worker.ask({"what": "pauses", "sequences": sequences, "updates": 1, "own": engine == "vllm"})
    rates: dict[str, list[Measured]] = {engine: [] for engine in workers}
    pauses: dict[str, list[float]] = {engine: [] for engine in workers}
    own_pauses: list[float] = []
    own_ratios: list[float] = []
    for (number, what), (engine, worker) in product(product(range(settings.rounds), ("tokens", "pauses")), workers.items()):
        show(f"{shape.name}, {sequences} sequences: round {number + 1} of {settings.rounds}, {what}, {engine}")
        if what == "tokens":
            order = {"what": what, "sequences": sequences, "seconds": settings.seconds}
            rates[engine].append(Measured(**await worker.ask(order)))
        else:
            order = {"what": what, "sequences": sequences, "updates": settings.updates, "own": engine == "vllm"}
            found = await worker.ask(order)
            pauses[engine] += found["pauses"]
            if engine == "vllm":
                own_pauses += found["own"]
                own_ratios.append(median(found["pauses"]) / median(found["own"]))
    torch, vllm = (rates[engine] for engine in ENGINES)
    return RolloutCase(
        shape=shape,
        sequences=sequences,
        tokens_per_second={engine: total(rounds).rate for engine, rounds in rates.items()},
        ratios=[theirs.rate / ours.rate for ours, theirs in zip(torch, vllm, strict=True)],
        pauses={engine: _pauses(found) for engine, found in pauses.items()},
        own_pauses=_pauses(own_pauses),
        own_ratios=own_ratios,
    )


def _pauses(found: Sequence[float]) -> Pauses:
    return Pauses(rank(found, 0.5), rank(found, 0.99), len(found))


def rank(values: Sequence[float], share: float) -> float:
    """The value of rank ceil(`share` · n) among n >= 1."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def compared(report: RolloutBenchReport) -> list[Compared]:
    found = []
    for case in report.cases:
        found.append(Compared(f"tokens/s, vllm / torch, {case.shape.name}, {case.sequences}", case.ratios))
        found.append(Compared(f"an update in vllm / by its own means, {case.shape.name}, {case.sequences}", case.own_ratios))
    return found


def render(report: RolloutBenchReport) -> list[LiteralTable]:
    rates = LiteralTable(title="Generation, tokens/s", title_justify="left", title_style="bold")
    for name in ("", "sequences", "torch", "vllm", "vllm / torch", "of the rounds"):
        rates.add_column(name, justify="right" if name else "left")
    pauses = LiteralTable(title="Pause of an update, ms", title_justify="left", title_style="bold")
    shares = (f"{one} {share}" for one in (*ENGINES, "vllm's own") for share in ("p50", "p99"))
    for name in ("", "sequences", *shares, "vllm / own", "updates"):
        pauses.add_column(name, justify="right" if name else "left")
    for case in report.cases:
        told = (f"{case.tokens_per_second[engine]:,.0f}" for engine in ENGINES)
        spread = f"{min(case.ratios):.2f} – {max(case.ratios):.2f}"
        rates.add_row(case.shape.name, str(case.sequences), *told, f"{median(case.ratios):.2f}", spread)
        each = (*(case.pauses[engine] for engine in ENGINES), case.own_pauses)
        held = (f"{value * 1e3:.1f}" for one in each for value in (one.p50, one.p99))
        ratio = f"{median(case.own_ratios):.2f} ({min(case.own_ratios):.2f} – {max(case.own_ratios):.2f})"
        pauses.add_row(case.shape.name, str(case.sequences), *held, ratio, str(case.pauses["vllm"].updates))
    rates.caption = "Qwen2, float32, one thread each, prompts of 24 tokens, replies of 32 to 64; prefill is in the time"
    rates.caption_justify = "left"
    pauses.caption = "vllm's own: its pause, its load of the model's files, and the end of its pause"
    pauses.caption_justify = "left"
    starts = LiteralTable(title="Start of the engine, s", title_justify="left", title_style="bold")
    for name in ("", *ENGINES):
        starts.add_column(name, justify="right" if name else "left")
    for shape, seconds in report.start_seconds.items():
        starts.add_row(shape, *(f"{seconds[engine]:.1f}" for engine in ENGINES))
    return [rates, pauses, starts]
