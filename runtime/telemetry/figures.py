"""The picture of a run: reward, held-out accuracy, staleness, and time per phase, over the steps.

A job of its own, `python -m runtime.telemetry.figures RUN_DIR`: matplotlib takes about a second to load,
which no service should pay.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, PercentFormatter

from runtime import run_files as layout
from runtime.errors import UserError
from runtime.telemetry.metrics import UPDATE, WITHIN_UPDATE
from runtime.telemetry.trackers import read_jsonl

ACCURACY = "eval/accuracy"

Rows = Sequence[Mapping[str, Any]]

# Okabe and Ito's palette, told apart with any colour vision.
_BLUE, _ORANGE, _GREEN, _RED, _SKY, _PINK, _YELLOW = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#F0E442"
_INK, _GRID = "#333333", "#E3E3E3"
_PHASE_COLOURS = {
    UPDATE: _BLUE,
    "rollout": _ORANGE,
    "reference_model": _GREEN,
    "rule_reward": _PINK,
    "resharding_to_infer": _SKY,
}
_OTHER_COLOURS = (_YELLOW, _RED, "#999999", "#000000")
_SMOOTHING_STEPS = 10
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "legend.fontsize": 9,
}


def plot_run(metrics_jsonl: Path, png: Path) -> None:
    """Draw four panels into `png`. Raises UserError when the metrics cannot be read or hold no step."""
    rows = read_jsonl(metrics_jsonl)
    if not rows:
        raise UserError(f"{metrics_jsonl}: no step to draw")
    first, span = rows[0]["step"], max(1, rows[-1]["step"] - rows[0]["step"])
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(2, 2, figsize=(12, 7.5), dpi=120, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
        for draw, panel in zip((_reward, _accuracy, _staleness, _phases), axes.flat, strict=True):
            draw(panel, rows)
            panel.set_xlabel("step")
            panel.set_xlim(first - 0.02 * span, first + 1.02 * span)
            panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.suptitle(metrics_jsonl.parent.resolve().name, fontsize=13, fontweight="bold", color=_INK)
        partial = png.with_suffix(".partial")
        figure.savefig(partial, format="png")
        partial.replace(png)
        plt.close(figure)


def _series(rows: Rows, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and finite values of `name`; a value that is absent or null leaves its step out."""
    points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    steps, values = zip(*points, strict=True) if points else ((), ())
    return np.array(steps), np.array(values, float)


def _smoothed(values: np.ndarray) -> np.ndarray:
    """The mean of each value and those before it, over a window of `_SMOOTHING_STEPS`."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - _SMOOTHING_STEPS, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def _empty(axes: Axes, text: str) -> None:
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes, color="#888888")
    axes.set_yticks([])


def _reward(axes: Axes, rows: Rows) -> None:
    axes.set_title("Reward, mean of the batch")
    steps, values = _series(rows, "grpo/score/mean")
    if not len(steps):
        _empty(axes, "no reward logged")
        return
    axes.plot(steps, values, color=_BLUE, alpha=0.3, linewidth=1)
    axes.plot(steps, _smoothed(values), color=_BLUE, linewidth=2, label=f"mean over {_SMOOTHING_STEPS} steps")
    axes.legend(loc="lower right")


def _accuracy(axes: Axes, rows: Rows) -> None:
    axes.set_title("Held-out accuracy")
    steps, values = _series(rows, ACCURACY)
    if not len(steps):
        _empty(axes, "not evaluated")
        return
    axes.plot(steps, values, color=_GREEN, linewidth=2, marker="o", markersize=5)
    for index, offset in {0: (22, -6), len(steps) - 1: (-8, -18)}.items():
        axes.annotate(
            f"{values[index]:.1%}", (steps[index], values[index]), offset, textcoords="offset points", ha="center", color=_INK
        )
    axes.set_ylim(min(0.0, values.min()), 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))


def _staleness(axes: Axes, rows: Rows) -> None:
    axes.set_title("Staleness of the trained samples")
    axes.set_ylabel("versions")
    steps, mean = _series(rows, "staleness/mean")
    if not len(steps):
        _empty(axes, "no staleness logged")
        return
    maximum_steps, maximum = _series(rows, "staleness/max")
    axes.scatter(maximum_steps, maximum, s=6, color=_RED, linewidths=0, label="max")
    axes.plot(steps, mean, color=_BLUE, alpha=0.3, linewidth=1)
    axes.plot(steps, _smoothed(mean), color=_BLUE, linewidth=2, label=f"mean over {_SMOOTHING_STEPS} steps")
    axes.set_ylim(-0.05, max(1.0, maximum.max()) * 1.25)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="upper right", ncols=2)


def _phases(axes: Axes, rows: Rows) -> None:
    axes.set_title("Time by phase")
    rows = [row for row in rows if row.get("timing/all") is not None]
    names = {name for row in rows for name in row if name.startswith("timing/") and not name.startswith("timing/non_overlap_")}
    names -= {"timing/all", *(f"timing/{phase}" for phase in WITHIN_UPDATE)}
    phases = {name.partition("/")[2]: np.array([row.get(name) or 0.0 for row in rows]) for name in names}
    if not phases:
        _empty(axes, "no timing logged")
        return
    ordered = sorted(phases, key=lambda phase: -phases[phase].sum())
    others = iter(_OTHER_COLOURS * (1 + len(ordered) // len(_OTHER_COLOURS)))
    axes.stackplot(
        [row["step"] for row in rows],
        [_smoothed(phases[phase]) for phase in ordered],
        labels=ordered,
        colors=[_PHASE_COLOURS.get(phase) or next(others) for phase in ordered],
        alpha=0.85,
        linewidth=0,
    )
    steps, wall = _series(rows, "timing/all")
    axes.plot(steps, _smoothed(wall), color=_INK, linewidth=1.5, linestyle="--", label="wall time (phases overlap)")
    axes.set_ylabel(f"seconds a step, mean over {_SMOOTHING_STEPS}")
    axes.set_ylim(0, axes.get_ylim()[1] * 1.35)
    axes.legend(loc="upper right", ncols=2)


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m runtime.telemetry.figures RUN_DIR", file=sys.stderr)
        return 2
    folder = Path(arguments[0])
    try:
        plot_run(folder / layout.METRICS, folder / layout.FIGURE)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
