"""`sluice quickstart`: the configuration that comes with the package, and what to look at once it has run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from runtime import run_files
from runtime.errors import UserError

FILE = Path(__file__).parents[1] / "quickstart.yaml"  # configs/quickstart.yaml of the source tree
_WRITTEN = {
    run_files.MODEL: "the trained model, a Hugging Face folder",
    run_files.METRICS: "each step's figures",
    run_files.SUMMARY: "the table above",
    run_files.LOGS: "one file for each process",
}
_NEXT = {
    "samples {run} --limit 3": "what the model was asked, replied and earned",
    "report {run}": "curves, tables and configuration as one HTML file",
    "page {run}": "the same and more in a browser, also while a run goes on",
    "why {run}": "what the steps waited for",
    "quickstart --write my.yaml": "this configuration, for `sluice train my.yaml`",
}


def write(file: Path, overrides: Sequence[str]) -> list[str]:
    """Copy the configuration to `file`, which is new; returns what to say. Raises UserError."""
    if overrides:
        raise UserError(f"--write: {overrides[0]} would not be in the file; must be without overrides")
    try:
        with file.open("xb") as out:
            out.write(FILE.read_bytes())
    except OSError as error:
        raise UserError(
            f"--write: '{file}': {(error.strerror or str(error)).lower()}; must be a new file in a folder that exists"
        ) from error
    return [f"written: {file}", f"next: sluice train {shlex.quote(str(file))}"]


def advice(folder: str) -> list[str]:
    """What a run in `folder` left there, and commands that show it: one line each."""
    files = {f"{folder}/{name}": what for name, what in _WRITTEN.items()}
    commands = {f"sluice {command.format(run=shlex.quote(folder))}": what for command, what in _NEXT.items()}
    width = max(map(len, files | commands))
    return [f"  {name:{width}}  {what}" for name, what in (files | commands).items()]
