"""The tables of a report: what a run came to in figures, its lineages, evaluations, groups, and published throughput beside its
own. Pure: from what was read to text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from runtime.evaluation.results import EvaluationResult, SetResult
from runtime.telemetry.metrics import SCORE_ERRORS
from runtime.telemetry.report.published import PublishedFigure
from runtime.telemetry.report.record import STEP_ENDED, LoggedHistory, Point, RecordedSettings, RunRecord

NOT_MEASURED = "not measured"
NOT_PUBLISHED = "not published"


@dataclass(frozen=True)
class Table:
    """`rows` have as many cells as `head`; the first says what the row is of."""

    title: str
    head: list[str]
    rows: list[list[str]]
    note: str = ""


@dataclass(frozen=True)
class Fact:
    """A figure that is told above all: `value`, and in small letters what belongs to it."""

    name: str
    value: str
    detail: str = ""


def facts(record: RunRecord, history: LoggedHistory) -> list[Fact]:
    """Of the steps that count. What was not measured says so."""
    steps, planned = history.steps, record.settings.training.steps
    seconds = total(steps, STEP_ENDED)
    done = int(steps[-1]["step"]) if steps else 0
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
        Fact("Steps", f"{done:,}", f"of {planned:,}" if planned is not None else ""),
        Fact("Held-out accuracy", share(last[1] if last else None), before),
        Fact("Samples a second", number(rate), f"{seconds:,.1f} s in {len(steps):,} steps" if steps else ""),
        Fact("Tokens/s and accelerator", number(throughput(steps)), "end to end"),
        Fact(
            "Staleness, mean",
            number(weighted(steps, "staleness/mean", "samples")),
            f"max {oldest:g}" + (f", bound {limit}" if limit is not None else "") if oldest is not None else "",
        ),
        Fact("Trainer idle", share(weighted(steps, "idle/trainer", STEP_ENDED))),
        Fact("Rollouts idle", share(weighted(steps, "idle/rollout", STEP_ENDED))),
    ]


def throughput(steps: Sequence[Point]) -> float | None:
    """Tokens a second and accelerator over all steps: the mean of `e2e_tps`, weighted by time."""
    return weighted(steps, "e2e_tps", STEP_ENDED)


def lineages(history: LoggedHistory) -> Table | None:
    """None for a run that never went back to a checkpoint."""
    if len(history.lineages) < 2:
        return None
    rows = []
    for each in history.lineages:
        kept = f"{each.first:,} to {each.kept:,}" if each.kept >= each.first else "none"
        again = f"{max(each.kept + 1, each.first):,} to {each.last:,}" if each.kept < each.last else "none"
        rows.append([str(each.incarnation), f"{each.first:,} to {each.last:,}", kept, again, *map(moment, each.times)])
    head = ["Incarnation", "Steps done", "that count", "done again later", "First step ended", "Last step ended"]
    return Table(
        "Lineages", head, rows, "Curves are of the steps that count; a dashed line marks where a later lineage went on."
    )


def evaluations(results: Sequence[EvaluationResult]) -> Table | None:
    """A row for each set of each evaluation; None when there are none in the run's folder."""
    if not results:
        return None
    most = sorted({k for result in results for each in result.sets for k in each.pass_at})
    votes = sorted({k for result in results for each in result.sets for k in each.maj_at})
    rows = [_evaluated(result.step, each, most, votes) for result in results for each in result.sets]
    head = ["Step", "Set", "Problems × samples", *(f"pass@{k}" for k in most), *(f"maj@{k}" for k in votes)]
    return Table("Evaluations", [*head, "Tokens: mean", "median", "95 %", "max", "cut off", "No verdict"], rows)


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


