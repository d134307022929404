"""`sluice import-mindspeed` and `import-verl`: translate configurations of other programs, with a report of every key."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from launcher.importing.keys import KeyTable, Outcome, TranslatedKey, Translation
from runtime.config.yaml_text import dump
from runtime.errors import ConfigError, UserError
from runtime.telemetry.shown import LiteralTable, say

_PRINTED = 200  # columns if the output is no terminal


def run(options: argparse.Namespace) -> None:
    """Translate the file, and print and report what became of each key. Raises UserError, a line per fault."""
    if options.command == "import-verl":
        from launcher.verl.translate import TABLE, read, translate
    else:
        from launcher.mindspeed.translate import TABLE, read, translate
    file, models, output, report = options.file, options.models, options.output, options.report
    without = [name for name in options.without.split(",") if name.strip()]
    faults = list(_unwritable({"--output": output, "--report": report}))
    if models is not None and not models.is_dir():
        faults.append(f"--models: '{models}' is not a folder")
    try:
        translation = translate(read(file, models), without)
    except ConfigError as error:
        raise ConfigError([*faults, *error.faults, *_hint(TABLE, error.faults)]) from error
    if faults:
        raise ConfigError(faults)
    written = {output: configuration(file.name, translation)}
    if report is not None:
        written[report] = markdown(file.name, translation)
    _write(written)
    _print(file, output, report, translation)


def _hint(table: KeyTable, faults: Sequence[str]) -> Iterator[str]:
    paths = [fault.partition(":")[0] for fault in faults if ": refused: " in fault]
    names = dict.fromkeys(path.rpartition(".")[2] for path in paths)
    loose = [name for name in names if name not in table.essential]
    if loose:
        yield f"--without {','.join(loose)} leaves out what {'is refused' if len(loose) == len(names) else 'may be left out'}"


def _unwritable(named: dict[str, Path | None]) -> Iterator[str]:
    paths = [path for path in named.values() if path is not None]
    for option, path in named.items():
        if path is None:
            continue
        if path.exists():
            yield f"{option}: '{path}' exists; must be a new file"
        elif not path.parent.is_dir():
            yield f"{option}: '{path.parent}' is not a folder"
        elif not os.access(path.parent, os.W_OK):
            yield f"{option}: '{path.parent}' cannot be written to"
    if len(set(paths)) < len(paths):
        yield f"--report: '{paths[-1]}' is --output too; must be another file"


def _write(files: dict[Path, str]) -> None:
    """Write all files, or none of them."""
    written: list[Path] = []
    try:
        for path, text in files.items():
            with path.open("x", encoding="utf-8") as file:
                written.append(path)
                file.write(text)
    except OSError as error:
        for path in written:
            path.unlink(missing_ok=True)
        raise UserError(f"{error.filename or path}: {(error.strerror or str(error)).lower()}; nothing was written") from error


def _print(file: Path, output: Path, report: Path | None, translation: Translation) -> None:
    console = Console()
    console = console if console.is_terminal else Console(width=_PRINTED)
    rows = LiteralTable(title=file.name, title_justify="left")
    rows.add_column(translation.program, overflow="fold", max_width=60)
    for column in _COLUMNS:
        rows.add_column(column, overflow="fold", max_width=30 if column == "value" else None)
    shown = list(brief(translation.rows))
    for row in shown:
        rows.add_row(*cells(row))
    console.print(rows)
    if translation.carried:
        defaults = LiteralTable("left to its default", "there", "here", title_justify="left")
        for each in translation.carried:
            defaults.add_row(each.path, each.value, ", ".join(each.ours))
        console.print(defaults)
    for line in (totals(translation.rows), *translation.advice):
        say(console, line)
    if len(shown) < len(translation.rows) and report is None:
        say(console, "each of the keys that are ignored alike: --report FILE")
    for path in filter(None, (output, report)):
        say(console, f"written: {path}")
    say(console, f"next: sluice validate {output}")


# ---- The report: what became of each key, as lines for a file and as a header of the configuration

OUTCOMES: tuple[Outcome, ...] = ("mapped", "to decide", "ignored", "refused", "left out")
ALIKE = 4  # keys
_COLUMNS = ("value", "outcome", "here, or why not")  # after the key's column, which has the program's name


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
    """Return a row: the key, and what is under _COLUMNS."""
    return row.path, row.value, row.outcome, "; ".join(filter(None, [", ".join(row.ours), row.reason]))


def markdown(file: str, translation: Translation) -> str:
    """Return the whole report: keys, defaults that were carried over, and advice."""
    columns = (translation.program, *_COLUMNS)
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
