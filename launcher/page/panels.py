"""Turns a run's points into the curves and the tables that the page's script draws. Pure."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec import Struct

from runtime.evaluation.results import EvaluationResult, SetResult
from runtime.telemetry.metrics import SCORE_ERRORS, WITHIN_UPDATE
from runtime.telemetry.record import STEP_ENDED, LoggedHistory, Point, RunRecord

# Long curves are reduced to fewer points that look the same: a browser is not quick with 10,000 points of sixty curves.

MOST_POINTS = 2000


def extremes(values: np.ndarray, most: int = MOST_POINTS) -> np.ndarray:
    """Return at most `most` indices of `values` [N], in order: both ends, and the least and the greatest value of each of
    nearly most / 2 equal parts. So no spike is lost. A NaN is chosen only at the ends."""
    count = len(values)
    if count <= most:
        return np.arange(count)
    edges = np.linspace(0, count, most // 2).astype(np.int64)  # one part fewer, to leave room for the ends
    chosen = {0, count - 1}
    for begin, end in pairwise(edges.tolist()):
        part = values[begin:end]
        if not np.isnan(part).all():
            chosen |= {begin + int(np.nanargmin(part)), begin + int(np.nanargmax(part))}
    return np.array(sorted(chosen))


def means(values: np.ndarray, most: int = MOST_POINTS) -> np.ndarray:
    """Return [min(N, most)]: the mean of each of `most` equal parts of `values` [N]. For stacked values, as means add up."""
    count = len(values)
    if count <= most:
        return values
    edges = np.linspace(0, count, most + 1).astype(np.int64)
    return np.add.reduceat(values, edges[:-1]) / np.diff(edges)


def smoothed(values: np.ndarray, window: int) -> np.ndarray:
    """Return the mean of each value and the values before it, over a window; NaNs do not count."""
    there = ~np.isnan(values)
    sums = np.cumsum(np.concatenate([[0.0], np.where(there, values, 0.0)]))
    counts = np.cumsum(np.concatenate([[0], there]))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    number = counts[ends] - counts[starts]
    return np.divide(sums[ends] - sums[starts], number, out=np.full(len(values), np.nan), where=number > 0)


SMOOTHED_FROM = 30  # steps; with fewer, a moving mean hides more than it shows
WINDOW = 10
_RULE = re.compile(r"(.+)_rewards/mean")
_ENVIRONMENT = re.compile(r"environment/(?P<name>[^/]+)/(?P<figure>.+)")
_COUNTED = {"left_out": "left out", "repeated": "played again"}
_SET = re.compile(r"eval/(.+)/pass@1")

Kind = Literal["curves", "stack", "bars"]


class Series(Struct, frozen=True):
    """One curve: `x` [N] and `y` [N], where `y` may have NaNs. `smooth` [N]: the moving mean, if it is drawn."""

    name: str
    x: list[float]
    y: list[float]
    smooth: list[float] | None = None


class Panel(Struct, frozen=True):
    """One figure. `share`: values are fractions. Without `series` nothing was measured. A stack's last series is a line."""

    title: str
    unit: str
    series: list[Series]
    kind: Kind = "curves"
    log: bool = False
    share: bool = False
    x: str = "step"


class _Wanted(Struct, frozen=True, forbid_unknown_fields=True):
    """A panel of metrics by name, with their legends. `needed`: show it even if nothing was measured."""

    title: str
    unit: str
    metrics: Mapping[str, str]
    needed: bool = False
    smooth: bool = True
    log: bool = False
    share: bool = False


_WANTED = msgspec.yaml.decode(Path(__file__).with_name("panels.yaml").read_bytes(), type=dict[str, list[_Wanted]])


