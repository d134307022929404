"""The figures of `sluice bench weight_sync`, and their tables. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from msgspec import Struct

from runtime.telemetry.shown import LiteralTable

GIGA = 1e9


class TransportFigures(Struct):
    """One transport. Each round has a weight sync and, next to it, the plain way that it is compared with."""

    baseline: str
    baseline_seconds: list[float]
    seconds: list[float]  # from the requests to the commit
    bytes: int  # sent to each receiver

    @property
    def ratios(self) -> list[float]:
        """Of the rates, round by round: 1 is as fast as the baseline."""
        return [plain / ours for plain, ours in zip(self.baseline_seconds, self.seconds, strict=True)]


class MemoryPasses(Struct):
    """What passes over the memory cost the sender, one thread, bytes per second. `gather` counts bytes of bfloat16."""

    checksum: float
    copy: float
    gather: float


class Sized(Struct):
    """Of one size. `ways` has the seconds of each round; `left_out` says why a way is not in it."""

    megabytes: int
    ways: dict[str, list[float]]
    left_out: dict[str, str]
    published: dict[str, TransportFigures]
    passes: MemoryPasses


class Transfers(Struct):
    receivers: int
    sizes: list[Sized]


def render(report: Transfers, first: str) -> list[LiteralTable]:
    """`first`: the way that the others are compared with."""
    tables = []
    for sized in report.sizes:
        nbytes = sized.megabytes * 1e6
        tables += [_ways(sized, nbytes, first), _published(sized, nbytes)]
    for table in tables:
        table.title_justify = table.caption_justify = "left"
        table.title_style = "bold"
    return tables


def _ways(sized: Sized, nbytes: float, first: str) -> LiteralTable:
    table = LiteralTable(title=f"{sized.megabytes:,} MB in uneven tensors: plain ways")
    for name in ("", "GB/s", "of the rounds", f"of {first}"):
        table.add_column(name, justify="right" if name else "left")
    for way, seconds in sized.ways.items():
        ratios = [base / own for base, own in zip(sized.ways[first], seconds, strict=True)]
        table.add_row(way, *rates(seconds, nbytes), "" if way == first else spread(ratios))
    for way, why in sized.left_out.items():
        table.add_row(way, "–", why, "")
    passes = sized.passes
    table.caption = (
        f"passes of one thread: xxh3 {passes.checksum / GIGA:.1f}, copy {passes.copy / GIGA:.1f}, "
        f"gather float32 → bfloat16 {passes.gather / GIGA:.1f} GB/s"
    )
    return table


def _published(sized: Sized, nbytes: float) -> LiteralTable:
    table = LiteralTable(title=f"{sized.megabytes:,} MB: published, requests to commit, checksums included")
    for name in ("transport", "GB/s", "of the rounds", "of its baseline", "", "MB sent"):
        table.add_column(name, justify="left" if name in ("transport", "") else "right")
    for transport, found in sized.published.items():
        sent = f"{found.bytes / 1e6:,.1f}"
        table.add_row(transport, *rates(found.seconds, nbytes), spread(found.ratios), found.baseline, sent)
    return table


def rates(seconds: Sequence[float], nbytes: float) -> tuple[str, str]:
    """The median and the range, GB/s."""
    each = [nbytes / GIGA / one for one in seconds]
    return f"{median(each):.2f}", f"{min(each):.2f} – {max(each):.2f}"


def spread(ratios: Sequence[float]) -> str:
    return f"{median(ratios):.2f} ({min(ratios):.2f} – {max(ratios):.2f})"
