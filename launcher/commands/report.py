"""`sluice report`: a run's folder as one HTML file, at any time: while the run is under way, after it, after a kill."""

from __future__ import annotations

import argparse
from datetime import datetime, timezone
from pathlib import Path

from launcher import run_folder
from runtime import run_files
from runtime.errors import UserError
from runtime.telemetry.report import panels, published, record, tables
from runtime.telemetry.report.record import RunRecord

FILE = "report.html"


def run(options: argparse.Namespace) -> None:
    print(report(options.run, options.output))


def report(folder: Path, output: Path | None) -> Path:
    """Write the file, whole or not at all; returns its path. Raises UserError for what is no run's folder, and for a file that
    cannot be written."""
    found = record.read(folder)
    path = output or folder / FILE
    _write(path, text(found, run_folder.under_way(folder)))
    return path


def text(found: RunRecord, under_way: bool) -> str:
    from runtime.telemetry.report.page import Page, render  # which loads plotly

    history = record.history(found.points)
    rows = published.matching(published.load(), found.described, found.settings.model.path)
    before = [tables.comparison(rows, found, history), tables.lineages(history)]
    after = [tables.evaluations(found.evaluations), tables.groups(found), tables.failures(history)]
    now = datetime.now(timezone.utc)
    return render(
        Page(
            name=found.settings.run.name or found.folder.resolve().name,
            state=_state(found, under_way),
            notes=_notes(found, history),
            facts=tables.facts(found, history),
            sections=[(section.title, section.panels) for section in panels.sections(history)],
            before=[table for table in before if table is not None],
            after=[table for table in after if table is not None],
            startup=found.startup,
            configuration=found.configuration,
            returns=history.returns,
            made=f"Made {now:%Y-%m-%d %H:%M:%S} UTC from {found.folder.resolve()}",
        )
    )


def _state(found: RunRecord, under_way: bool) -> str:
    if under_way:
        return "Under way: this is how it stood when the file was made."
    if found.ended is None:
        return f"Ended without a summary: it was killed, or failed; {run_files.LOGS}/ has why."
    return f"Stopped: {found.ended.stop_reason}"


def _notes(found: RunRecord, history: record.LoggedHistory) -> list[str]:
    notes = []
    if not (found.folder / run_files.METRICS).is_file():
        notes.append(f"There is no {run_files.METRICS}: the run logged nothing yet, or has no tracker of that name.")
    elif not history.steps:
        notes.append("No training step has been logged.")
    if found.torn:
        notes.append(f"The last line of {run_files.METRICS} is not whole, and left out.")
    if history.done_again:
        notes.append(f"{history.done_again:,} steps were done again from a checkpoint, and are left out.")
    return notes


def _write(path: Path, content: str) -> None:
    if path.is_dir():
        raise UserError(f"--output: {path} is a folder; a file is wanted")
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(content, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UserError(f"--output: cannot write {path}: {(error.strerror or str(error)).lower()}") from error
