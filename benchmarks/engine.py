"""`sluice bench engine`: decode tokens/s of the embedded rollout engine and of the plain loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from statistics import median

from msgspec import Struct

from benchmarks.compared import Compared
from benchmarks.drafts_trial import DRAFT_WAYS, SLOTS, TEMPERATURES
from benchmarks.inputs import bench_config
from benchmarks.worker import Measured, Worker, total
from runtime.telemetry.shown import LiteralTable


class EngineBenchSettings(Struct, frozen=True):
    rounds: int = 4
    seconds: float = 3.0  # of one measure
    pairs: int = 12  # of engines with and without drafts, each for a tenth of that time


FULL = EngineBenchSettings()
QUICK = EngineBenchSettings(rounds=2, seconds=2.0)


class Decoding(Struct):
    """Tokens per second of one process, and of two at once together. Prefill is in the time, not in the tokens."""

    one_process: float
    two_processes: float


class DraftedDecoding(Struct):
    """Tokens per second by pair, with drafts and without."""

    drafts: list[float]
    none: list[float]

    @property
    def ratios(self) -> list[float]:
        return [one / other for one, other in zip(self.drafts, self.none, strict=True)]


class EngineBenchReport(Struct):
    """`rounds`: of one process, the engine's rate over the plain loop's, round by round."""

    engine: Decoding
    plain: Decoding
    rounds: list[float]
    drafted: dict[str, DraftedDecoding] = {}  # replies that are alike, and replies that are not

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
        drafted = await _drafted(first, settings, show)
    engine, plain = (
        Decoding(total(alone[what]).rate, sum(total(side).rate for side in zip(*pairs[what], strict=True))) for what in alone
    )
    rounds = [own.rate / other.rate for own, other in zip(*alone.values(), strict=True)]
    return EngineBenchReport(engine, plain, rounds, drafted)


async def _drafted(worker: Worker, settings: EngineBenchSettings, show: Callable[[str], None]) -> dict[str, DraftedDecoding]:
    rates: dict[str, list[float]] = {way: [] for way in DRAFT_WAYS}
    for way in DRAFT_WAYS:
        show(f"building: {way}")
        await worker.measure(way, settings.seconds)
    for number in range(settings.pairs):
        show(f"pair {number + 1} of {settings.pairs}")
        for way in DRAFT_WAYS if number % 2 else DRAFT_WAYS[::-1]:
            rates[way].append((await worker.measure(way, settings.seconds / 10)).rate)
    return {replies: DraftedDecoding(rates[replies], rates[f"{replies}, no drafts"]) for replies in TEMPERATURES}


def compared(report: EngineBenchReport) -> list[Compared]:
    asked = {"alike": "≥ 1.3"}
    return [
        Compared("tokens/s, embedded engine / plain loop", report.rounds),
        *(
            Compared(f"tokens/s, drafts / none, replies that are {replies}", each.ratios, asked.get(replies, "≥ 0.98"))
            for replies, each in report.drafted.items()
        ),
    ]


def render(report: EngineBenchReport) -> list[LiteralTable]:
    return [_decoding(report), _drafts(report)]


def _drafts(report: EngineBenchReport) -> LiteralTable:
    table = LiteralTable(title=f"Drafts, {SLOTS} sequences, tokens/s", title_justify="left", title_style="bold")
    for name in ("", "with", "without", "with / without, median (lowest - highest)"):
        table.add_column(name, justify="right" if name else "left")
    for replies, each in report.drafted.items():
        ratios = each.ratios
        table.add_row(
            f"replies that are {replies}",
            f"{median(each.drafts):,.0f}",
            f"{median(each.none):,.0f}",
            f"{median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f})",
        )
    return table


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
