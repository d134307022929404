"""What evaluations found, as a table: figures down, evaluations across."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from runtime.evaluation.results import EvaluationResult, SetResult
from runtime.telemetry.shown import LiteralTable


def render(results: Sequence[EvaluationResult]) -> LiteralTable:
    """The figures of every set in each of `results`, and below what is to be said of them."""
    by_name = [{each.name: each for each in result.sets} for result in results]
    caption = "\n".join(
        f"{name}, step {result.step}: {note}"
        for result, sets in zip(results, by_name, strict=True)
        for name, each in sets.items()
        for note in _notes(each)
    )
    table = LiteralTable(title="Evaluation", title_justify="left", title_style="bold", caption=caption, caption_justify="left")
    table.add_column("set", style="cyan", no_wrap=True)
    table.add_column("figure")
    for result in results:
        table.add_column(f"step {result.step}", justify="right")
    for name in dict.fromkeys(name for sets in by_name for name in sets):
        columns = [dict(_figures(sets[name])) if name in sets else {} for sets in by_name]
        figures = list(dict.fromkeys(figure for column in columns for figure in column))
        for figure in figures:
            cells = [column.get(figure, "–") for column in columns]
            table.add_row(name if figure == figures[0] else "", figure, *cells, end_section=figure == figures[-1])
    return table


def _figures(each: SetResult) -> Iterator[tuple[str, str]]:
    yield "problems × samples", f"{each.problems:,} × {each.samples}"
    for k, value in each.pass_at.items():
        error = f" ± {100 * each.standard_error:.1f}" if k == 1 and each.standard_error is not None else ""
        yield f"pass@{k}", f"{value:.1%}{error}"
    for k, value in each.maj_at.items():
        yield f"maj@{k}", f"{value:.1%}"
    lengths = each.lengths
    yield "tokens: mean, median", f"{lengths.mean:,.1f}, {lengths.median:,.0f}"
    yield "tokens: p95, max", f"{lengths.p95:,.0f}, {lengths.max:,}"
    yield "cut off by length", f"{lengths.truncated:.1%}"


def _notes(each: SetResult) -> Iterator[str]:
    yield from each.notes
    if each.errors:
        yield "errors: " + ", ".join(f"{count:,} {reason}" for reason, count in each.errors.items())
    for k, count in each.left_out.items():
        yield f"too few verdicts for @{k}: {count:,} of {each.problems:,} problems"
