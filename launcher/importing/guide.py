"""The tables of keys in the guides, each from a keys.yaml; `python -m launcher.importing.guide PAGE` writes them."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from launcher.importing.keys import KeyTable, Outcome, TheirKey, TranslatedKey, Translation, shown
from runtime.config.yaml_text import dump

# ---- Report
#
# The report of a translation: what became of each key, as lines for a file and as a header of the configuration. Pure.

OUTCOMES: tuple[Outcome, ...] = ("mapped", "to decide", "ignored", "refused", "left out")
ALIKE = 4  # keys
COLUMNS = ("value", "outcome", "here, or why not")  # behind the key's, which is the program's name


def totals(rows: Sequence[TranslatedKey]) -> str:
    """`40 keys: 31 mapped, 9 ignored, 0 refused, 0 left out`."""
    counts = Counter(row.outcome for row in rows)
    return f"{len(rows)} keys: " + ", ".join(
        f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome] or outcome != "to decide"
    )


def brief(rows: Sequence[TranslatedKey]) -> Iterator[TranslatedKey]:
    """For a screen: of more than ALIKE keys that are ignored for one reason, the first and the number of the others."""
    alike = Counter(row.reason for row in rows if row.outcome == "ignored")
    seen: set[str] = set()
    for row in rows:
        if row.outcome != "ignored" or alike[row.reason] <= ALIKE:
            yield row
        elif row.reason not in seen:
            seen.add(row.reason)
            yield TranslatedKey(f"{row.path} and {alike[row.reason] - 1} more", "", "ignored", reason=row.reason)


def cells(row: TranslatedKey) -> tuple[str, str, str, str]:
    """A row: the key, and what is under COLUMNS."""
    return row.path, row.value, row.outcome, "; ".join(filter(None, [", ".join(row.ours), row.reason]))


def markdown(file: str, translation: Translation) -> str:
    """The whole report: keys, defaults that were carried over, and what to know besides."""
    return "\n".join(_report_lines(file, translation)) + "\n"


def configuration(file: str, translation: Translation) -> str:
    """The YAML file of ours, with a header that says what is not in it."""
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


def _report_lines(file: str, translation: Translation) -> Iterator[str]:
    yield f"# {file}"
    yield ""
    yield totals(translation.rows)
    yield ""
    yield from _table((translation.program, *COLUMNS), [cells(row) for row in translation.rows])
    if translation.carried:
        yield ""
        yield "Keys that the file leaves out, whose default there is not Sluice's:"
        yield ""
        rows = [(each.path, each.value, ", ".join(each.ours)) for each in translation.carried]
        yield from _table((translation.program, "default", "here"), rows)
    yield ""
    yield from (f"- {line}" for line in translation.advice)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield _line(columns)
    yield _line(["---"] * len(columns))
    yield from map(_line, rows)


def _line(texts: Sequence[str]) -> str:
    return f"| {' | '.join(text.replace('|', chr(92) + '|') for text in texts)} |"


MARKS = re.compile(r"(<!-- keys: begin, from launcher/(\w+)/keys.yaml -->\n).*?(<!-- keys: end -->)", re.DOTALL)
_OTHERS = "others"  # the heading of keys that are in no section


def renewed(page: str) -> str:
    """`page` with the tables between its marks as they should be."""
    folder = Path(__file__).parents[1]
    return MARKS.sub(lambda found: f"{found[1]}\n{tables(folder / found[2] / 'keys.yaml')}\n{found[3]}", page)


def tables(file: Path) -> str:
    """A section for each of theirs: what is mapped, row by row; what is ignored or refused, by reason."""
    return "\n".join(_lines(KeyTable("", "", file).sections))


def _lines(sections: dict[str, dict[str, TheirKey]]) -> Iterator[str]:
    counts: dict[str, Counter[str]] = {name: Counter(key.outcome for key in keys.values()) for name, keys in sections.items()}
    total = sum(counts.values(), Counter[str]())
    outcomes = [outcome for outcome in ("mapped", "to decide", "ignored", "refused") if total[outcome]]
    yield f"| section | {' | '.join(outcomes)} |"
    yield "| --- |" + " --- |" * len(outcomes)
    for name, count in counts.items():
        if count:
            anchor = (name or _OTHERS).replace(".", "")
            yield f"| [`{name or _OTHERS}`](#{anchor}) | {' | '.join(str(count[outcome]) for outcome in outcomes)} |"
    yield f"| all | {' | '.join(str(total[outcome]) for outcome in outcomes)} |"
    for name, keys in sections.items():
        if keys:
            yield from ("", f"### {name or _OTHERS}", "")
            yield from _section(keys)


def _section(keys: dict[str, TheirKey]) -> Iterator[str]:
    mapped = {name: key for name, key in keys.items() if key.to}
    if mapped:
        yield "| key | default there | decides | how |"
        yield "| --- | --- | --- | --- |"
    for name, key in mapped.items():
        default = "" if key.default is None else f"`{shown(key.default)}`"
        yield f"| `{name}` | {default} | {', '.join(f'`{path}`' for path in key.to)} | {_how(key)} |"
    yield from _by_reason("To decide", {name: key for name, key in keys.items() if key.decide}, lambda key: key.decide)
    yield from _by_reason("Ignored", {name: key for name, key in keys.items() if key.ignored}, lambda key: key.ignored)
    for title, essential in {
        "Refused, unless off": False,
        "Refused, unless off, and not left out by `--without`": True,
    }.items():
        chosen = {name: key for name, key in keys.items() if key.refused and key.essential is essential}
        yield from _by_reason(title, chosen, lambda key: key.refused)


def _how(key: TheirKey) -> str:
    named = [f"{theirs}" if theirs == ours else f"{theirs} → {ours}" for theirs, ours in key.values.items()]
    return "; ".join(filter(None, [", ".join(named), key.note]))


def _by_reason(title: str, keys: dict[str, TheirKey], reason: Callable[[TheirKey], str]) -> Iterator[str]:
    if not keys:
        return
    named: dict[str, list[str]] = {}
    for name, key in keys.items():
        named.setdefault(reason(key), []).append(f"`{name}`")
    yield from ("", f"{title}:", "")
    yield from (f"- {', '.join(names)}: {why}" for why, names in named.items())


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(renewed(path.read_text(encoding="utf-8")), encoding="utf-8")