def groups(record: RunRecord) -> Table:
    """Groups by state, dropped ones by reason: the ledger's, else the summary's."""
    states, reasons = record.groups, record.dropped
    if states is None and record.ended is not None:
        states, reasons = record.ended.groups, record.ended.dropped
    if states is None:
        return Table("Groups", ["State", "Groups"], [["all", NOT_MEASURED]])
    rows = [[state, f"{count:,}"] for state, count in states.items() if count or state in ("retired", "dropped")]
    rows += [[f"dropped: {reason}", f"{count:,}"] for reason, count in (reasons or {}).items()]
    return Table("Groups", ["State", "Groups"], rows)


def failures(history: LoggedHistory) -> Table | None:
    """Why scorers failed, over all steps; None when none did."""
    names = sorted({name for point in history.steps for name in point if name.startswith(SCORE_ERRORS)})
    rows = [[name.removeprefix(SCORE_ERRORS), f"{total(history.steps, name):,.0f}"] for name in names]
    return Table("Failures of scorers", ["Reason", "Times"], rows) if rows else None


def algorithm(settings: RecordedSettings) -> str:
    """As published rows call it."""
    if settings.critic is not None:
        return "ppo"
    if settings.algorithm.dynamic_sampling:
        return "dapo"
    return "grpo" if settings.algorithm.advantage == "group_norm" else settings.algorithm.advantage


def comparison(rows: Sequence[PublishedFigure], record: RunRecord, history: LoggedHistory) -> Table | None:
    """Published rows of the run's model beside the run, those of its algorithm first; None when there are none."""
    if not rows:
        return None
    settings, steps = record.settings, history.steps
    kind = algorithm(settings)
    rows = sorted(rows, key=lambda row: row.algorithm != kind)
    own = [
        kind or NOT_MEASURED,
        NOT_MEASURED,
        number(steps[-1].get("world_size") if steps else None),
        number(settings.training.groups_per_step),
        number(settings.sampling.group_size),
        number(settings.data.max_prompt_tokens),
        number(settings.sampling.max_new_tokens),
        number(weighted(steps, "prompt_length/mean", "samples")),
        number(weighted(steps, "response_length/mean", "samples")),
        number(throughput(steps)),
        "",
    ]
    published = [
        [
            row.algorithm,
            row.hardware,
            NOT_PUBLISHED,
            *(
                number(value, NOT_PUBLISHED)
                for value in (row.global_batch, row.group_size, row.max_prompt_tokens, row.max_new_tokens)
            ),
            NOT_PUBLISHED,
            NOT_PUBLISHED,
            number(row.e2e_tps_per_device, NOT_PUBLISHED),
            row.source,
        ]
        for row in rows
    ]
    names = [
        *("Algorithm", "Hardware", "Accelerators", "Prompts a step", "Samples a prompt", "Prompt tokens, at most"),
        *("Reply tokens, at most", "Prompt tokens, mean", "Reply tokens, mean", "Tokens/s and device, end to end", "Source"),
    ]
    cells = [list(row) for row in zip(names, own, *published, strict=True)]
    return Table(
        "Published throughput of the same model",
        ["", "this run", *(row.name for row in rows)],
        cells,
        "Both count tokens of prompts and replies, over all devices of the run. On A3 a card is two devices: what is logged is "
        "a device's, and is to be doubled for a card; what is published may be a card's. Figures compare only where batch, "
        "samples, lengths and hardware are alike.",
    )


# ------------------------------------------------------------------------------------------ arithmetic and its words


def total(steps: Sequence[Point], name: str) -> float:
    return math.fsum(point[name] for point in steps if _has(point, name))


def weighted(steps: Sequence[Point], name: str, by: str) -> float | None:
    """The mean of `name` over steps, weighted by `by`; None when no step has both."""
    both = [(point[name], point[by]) for point in steps if _has(point, name) and _has(point, by)]
    weight = math.fsum(weight for _, weight in both)
    return math.fsum(value * weight for value, weight in both) / weight if weight else None


def _has(point: Point, name: str) -> bool:
    return isinstance(point.get(name), (int, float))


def number(value: float | None, otherwise: str = NOT_MEASURED) -> str:
    """Three significant digits below 1,000, whole numbers above."""
    if value is None:
        return otherwise
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def share(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value:.1%}"


def moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
