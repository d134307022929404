"""The report of a translation: what became of each key, as lines for a file and as a header of the configuration. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from launcher.importing.keys import Outcome, TranslatedKey, Translation
from runtime.config.yaml_text import dump

OUTCOMES: tuple[Outcome, ...] = ("mapped", "to decide", "ignored", "refused", "left out")
ALIKE = 4  # keys
COLUMNS = ("value", "outcome", "here, or why not")  # after the key's column, which has the program's name


def totals(rows: Sequence[TranslatedKey]) -> str:
    """Return a line such as `40 keys: 31 mapped, 9 ignored, 0 refused, 0 left out`."""
    counts = Counter(row.outcome for row in rows)
    return f"{len(rows)} keys: " + ", ".join(
        f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome] or outcome != "to decide"
    )


def brief(rows: Sequence[TranslatedKey]) -> Iterator[TranslatedKey]:
    """Yield the rows for a screen: of more than ALIKE keys ignored for one reason, the first and the number of the others."""
    alike = Counter(row.reason for row in rows if row.outcome == "ignored")
    seen: set[str] = set()
    for row in rows:
        if row.outcome != "ignored" or alike[row.reason] <= ALIKE:
            yield row
        elif row.reason not in seen:
            seen.add(row.reason)
            yield TranslatedKey(f"{row.path} and {alike[row.reason] - 1} more", "", "ignored", reason=row.reason)


def cells(row: TranslatedKey) -> tuple[str, str, str, str]:
    """Return a row: the key, and what is under COLUMNS."""
    return row.path, row.value, row.outcome, "; ".join(filter(None, [", ".join(row.ours), row.reason]))


def markdown(file: str, translation: Translation) -> str:
    """Return the whole report: keys, defaults that were carried over, and advice."""
    columns = (translation.program, *COLUMNS)
    lines = [f"# {file}", "", totals(translation.rows), "", *_table(columns, [cells(row) for row in translation.rows])]
    if translation.carried:
        lines += ["", "Keys that the file leaves out, whose default there is not Sluice's:", ""]
        rows = [(each.path, each.value, ", ".join(each.ours)) for each in translation.carried]
        lines += _table((translation.program, "default", "here"), rows)
    return "\n".join([*lines, "", *(f"- {line}" for line in translation.advice)]) + "\n"


def configuration(file: str, translation: Translation) -> str:
    """Return our YAML file, with a header that says what is not in it."""
    left = [row.path for row in translation.rows if row.outcome == "left out"]
    counts = Counter(row.outcome for row in translation.rows)
    head = [
        f"# From {file}, by sluice {translation.command}: {totals(translation.rows)}.",
        f"# {counts['ignored']} keys have no counterpart and need none; what is Sluice's default is not written.",
    ]
    if left:
        head.append(f"# Left out by --without: {', '.join(left)}.")
    head += [f"# {line}." for line in translation.advice]
    sections = [dump({name: content}, leaves_inline=True) for name, content in translation.raw.items()]
    return "\n".join([*head, *sections])


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [columns, ["---"] * len(columns), *rows]
    return [f"| {' | '.join(text.replace('|', chr(92) + '|') for text in line)} |" for line in lines]
