"""`sluice bench engine`: decode tokens/s of the embedded rollout engine and of the plain loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from benchmarks.compared import Compared
from benchmarks.inputs import bench_config
from benchmarks.worker import Measured, Worker, total
from runtime.telemetry.shown import LiteralTable


class EngineBenchSettings(Struct, frozen=True):
    rounds: int = 4
    seconds: float = 3.0  # of one measure


FULL = EngineBenchSettings()
QUICK = EngineBenchSettings(rounds=2, seconds=2.0)


class Decoding(Struct):
    """Tokens per second of one process, and of two at once together. Prefill is in the time, not in the tokens."""

    one_process: float
    two_processes: float


class EngineBenchReport(Struct):
    """`rounds`: of one process, the engine's rate over the plain loop's, round by round."""

    engine: Decoding
    plain: Decoding
    rounds: list[float]

    @property
    def ratio(self) -> Decoding:
        return Decoding(self.engine.one_process / self.plain.one_process, self.engine.two_processes / self.plain.two_processes)


async def measure(
    folder: Path, settings: EngineBenchSettings, show: Callable[[str], None] = lambda line: None
) -> EngineBenchReport:
    """Each process has one thread. Raises UserError, ServiceFault."""
    config = bench_config(folder)
    alone: dict[str, list[Measured]] = {"decode": [], "plain decode": []}
    pairs: dict[str, list[tuple[Measured, Measured]]] = {"decode": [], "plain decode": []}
    async with Worker.started(config, 1) as first, Worker.started(config, 1) as second:
        for what in alone:
            show(f"building: {what}")
            await asyncio.gather(first.measure(what, settings.seconds / 10), second.measure(what, settings.seconds / 10))
        for number in range(settings.rounds):
            show(f"round {number + 1} of {settings.rounds}")
            for what in alone:
                alone[what].append(await first.measure(what, settings.seconds))
            for what in pairs:
                pairs[what].append(
                    await asyncio.gather(first.measure(what, settings.seconds), second.measure(what, settings.seconds))
                )
    engine, plain = (
        Decoding(total(alone[what]).rate, sum(total(side).rate for side in zip(*pairs[what], strict=True))) for what in alone
    )
    rounds = [own.rate / other.rate for own, other in zip(*alone.values(), strict=True)]
    return EngineBenchReport(engine, plain, rounds)


def compared(report: EngineBenchReport) -> list[Compared]:
    return [Compared("tokens/s, embedded engine / plain loop", report.rounds)]


def render(report: EngineBenchReport) -> list[LiteralTable]:
    return [_decoding(report)]


def _decoding(report: EngineBenchReport) -> LiteralTable:
    table = LiteralTable(title="Decoding, tokens/s", title_justify="left", title_style="bold")
    for name in ("", "embedded engine", "plain loop", "engine / plain"):
        table.add_column(name, justify="right" if name else "left")
    for label, key in (("one process, one thread", "one_process"), ("two processes at once", "two_processes")):
        engine, plain, ratio = (getattr(side, key) for side in (report.engine, report.plain, report.ratio))
        table.add_row(label, f"{engine:,.0f}", f"{plain:,.0f}", f"{ratio:.2f}")
    table.caption = "tiny Qwen2, float32, 64 sequences, replies of 15 tokens on average and 64 at most; prefill is in the time"
    table.caption_justify = "left"
    return table
