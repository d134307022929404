"""`sluice import-mindspeed` and `import-verl`: translate configurations of other programs, with a report of every key."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from launcher.importing import report
from launcher.importing.keys import KeyTable, Translation
from runtime.errors import ConfigError, UserError
from runtime.telemetry.shown import LiteralTable, say

_PRINTED = 200  # columns if the output is no terminal


def run(options: argparse.Namespace) -> None:
    """Translate the file, and print and report what became of each key. Raises UserError, a line per fault, and writes nothing
    then."""
    if options.command == "import-verl":
        from launcher.verl.translate import TABLE, imported
    else:
        from launcher.mindspeed.translate import TABLE, imported
    file, models, output, markdown = options.file, options.models, options.output, options.report
    without = [name for name in options.without.split(",") if name.strip()]
    faults = list(_unwritable({"--output": output, "--report": markdown}))
    if models is not None and not models.is_dir():
        faults.append(f"--models: '{models}' is not a folder")
    try:
        translation = imported(file, models, without)
    except ConfigError as error:
        raise ConfigError([*faults, *error.faults, *_hint(TABLE, error.faults)]) from error
    if faults:
        raise ConfigError(faults)
    written = {output: report.configuration(file.name, translation)}
    if markdown is not None:
        written[markdown] = report.markdown(file.name, translation)
    _write(written)
    _print(file, output, markdown, translation)


def _hint(table: KeyTable, faults: Sequence[str]) -> Iterator[str]:
    paths = [fault.partition(":")[0] for fault in faults if ": refused: " in fault]
    names = dict.fromkeys(path.rpartition(".")[2] for path in paths)
    loose = [name for name in names if name not in table.essential]
    if loose:
        yield f"--without {','.join(loose)} leaves out what {'is refused' if len(loose) == len(names) else 'may be left out'}"


def _unwritable(named: dict[str, Path | None]) -> Iterator[str]:
    """Yield one line for each file that could not be written as new."""
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


def _print(file: Path, output: Path, markdown: Path | None, translation: Translation) -> None:
    console = Console()
    console = console if console.is_terminal else Console(width=_PRINTED)
    rows = LiteralTable(title=file.name, title_justify="left")
    rows.add_column(translation.program, overflow="fold", max_width=60)
    for column in report.COLUMNS:
        rows.add_column(column, overflow="fold", max_width=30 if column == "value" else None)
    brief = list(report.brief(translation.rows))
    for row in brief:
        rows.add_row(*report.cells(row))
    console.print(rows)
    if translation.carried:
        defaults = LiteralTable("left to its default", "there", "here", title_justify="left")
        for each in translation.carried:
            defaults.add_row(each.path, each.value, ", ".join(each.ours))
        console.print(defaults)
    for line in (report.totals(translation.rows), *translation.advice):
        say(console, line)
    if len(brief) < len(translation.rows) and markdown is None:
        say(console, "each of the keys that are ignored alike: --report FILE")
    for path in filter(None, (output, markdown)):
        say(console, f"written: {path}")
    say(console, f"next: sluice validate {output}")
