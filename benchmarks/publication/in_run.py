"""What publishing takes in a whole run of `sluice train`, where training and generation are beside it, phase by phase."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

from msgspec import Struct
from msgspec.structs import replace

from benchmarks.packing import PackingShape
from benchmarks.publication.transfers import Transfers
from benchmarks.staleness.runs import train_to_its_end
from runtime import run_files
from runtime.config import Config, loading
from runtime.errors import ServiceFault
from runtime.telemetry.shown import LiteralTable
from runtime.telemetry.summary import Summary
from runtime.telemetry.trackers import read_jsonl

DEADLINE = 900.0  # seconds of the run, whatever else the machine does
PHASES = ("gather", "wait", "copy", "hash", "stage", "swap")
METRICS = ("seconds", *(f"{phase}_seconds" for phase in PHASES))


class InRunSettings(Struct, frozen=True):
    """`dtype`: published; the masters, and the rollout's weights, are float32."""

    shape: PackingShape = PackingShape(512, 8, 8, 4, 2048)  # 63 MB of bfloat16
    dtype: str = "bfloat16"
    steps: int = 8


class InRun(Struct):
    """`first`: seconds of version 0, the rendezvous included. `later`: of each version after it the `METRICS`, in order."""

    megabytes: float
    first: float
    later: list[list[float]]


async def measure(folder: Path, settings: InRunSettings, show: Callable[[str], None] = lambda line: None) -> InRun:
    """One trainer and one rollout; `folder` exists. Raises ServiceFault where the run fails."""
    show(f"a run of {settings.steps} steps")
    with tempfile.TemporaryDirectory(prefix="publication-", dir=folder) as scratch:
        config = run_config(folder / "publication", Path(scratch) / "run", settings)
        (Path(scratch) / "run.yaml").write_text(loading.to_yaml(config), encoding="utf-8")
        await train_to_its_end("publication", Path(scratch) / "run.yaml", (), Path(scratch), DEADLINE)
        points = [point for point in read_jsonl(Path(scratch) / "run" / run_files.METRICS) if "publication/seconds" in point]
        first = Summary.read(Path(scratch) / "run").startup["first publication"]
    if not points:
        raise ServiceFault("bench", "run", "published nothing")
    later = [[float(point[f"publication/{name}"]) for name in METRICS] for point in points]
    return InRun(points[-1]["publication/bytes"] / 1e6, first, later)


def run_config(inputs: Path, run: Path, settings: InRunSettings) -> Config:
    """The bench's, with steps as short as they may be; its model lies under `inputs`."""
    config = settings.shape.bench_config(inputs)
    return replace(
        config,
        run=replace(config.run, name="publication", dir=str(run)),
        sampling=replace(config.sampling, group_size=4, max_new_tokens=16),
        algorithm=replace(config.algorithm, kl_coefficient=0.0),
        training=replace(config.training, steps=settings.steps, groups_per_step=2, staleness=1),
        publication=replace(config.publication, dtype=settings.dtype),  # type: ignore[type-var]
    )


def render(found: InRun, transfers: Transfers) -> LiteralTable:
    """`transfers`: what to compare with."""
    table = LiteralTable(title=f"In a run: {found.megabytes:,.0f} MB, ms", title_justify="left", title_style="bold")
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
