"""The report of `sluice bench staleness`: figures of each cell and of each pair, and their tables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, median

from msgspec import Struct

from benchmarks.compared import Compared
from benchmarks.intervals import ConfidenceInterval, t_interval, wilson
from benchmarks.staleness.runs import LOSSES, RunOutcome, StalenessSettings, StalenessTrial, plan
from runtime.telemetry.shown import LiteralTable

GOAL = 0.9  # the accuracy that "steps to" is about
FIGURE_FILE = "staleness.png"


class Cell(Struct, frozen=True):
    """All seeds of one bound and loss. `steps_to_goal` is the median of the `reached` runs that got there."""

    bound: int
    loss: str
    accuracy: float  # pooled
    problems: int
    over_seeds: ConfidenceInterval | None  # None with one seed
    wilson: ConfidenceInterval
    steps_to_goal: float | None
    reached: int
    staleness_mean: float
    staleness_max: int
    rl_seconds: float  # mean of the runs
    runs: list[RunOutcome]


class Difference(Struct, frozen=True):
    """Accuracy decoupled - naive at one bound: the mean over pairs of runs of one seed, and a t interval over the pairs."""

    bound: int
    mean: float
    interval: ConfidenceInterval | None


class StalenessReport(Struct, frozen=True):
    settings: StalenessSettings
    goal: float
    cells: list[Cell]
    differences: list[Difference]
    folder: str  # of the runs, the figure and this report


def report(settings: StalenessSettings, outcomes: Mapping[StalenessTrial, RunOutcome], folder: Path) -> StalenessReport:
    """The figures of all runs of the plan."""

    def runs(bound: int, loss: str) -> list[RunOutcome]:
        return [outcomes[trial] for trial in plan(settings) if (trial.bound, trial.loss) == (bound, loss)]

    cells = [_cell(bound, loss, runs(bound, loss)) for bound in settings.bounds for loss in LOSSES]
    differences = []
    for bound in settings.bounds:
        pairs = zip(runs(bound, "naive"), runs(bound, "decoupled"), strict=True)
        gains = [decoupled.accuracy - naive.accuracy for naive, decoupled in pairs]
        differences.append(Difference(bound, fmean(gains), t_interval(gains)))
    return StalenessReport(settings, GOAL, cells, differences, str(folder))


def _cell(bound: int, loss: str, runs: list[RunOutcome]) -> Cell:
    correct, problems = sum(run.correct for run in runs), sum(run.problems for run in runs)
    over_seeds = t_interval([run.accuracy for run in runs])
    reached = [steps for run in runs if (steps := run.steps_to(GOAL)) is not None]
    return Cell(
        bound=bound,
        loss=loss,
        accuracy=correct / problems,
        problems=problems,
        over_seeds=over_seeds and ConfidenceInterval(max(0.0, over_seeds.low), min(1.0, over_seeds.high)),
        wilson=wilson(correct, problems),
        steps_to_goal=median(reached) if reached else None,
        reached=len(reached),
        staleness_mean=fmean(run.staleness_mean for run in runs),
        staleness_max=max(run.staleness_max for run in runs),
        rl_seconds=fmean(run.rl_seconds for run in runs),
        runs=runs,
    )


def compared(made: StalenessReport) -> list[Compared]:
    """Accuracy at a bound over that at the smallest, seed by seed, with the loss that the quickstart has."""
    cells = [cell for cell in made.cells if cell.loss == "decoupled"]
    return [
        Compared(
            f"accuracy, η = {cell.bound} / η = {cells[0].bound}",
            [own.accuracy / fresh.accuracy for own, fresh in zip(cell.runs, cells[0].runs, strict=True)],
        )
        for cell in cells[1:]
    ]


def render(made: StalenessReport) -> list[LiteralTable]:
    table = LiteralTable(title="Final accuracy by bound on staleness", title_justify="left", title_style="bold")
    steps_to = f"steps to {made.goal:.0%}"
    for name in ("η", "loss", "accuracy", "95 % over seeds", "95 % Wilson, pooled", steps_to, "staleness", "RL s"):
        table.add_column(name, justify="left" if name == "loss" else "right")
    for cell in made.cells:
        steps = "–" if cell.steps_to_goal is None else f"{cell.steps_to_goal:g}"
        table.add_row(
            str(cell.bound),
            cell.loss,
            f"{cell.accuracy:.1%}",
            _span(cell.over_seeds),
            _span(cell.wilson),
            f"{steps} ({cell.reached} of {len(cell.runs)})",
            f"{cell.staleness_mean:.2f}",
            f"{cell.rl_seconds:.0f}",
            end_section=cell.loss == "decoupled",
        )
    problems = " or ".join(f"{count:,}" for count in sorted({cell.problems for cell in made.cells}))
    table.caption = (
        f"{made.settings.steps} steps; seeds: {made.settings.seeds}; problems a row: {problems}. Over seeds, the headline: "
        "Student's t over the seeds' accuracies. Wilson: takes all problems as independent. Steps: median of the runs that got "
        "there, and how many did. Staleness: mean of the trained samples"
    )
    gain = LiteralTable(title="Decoupled − naive, percentage points", title_justify="left", title_style="bold")
    for name in ("η", "difference", "95 % over pairs of one seed"):
        gain.add_column(name, justify="right")
    for difference in made.differences:
        gain.add_row(str(difference.bound), f"{100 * difference.mean:+.1f}", _span(difference.interval, 100, "+.1f"))
    gain.caption = f"figure: {Path(made.folder) / FIGURE_FILE}; runs: {made.folder}"
    for one in (table, gain):
        one.caption_justify = "left"
    return [table, gain]


def _span(interval: ConfidenceInterval | None, scale: float = 1.0, form: str = ".1%") -> str:
    return "one seed" if interval is None else f"{interval.low * scale:{form}} to {interval.high * scale:{form}}"