def sections(history: LoggedHistory) -> list[dict[str, Any]]:
    """Return `title` and `panels` of all sections of a run's figures, in order."""
    columns = MetricColumns(history.steps)
    learning = _panels(_WANTED["learning"], columns)
    learning[1:1] = [_accuracy(history.evaluations)]
    rules = {metric: match[1] for metric in columns.names if (match := _RULE.fullmatch(metric))}
    if len(rules) > 1:
        learning[2:2] = _panels([_Wanted("Reward by rule, before weights", "value", dict(sorted(rules.items())))], columns)
    off_policy, speed = _panels(_WANTED["off_policy"], columns), _panels(_WANTED["speed"], columns)
    off_policy[1:1] = [_histogram(history.steps)]
    speed[0:0] = [_phases(columns)]
    wall = columns[STEP_ENDED]
    rate = np.divide(columns["samples"], wall, out=np.full(len(wall), np.nan), where=wall > 0)
    rates = _curves([("samples a second", columns.steps, rate, True)])
    speed[2:2] = [Panel("Samples a second", "samples/s", rates)]
    optimisation = _panels([*_WANTED["optimisation"], *_of_the_loss(columns)], columns)
    found = {"Learning": learning, "Optimisation": optimisation, "Off-policy": off_policy, "Speed": speed}
    return [{"title": title, "panels": own} for title, own in (found | _environments(columns)).items()]


def _of_the_loss(columns: MetricColumns) -> list[_Wanted]:
    """Return one panel for each other metric of the policy: metrics that some losses report, also a user's own loss."""
    shown = {metric for each in _WANTED["optimisation"] for metric in each.metrics}
    own = (metric for metric in columns.names if metric.startswith("actor/") and metric not in shown)
    return [_Wanted(metric, "", {metric: metric.removeprefix("actor/")}) for metric in own]


def _environments(columns: MetricColumns) -> dict[str, list[Panel]]:
    """Return one section for each environment: rewards, how episodes ended, and the figures that agents logged."""
    found = [match for metric in columns.names if (match := _ENVIRONMENT.fullmatch(metric))]
    sections = {}
    for name in sorted({match["name"] for match in found}):
        own = {match["figure"]: match[0] for match in found if match["name"] == name}
        counted = {own[figure]: figure.removeprefix("ended/") for figure in own if figure.startswith("ended/")}
        counted |= {own[figure]: shown for figure, shown in _COUNTED.items() if figure in own}
        logged = [_Wanted(figure, "mean", {metric: figure}) for figure, metric in own.items() if figure.startswith("log/")]
        wanted = [
            _Wanted("Reward", "reward", {f"environment/{name}/reward": "mean of what is trained on"}),
            _Wanted("How episodes ended", "episodes", counted, smooth=False),
            _Wanted("Calls of the policy", "calls", {f"environment/{name}/turns": "mean of an episode"}),
            *logged,
        ]
        sections[f"Environment {name}"] = _panels(wanted, columns)
    return sections


class MetricColumns:
    """Points by metric: [N] each, NaN where a point lacks the metric."""

    def __init__(self, points: Sequence[Point]):
        self._points = points
        self.steps = np.array([point["step"] for point in points], np.int64)
        self.names = sorted({name for point in points for name, value in point.items() if isinstance(value, (int, float))})

    def __getitem__(self, name: str) -> np.ndarray:
        found = (point.get(name) for point in self._points)
        return np.array([value if isinstance(value, (int, float)) else np.nan for value in found], np.float64)


def _panels(wanted: Sequence[_Wanted], columns: MetricColumns) -> list[Panel]:
    found = []
    for each in wanted:
        there = _curves((legend, columns.steps, columns[metric], each.smooth) for metric, legend in each.metrics.items())
        if there or each.needed:
            log = each.log and any(value > 0 for curve in there for value in curve.y)  # else the axis would be empty
            found.append(Panel(each.title, each.unit, there, log=log, share=each.share))
    return found


