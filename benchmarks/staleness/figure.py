"""The picture of `sluice bench staleness`: accuracy over steps for each bound, and the final accuracies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import PercentFormatter

from benchmarks.staleness.report import Cell, StalenessReport
from benchmarks.staleness.runs import RunOutcome

STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#333333",
    "axes.labelcolor": "#333333",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E3E3E3",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "legend.fontsize": 9,
}
COLOURS = {"naive": "#D55E00", "decoupled": "#0072B2", "default": "#009E73"}
"""Of variants: Okabe and Ito's palette, told apart with any colour vision."""
MARKERS = {"naive": "s", "decoupled": "o", "default": "D"}


def draw(report: StalenessReport, png: Path) -> None:
    """A row a learning rate, in which a panel is a bound; all final accuracies below. Appears whole or not at all."""
    bounds, rates = report.settings.bounds, report.settings.rates
    shown = [cell for cell in report.cells if cell.variant in COLOURS]
    with plt.rc_context(STYLE):
        size = max(8.0, 2.8 * len(bounds)), 3.75 * (1 + len(rates))
        figure = plt.figure(figsize=size, dpi=120, layout=ConstrainedLayoutEngine(h_pad=0.12))
        grid = figure.add_gridspec(1 + len(rates), len(bounds))
        first = None
        for row, rate in enumerate(rates):
            for column, bound in enumerate(bounds):
                first = panel = figure.add_subplot(grid[row, column], sharey=first, sharex=first)
                _curves(panel, [cell for cell in shown if (cell.rate, cell.bound) == (rate, bound)], report.goal)
                panel.set_title(f"η = {bound}, learning rate {rate:g}")
                panel.tick_params(labelleft=column == 0)
        _finals(figure.add_subplot(grid[-1, :]), report, shown)
        partial = png.with_suffix(".partial")
        figure.savefig(partial, format="png")
        partial.replace(png)
        plt.close(figure)


def curve(runs: Sequence[RunOutcome]) -> tuple[np.ndarray, np.ndarray]:
    """Mean step [P] and accuracies [runs, P] of the evaluations that every run made; one left out by any run is left out.

    An evaluation stands at the middle of the versions that answered.
    """
    by_step = [{point.step: point for point in run.curve} for run in runs]
    common = sorted(set.intersection(*(set(points) for points in by_step)))
    middles = [[(points[step].oldest + points[step].newest) / 2 for step in common] for points in by_step]
    return np.mean(middles, axis=0), np.array([[points[step].accuracy for step in common] for points in by_step])


def _curves(axes: Axes, cells: Sequence[Cell], goal: float) -> None:
    for cell in cells:
        steps, accuracies = curve(cell.runs)
        colour = COLOURS[cell.variant]
        axes.fill_between(steps, accuracies.min(0), accuracies.max(0), color=colour, alpha=0.2, linewidth=0)
        axes.plot(
            steps, accuracies.mean(0), color=colour, linewidth=2, marker=MARKERS[cell.variant], markersize=4, label=cell.variant
        )
    axes.axhline(goal, color="#888888", linewidth=1, linestyle=":")
    axes.set_xlabel("step")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.legend(loc="lower right", title="band: all seeds" if len(cells[0].runs) > 1 else None, title_fontsize=8)


def _finals(axes: Axes, report: StalenessReport, shown: Sequence[Cell]) -> None:
    """Interval over seeds, or Wilson's where there is but one seed; a small dot is a seed."""
    single = report.settings.seeds == 1
    where = [(rate, bound) for rate in report.settings.rates for bound in report.settings.bounds]
    places = range(len(where))
    for variant, offset in zip(COLOURS, (-0.2, 0.0, 0.2), strict=True):
        cells = [cell for cell in shown if cell.variant == variant]
        middles = np.array([cell.accuracy for cell in cells])
        intervals = [cell.over_seeds or cell.wilson for cell in cells]
        bars = [[m - i.low for m, i in zip(middles, intervals)], [i.high - m for m, i in zip(middles, intervals)]]  # noqa: B905
        xs = np.array(places) + offset
        axes.errorbar(
            xs,
            middles,
            np.maximum(bars, 0),
            fmt=MARKERS[variant],
            color=COLOURS[variant],
            capsize=5,
            linewidth=2,
            label=variant,
        )
        for x, cell in zip(xs, cells, strict=True):
            dots = [run.accuracy for run in cell.runs]
            axes.scatter([x + 0.06] * len(dots), dots, s=10, color=COLOURS[variant], alpha=0.6)
    axes.set_title("Final accuracy, 95 % intervals " + ("(Wilson, one seed)" if single else "over seeds; dots are seeds"))
    axes.set_xticks(places, [f"η = {bound}\n{rate:g}" for rate, bound in where])
    axes.set_xlim(-0.5, len(places) - 0.5)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=1))
    axes.legend(loc="lower left")
