"""The figures of a run as text: results, lineages, evaluations and scorers' failures. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from runtime.evaluation.results import EvaluationResult, SetResult
from runtime.telemetry.metrics import SCORE_ERRORS
from runtime.telemetry.record import STEP_ENDED, LoggedHistory, Point, RunRecord

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
