"""`sluice bench depth`: the quickstart with `training.depth: auto` and `bound`, in turn: how stale its samples are, and how
many a second are trained on.

Nothing is evaluated meanwhile, so that the rollouts generate for training alone. All runs have the same warmed model; a pair
has a seed. Seconds are those from the first step to the last.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import geometric_mean

from msgspec import Struct

from benchmarks.compared import Compared
from benchmarks.staleness.runs import train_quickstart
from runtime.telemetry.shown import LiteralTable
from runtime.telemetry.summary import Summary

DEPTHS = ("auto", "bound")


class DepthSettings(Struct, frozen=True):
    pairs: tuple[tuple[int, int], ...] = ((2, 10), (8, 3))  # the bound on staleness, and how many pairs with it
    steps: int = 80
    deadline: float = 900.0  # seconds of one run


FULL = DepthSettings()
QUICK = DepthSettings(pairs=((2, 2),))


class DepthTrial(Struct, frozen=True):
    """One run. `staleness`: the mean over its samples, in versions; `idle`: the trainer's share of the time."""

    bound: int
    depth: str
    seed: int
    samples_per_second: float
    staleness: float
    idle: float


class DepthReport(Struct):
    trials: list[DepthTrial]
    ratios: dict[str, list[float]]  # by bound, samples a second of auto over those of bound, pair by pair


async def measure(folder: Path, settings: DepthSettings, show: Callable[[str], None]) -> DepthReport:
    trials: list[DepthTrial] = []
    for bound, pairs in settings.pairs:
        for seed in range(1, pairs + 1):
            for depth in DEPTHS if seed % 2 else DEPTHS[::-1]:
                name = f"eta{bound}-{depth}-seed{seed}"
                show(name)
                changes = _changes(folder / name, bound, depth, seed, settings.steps)
                await train_quickstart(name, changes, folder, settings.deadline)
                summary = Summary.read(folder / name)
                figures = summary.samples_per_second, summary.staleness_mean, summary.idle_trainer
                trials.append(DepthTrial(bound, depth, seed, *figures))
    return DepthReport(trials, {str(bound): _ratios(trials, bound) for bound, _ in settings.pairs})


def _changes(folder: Path, bound: int, depth: str, seed: int, steps: int) -> list[str]:
    return [
        f"run.dir={json.dumps(str(folder))}",
        f"run.seed={seed}",
        f"warmup.cache={json.dumps(str(folder.parent))}",
        f"training.staleness={bound}",
        f"training.depth={depth}",
        f"training.steps={steps}",
        "evaluation={every: 0, before: false, after: false}",
        "checkpoint.every=0",
        "trackers=[{name: jsonl}]",
    ]


def _ratios(trials: list[DepthTrial], bound: int) -> list[float]:
    rates = {depth: [one.samples_per_second for one in trials if (one.bound, one.depth) == (bound, depth)] for depth in DEPTHS}
    pairs = zip(*(rates[depth] for depth in DEPTHS), strict=True)
    return [auto / other for auto, other in pairs]


def compared(report: DepthReport) -> list[Compared]:
    found = []
    for bound, ratios in report.ratios.items():
        own = [one.staleness for one in report.trials if (str(one.bound), one.depth) == (bound, "auto")]
        found.append(Compared(f"samples/s, auto / bound, η = {bound}", ratios))
        found.append(Compared(f"mean staleness in versions, η = {bound}", own))
    return found


def render(report: DepthReport) -> list[LiteralTable]:
    table = LiteralTable(
        "bound", "depth", "runs", "staleness, mean", "samples/s, mean", "trainer idle", "samples/s, auto / bound"
    )
    for bound, ratios in report.ratios.items():
        ratio = geometric_mean(ratios)
        for depth in DEPTHS:
            own = [one for one in report.trials if (str(one.bound), one.depth) == (bound, depth)]
            means = [sum(getattr(one, name) for one in own) / len(own) for name in ("staleness", "samples_per_second", "idle")]
            shown = [f"{means[0]:.2f}", f"{means[1]:.1f}", f"{means[2]:.0%}", f"{ratio:.3f}" if depth == "auto" else ""]
            table.add_row(bound, depth, str(len(own)), *shown)
    return [table]
