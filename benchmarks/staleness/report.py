"""The report of `sluice bench staleness`: figures of each cell and of each pair, and their tables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, median

from msgspec import Struct

from benchmarks.compared import Compared
from benchmarks.intervals import ConfidenceInterval, t_interval, wilson
from benchmarks.staleness.runs import RunOutcome, StalenessSettings, StalenessTrial, cells, plan
from runtime.telemetry.shown import LiteralTable

GOAL = 0.9  # the accuracy that "steps to" is about
FIGURE_FILE = "staleness.png"


class Cell(Struct, frozen=True):
    """All seeds of one learning rate, bound and variant. `steps_to_goal` is the median of the `reached` runs that got there."""

    rate: float
    bound: int
    variant: str
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
    """Accuracy of `default` less another's, at one learning rate and bound: the mean over pairs of runs of one seed, and a t
    interval over the pairs. The other is a variant at that bound, or `default` at the smallest."""

    rate: float
    bound: int
    other: str
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

    def runs(*cell: float | str) -> list[RunOutcome]:
        return [outcomes[trial] for trial in plan(settings) if (trial.rate, trial.bound, trial.variant) == cell]

    def less(rate: float, bound: int, other: str, of: list[RunOutcome]) -> Difference:
        pairs = zip(runs(rate, bound, "default"), of, strict=True)
        gains = [own.accuracy - one.accuracy for own, one in pairs]
        return Difference(rate, bound, other, fmean(gains), t_interval(gains))

    first, differences = settings.bounds[0], []
    for rate, bound, variant in cells(settings):
        if variant != "default":
            differences.append(less(rate, bound, variant, runs(rate, bound, variant)))
        elif bound != first:
            differences.append(less(rate, bound, f"default, η = {first}", runs(rate, first, variant)))
    return StalenessReport(settings, GOAL, [_cell(*cell, runs(*cell)) for cell in cells(settings)], differences, str(folder))


def _cell(rate: float, bound: int, variant: str, runs: list[RunOutcome]) -> Cell:
    correct, problems = sum(run.correct for run in runs), sum(run.problems for run in runs)
    over_seeds = t_interval([run.accuracy for run in runs])
    reached = [steps for run in runs if (steps := run.steps_to(GOAL)) is not None]
    return Cell(
        rate=rate,
        bound=bound,
        variant=variant,
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
    """Accuracy at a bound over that at the smallest, seed by seed, of the quickstart as it is."""
    own = [cell for cell in made.cells if cell.variant == "default" and cell.rate == made.settings.rates[0]]
    return [
        Compared(
            f"accuracy, η = {cell.bound} / η = {own[0].bound}",
            [old.accuracy / fresh.accuracy for old, fresh in zip(cell.runs, own[0].runs, strict=True)],
        )
        for cell in own[1:]
    ]


def render(made: StalenessReport) -> list[LiteralTable]:
    table = LiteralTable(title="Final accuracy by bound on staleness", title_justify="left", title_style="bold")
    steps_to = f"steps to {made.goal:.0%}"
    for name in ("rate", "η", "variant", "accuracy", "95 % over seeds", "95 % Wilson, pooled", steps_to, "staleness", "RL s"):
        table.add_column(name, justify="left" if name == "variant" else "right")
    for cell in made.cells:
        steps = "–" if cell.steps_to_goal is None else f"{cell.steps_to_goal:g}"
        table.add_row(
            f"{cell.rate:g}",
            str(cell.bound),
            cell.variant,
            f"{cell.accuracy:.1%}",
            _span(cell.over_seeds),
            _span(cell.wilson),
            f"{steps} ({cell.reached} of {len(cell.runs)})",
            f"{cell.staleness_mean:.2f}",
            f"{cell.rl_seconds:.0f}",
            end_section=cell.variant == "default",
        )
    problems = " or ".join(f"{count:,}" for count in sorted({cell.problems for cell in made.cells}))
    table.caption = (
        f"{made.settings.steps} steps; seeds: {made.settings.seeds}; problems a row: {problems}. Over seeds, the headline: "
        "Student's t over the seeds' accuracies. Wilson: takes all problems as independent. Steps: median of the runs that got "
        "there, and how many did. Staleness: mean of the trained samples"
    )
    gain = LiteralTable(title="Default less another, percentage points", title_justify="left", title_style="bold")
    for name in ("rate", "η", "other", "difference", "95 % over pairs of one seed"):
        gain.add_column(name, justify="left" if name == "other" else "right")
    for difference in made.differences:
        where = f"{difference.rate:g}", str(difference.bound), difference.other
        gain.add_row(*where, f"{100 * difference.mean:+.1f}", _span(difference.interval, 100, "+.1f"))
    gain.caption = f"figure: {Path(made.folder) / FIGURE_FILE}; runs: {made.folder}"
    for one in (table, gain):
        one.caption_justify = "left"
    return [table, gain]


def _span(interval: ConfidenceInterval | None, scale: float = 1.0, form: str = ".1%") -> str:
    return "one seed" if interval is None else f"{interval.low * scale:{form}} to {interval.high * scale:{form}}"
