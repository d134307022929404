"""`sluice bench engines`: the trainer on megatron-core beside the embedded one, each on one rank of one thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from benchmarks.compared import Compared
from benchmarks.intervals import ConfidenceInterval, t_interval
from benchmarks.packing import PackingSettings as Samples
from benchmarks.packing import PackingShape, packing_config
from benchmarks.worker import Measured, Worker, total
from runtime.config import Config
from runtime.config.model_checks import megatron_faults
from runtime.errors import UserError
from runtime.telemetry.shown import LiteralTable

ENGINES: tuple[Literal["torch"], Literal["megatron"]] = ("torch", "megatron")
PASSES, SAVE, LOAD = "passes", "save", "load"


class EnginesSettings(Struct, frozen=True):
    shape: PackingShape = PackingShape(512, 4, 8, 4, 1376)
    budget: int = 4096  # training.max_tokens_per_microbatch
    rounds: int = 8
    seconds: float = 2.0  # of one measure at least; it ends with a whole batch
    checkpoints: int = 5
    samples: Samples = Samples(reply_tokens=128)  # no longer, so that a round takes seconds


FULL = EnginesSettings()
QUICK = EnginesSettings(rounds=4, checkpoints=1)


class Engine(Struct):
    tokens_per_second: float  # real tokens, forward and backward, over all rounds
    save_seconds: float  # the median
    load_seconds: float


class Ratio(Struct):
    """Of megatron's tokens/s over torch's, pair by pair: the two of a pair were measured one right after the other."""

    pairs: list[float]
    median: float
    mean_within: ConfidenceInterval | None  # 95 % for the mean

    @classmethod
    def of(cls, pairs: Sequence[float]) -> Ratio:
        return cls(list(pairs), median(pairs), t_interval(pairs))


class EnginesReport(Struct):
    shape: PackingShape
    budget: int
    engines: dict[str, Engine]
    megatron_over_torch: Ratio


async def measure(folder: Path, settings: EnginesSettings, show: Callable[[str], None] = lambda line: None) -> EnginesReport:
    """Each engine in a process of its own; they take turns, and turns in who is first. Raises UserError, ServiceFault."""
    base = packing_config(folder, settings.shape, settings.budget, settings.samples)
    for fault in megatron_faults(_with(base, "megatron"), {"trainer": None}):
        raise UserError(f"bench engines: {fault}")
    passes: dict[str, list[Measured]] = {engine: [] for engine in ENGINES}
    saves: dict[str, list[float]] = {engine: [] for engine in ENGINES}
    loads: dict[str, list[float]] = {engine: [] for engine in ENGINES}
    async with AsyncExitStack() as stack:
        workers = {engine: await stack.enter_async_context(Worker.started(_with(base, engine), 1)) for engine in ENGINES}
        show("building the engines")
        await asyncio.gather(*(worker.measure(PASSES, 0.0) for worker in workers.values()))
        for number in range(settings.rounds):
            for engine in ENGINES if number % 2 else ENGINES[::-1]:
                show(f"round {number + 1} of {settings.rounds}: {engine}")
                passes[engine].append(await workers[engine].measure(PASSES, settings.seconds))
        for number in range(settings.checkpoints):
            for engine in ENGINES if number % 2 else ENGINES[::-1]:
                show(f"checkpoint {number + 1} of {settings.checkpoints}: {engine}")
                saves[engine].append((await workers[engine].measure(SAVE, 0.0)).seconds)
                loads[engine].append((await workers[engine].measure(LOAD, 0.0)).seconds)
    return EnginesReport(
        shape=settings.shape,
        budget=settings.budget,
        engines={
            engine: Engine(total(passes[engine]).rate, median(saves[engine]), median(loads[engine])) for engine in ENGINES
        },
        megatron_over_torch=Ratio.of(
            [core.rate / plain.rate for plain, core in zip(passes["torch"], passes["megatron"], strict=True)]
        ),
    )


def _with(config: Config, engine: Literal["torch", "megatron"]) -> Config:
    trainer = replace(config.services.trainer, engine=engine)
    return replace(config, services=replace(config.services, trainer=trainer))


def compared(report: EnginesReport) -> list[Compared]:
    return [Compared("tokens/s, megatron / torch", report.megatron_over_torch.pairs)]


def render(report: EnginesReport) -> list[LiteralTable]:
    title = f"Training engines, {report.shape.name}, micro-batches of {report.budget:,} tokens"
    table = LiteralTable(title=title, title_justify="left", title_style="bold")
    for name in ("", "forward and backward, tokens/s", "save, s", "load, s"):
        table.add_column(name, justify="right" if name else "left")
    for name, engine in report.engines.items():
        table.add_row(name, f"{engine.tokens_per_second:,.0f}", f"{engine.save_seconds:.2f}", f"{engine.load_seconds:.2f}")
    ratio = report.megatron_over_torch
    within = ratio.mean_within
    told = f", mean within {within.low:.2f} to {within.high:.2f} (95 %)" if within else ""
    table.caption = (
        f"megatron / torch: median {ratio.median:.2f} of {len(ratio.pairs)} pairs, "
        f"{min(ratio.pairs):.2f} to {max(ratio.pairs):.2f}{told}; float32, one thread, one rank; median times of checkpoints"
    )
    table.caption_justify = "left"
    return [table]
