"""What publishing takes in a whole run of `sluice train`, where training and generation are beside it, phase by phase."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

import psutil
from msgspec import Struct
from msgspec.structs import replace

from benchmarks.packing import PackingShape
from benchmarks.staleness.runs import train_to_its_end
from benchmarks.weight_sync.transfers import Transfers
from runtime import run_files
from runtime.config import Config, loading
from runtime.errors import ServiceFault
from runtime.telemetry.record import read_jsonl
from runtime.telemetry.shown import LiteralTable
from runtime.telemetry.summary import Summary

DEADLINE = 900.0  # seconds of the run, whatever else the machine does
PHASES = ("gather", "wait", "copy", "hash", "stage", "swap")
METRICS = ("seconds", *(f"{phase}_seconds" for phase in PHASES))


class InRunSettings(Struct, frozen=True):
    """`dtype`: published; the masters, and the rollout's weights, are float32. `memory`: bytes that must be free."""

    shape: PackingShape = PackingShape(512, 8, 8, 4, 2048)  # 63 MB of bfloat16
    dtype: str = "bfloat16"
    steps: int = 8
    memory: int = 0


# Qwen2.5-0.5B's shape: 494 M parameters, 988 MB of bfloat16. It took 15 GiB once; a run that swaps says nothing.
HALF = InRunSettings(PackingShape(896, 24, 14, 2, 4864, 151_936), steps=6, memory=16 << 30)


class InRun(Struct):
    """`first`: seconds of version 0, the rendezvous included. `later`: of each version after it the `METRICS`, in order.
    `peak`: bytes of memory of all processes together."""

    megabytes: float
    first: float
    later: list[list[float]]
    peak: int


def without(settings: InRunSettings) -> str:
    """Why this run is not made, or ""."""
    free = psutil.virtual_memory().available
    return f"needs {settings.memory / 1e9:.0f} GB of memory, {free / 1e9:.1f} are free" if settings.memory > free else ""


async def measure(folder: Path, settings: InRunSettings, show: Callable[[str], None] = lambda line: None) -> InRun:
    """One trainer and one rollout; `folder` exists. Raises ServiceFault where the run fails."""
    show(f"a run of {settings.steps} steps, {settings.shape.name}")
    with tempfile.TemporaryDirectory(prefix="weight sync-", dir=folder) as scratch:
        config = run_config(folder / "weight_sync", Path(scratch) / "run", settings)
        (Path(scratch) / "run.yaml").write_text(loading.to_yaml(config), encoding="utf-8")
        await train_to_its_end("weight_sync", Path(scratch) / "run.yaml", (), Path(scratch), DEADLINE)
        points = [point for point in read_jsonl(Path(scratch) / "run" / run_files.METRICS) if "weight_sync/seconds" in point]
        summary = Summary.read(Path(scratch) / "run")
    if not points:
        raise ServiceFault("bench", "run", "published nothing")
    later = [[float(point[f"weight_sync/{name}"]) for name in METRICS] for point in points]
    return InRun(points[-1]["weight_sync/bytes"] / 1e6, summary.startup["first weight sync"], later, summary.peak_pss_bytes)


def run_config(inputs: Path, run: Path, settings: InRunSettings) -> Config:
    """The bench's, with steps as short as they may be; its model lies under `inputs`."""
    config = settings.shape.bench_config(inputs)
    return replace(
        config,
        run=replace(config.run, name="weight_sync", dir=str(run)),
        sampling=replace(config.sampling, group_size=4, max_new_tokens=16),
        algorithm=replace(config.algorithm, kl_coefficient=0.0),
        training=replace(config.training, steps=settings.steps, groups_per_step=2, staleness=1),
        weight_sync=replace(config.weight_sync, dtype=settings.dtype),  # type: ignore[type-var]
    )


def render(runs: Sequence[InRun], left_out: Mapping[str, str], transfers: Transfers) -> list[LiteralTable]:
    """`left_out`: the models of other runs, and why. `transfers`: what to compare with."""
    tables = [_table(run, transfers) for run in runs]
    for name, why in left_out.items():
        table = LiteralTable("left out", "why", title="In a run", title_justify="left", title_style="bold")
        table.add_row(name, why)
        tables.append(table)
    return tables


def _table(found: InRun, transfers: Transfers) -> LiteralTable:
    title = f"In a run: {found.megabytes:,.0f} MB, ms; {found.peak / 2**30:.1f} GiB of memory"
    table = LiteralTable(title=title, title_justify="left", title_style="bold")
    for name in ("", "in all", *PHASES):
        table.add_column(name, justify="right" if name else "left")
    table.add_row("version 0", f"{found.first * 1e3:,.0f}")
    table.add_row("later, the median", *(f"{median(column) * 1e3:,.1f}" for column in zip(*found.later, strict=True)))
    table.add_row("the worst", *(f"{max(column) * 1e3:,.1f}" for column in zip(*found.later, strict=True)))
    if (plain := _plain(found, transfers)) is not None:
        table.add_row("without training", f"{plain * 1e3:,.1f}")
    return table


def _plain(found: InRun, transfers: Transfers) -> float | None:
    """What the same transport took for as many bytes, by the size that is nearest; None where it was not measured."""
    sizes = [sized for sized in transfers.sizes if "shared_memory" in sized.published]
    if not sizes:
        return None
    nearest = min(sizes, key=lambda sized: abs(sized.megabytes - found.megabytes))
    return median(nearest.published["shared_memory"].seconds) * found.megabytes / nearest.megabytes