def _curves(columns: Iterable[tuple[str, np.ndarray, np.ndarray, bool]]) -> list[Series]:
    """Return a thinned curve for each column (name, steps, values, whether to draw a mean) with a value."""
    found = []
    for name, steps, values, smooth in columns:
        there = np.flatnonzero(~np.isnan(values))
        if not len(there):
            continue
        steps, values = steps[there[0] : there[-1] + 1], values[there[0] : there[-1] + 1]
        kept = extremes(values)
        mean = None
        if smooth and len(values) >= SMOOTHED_FROM:
            mean = _listed(smoothed(values, max(WINDOW, len(values) // 50))[kept])
        found.append(Series(name, steps[kept].tolist(), _listed(values[kept]), mean))
    return found


def _listed(values: np.ndarray) -> list[float]:
    """Return the values with as few digits as show no difference."""
    return [float(f"{value:.6g}") for value in values.tolist()]


def _accuracy(evaluations: Sequence[Point]) -> Panel:
    columns = MetricColumns(evaluations)
    sets = {name: match[1] for name in columns.names if (match := _SET.fullmatch(name))}
    if len(sets) != 1:
        sets = {"eval/accuracy": "mean of the sets", **sets}
    curves = _curves((legend, columns.steps, columns[name], False) for name, legend in sets.items())
    return Panel("Held-out accuracy", "pass@1", curves, share=True)


def _histogram(points: Sequence[Point]) -> Panel:
    counts: Counter[int] = Counter()
    for point in points:
        counts.update({int(age): int(number) for age, number in (point.get("staleness/histogram") or {}).items()})
    ages = sorted(counts)
    bars = [Series("samples", [*ages], [counts[age] for age in ages])] if ages else []
    return Panel("Samples by staleness", "samples", bars, kind="bars", x="versions")


def _phases(columns: MetricColumns) -> Panel:
    """Return the stacked phases, the longest at the bottom, and the wall time last, as a line: phases overlap."""
    inside = {STEP_ENDED, *(f"timing/{phase}" for phase in WITHIN_UPDATE)}
    inside |= {name for name in columns.names if name.startswith("timing/non_overlap_")}
    names = [name for name in columns.names if name.startswith("timing/") and name not in inside]
    values = {name.partition("/")[2]: np.nan_to_num(columns[name]) for name in names}
    ordered = sorted(values, key=lambda name: -values[name].sum())
    if not len(columns.steps):
        return Panel("Time by phase", "seconds a step", [], kind="stack")
    window = max(1, len(columns.steps) // 50)
    steps = _listed(means(columns.steps.astype(np.float64)))
    layers = [Series(name, steps, _listed(means(smoothed(values[name], window)))) for name in ordered]
    wall = _listed(means(smoothed(columns[STEP_ENDED], window)))
    return Panel("Time by phase", "seconds a step", [*layers, Series("wall time", steps, wall)], kind="stack")


# ---- Figures as text: results, lineages, evaluations and failures of scorers

NOT_MEASURED = "not measured"


Table = dict[str, Any]  # `head`, and `rows` with as many cells
Fact = tuple[str, str, str]  # a name, its value, and a note in small letters


def facts(record: RunRecord, history: LoggedHistory) -> list[Fact]:
    """Return the facts of the steps that count. A fact without data says that it was not measured."""
    steps, planned = history.steps, record.settings.training.steps
    seconds = total(steps, STEP_ENDED)
    accuracies = [(point["step"], point["eval/accuracy"]) for point in history.evaluations if _has(point, "eval/accuracy")]
    first, last = (accuracies[0], accuracies[-1]) if accuracies else (None, None)
    before = ""
    if first is not None and last is not None:
        at = f"after step {last[0]:,}"
        before = at if first == last else f"{at}; {first[1]:.1%} after {first[0]:,}, best {max(a for _, a in accuracies):.1%}"
    rate = total(steps, "samples") / seconds if seconds else None
    limit = record.settings.training.staleness
    oldest = max((point["staleness/max"] for point in steps if _has(point, "staleness/max")), default=None)
    return [
        ("Steps", f"{int(steps[-1]['step']) if steps else 0:,}", f"of {planned:,}" if planned is not None else ""),
        ("Held-out accuracy", share(last[1] if last else None), before),
        ("Samples a second", number(rate), f"{seconds:,.1f} s in {len(steps):,} steps" if steps else ""),
        ("Tokens/s and accelerator", number(weighted(steps, "e2e_tps", STEP_ENDED)), "end to end"),
        (
            "Staleness, mean",
            number(weighted(steps, "staleness/mean", "samples")),
            f"max {oldest:g}" + (f", bound {limit}" if limit is not None else "") if oldest is not None else "",
        ),
        ("Trainer idle", share(weighted(steps, "idle/trainer", STEP_ENDED)), ""),
        ("Rollouts idle", share(weighted(steps, "idle/rollout", STEP_ENDED)), ""),
    ]


def lineages(history: LoggedHistory) -> Table | None:
    """Return the lineages; None if the run never went back to a checkpoint."""
    if len(history.lineages) < 2:
        return None
    rows = []
    for each in history.lineages:
        kept = f"{each.first:,} to {each.kept:,}" if each.kept >= each.first else "none"
        again = f"{max(each.kept + 1, each.first):,} to {each.last:,}" if each.kept < each.last else "none"
        rows.append([str(each.incarnation), f"{each.first:,} to {each.last:,}", kept, again, *map(moment, each.times)])
    head = ["Incarnation", "Steps done", "that count", "done again later", "First step ended", "Last step ended"]
    return {"head": head, "rows": rows}


def evaluations(results: Sequence[EvaluationResult]) -> Table | None:
    """Return a row for each set of each evaluation; None if the run's folder has no evaluation."""
    if not results:
        return None
    most = sorted({k for result in results for each in result.sets for k in each.pass_at})
    votes = sorted({k for result in results for each in result.sets for k in each.maj_at})
    rows = [_evaluated(result.step, each, most, votes) for result in results for each in result.sets]
    head = ["Step", "Set", "Problems × samples", *(f"pass@{k}" for k in most), *(f"maj@{k}" for k in votes)]
    return {"head": [*head, "Tokens: mean", "median", "95 %", "max", "cut off", "No verdict"], "rows": rows}


def _evaluated(step: int, each: SetResult, most: Sequence[int], votes: Sequence[int]) -> list[str]:
    def passed(k: int) -> str:
        error = f" ± {each.standard_error:.1%}" if k == 1 and each.standard_error is not None else ""
        return share(each.pass_at.get(k)) + error

    lengths = each.lengths
    return [
        f"{step:,}",
        each.name,
        f"{each.problems:,} × {each.samples}",
        *map(passed, most),
        *(share(each.maj_at.get(k)) for k in votes),
        *(number(value) for value in (lengths.mean, lengths.median, lengths.p95, lengths.max)),
        share(lengths.truncated),
        f"{each.problems * each.samples - each.scored:,}",
    ]


def failures(history: LoggedHistory) -> list[list[str]]:
    """Return why scorers failed, and how often, over all steps."""
    names = sorted({name for point in history.steps for name in point if name.startswith(SCORE_ERRORS)})
    return [[name.removeprefix(SCORE_ERRORS), f"{total(history.steps, name):,.0f}"] for name in names]


def total(steps: Sequence[Point], name: str) -> float:
    return math.fsum(point[name] for point in steps if _has(point, name))


def weighted(steps: Sequence[Point], name: str, by: str) -> float | None:
    """Return the mean of `name` over steps, weighted by `by`; None if no step has both."""
    both = [(point[name], point[by]) for point in steps if _has(point, name) and _has(point, by)]
    weight = math.fsum(weight for _, weight in both)
    return math.fsum(value * weight for value, weight in both) / weight if weight else None


def _has(point: Point, name: str) -> bool:
    return isinstance(point.get(name), (int, float))


def number(value: float | None) -> str:
    """Return the value with three significant digits below 1,000, and as a whole number above."""
    if value is None:
        return NOT_MEASURED
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:.3g}"


def share(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value:.1%}"


def moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
