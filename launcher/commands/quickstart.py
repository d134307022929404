"""`sluice quickstart`: the configurations that come with the package, and what to look at once one has run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from runtime import run_files
from runtime.errors import UserError

FILE = Path(__file__).parents[1] / "quickstart.yaml"  # configs/quickstart.yaml of the source tree
PRETRAINED = FILE.with_name("quickstart_pretrained.yaml")
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
    "{command} --write my.yaml": "this configuration, for `sluice train my.yaml`",
}


def write(configuration: Path, file: Path, overrides: Sequence[str]) -> list[str]:
    """Copy a configuration to `file`, which is new; returns what to say. Raises UserError."""
    if overrides:
        raise UserError(f"--write: {overrides[0]} would not be in the file; must be without overrides")
    try:
        with file.open("xb") as out:
            out.write(configuration.read_bytes())
    except OSError as error:
        raise UserError(
            f"--write: '{file}': {(error.strerror or str(error)).lower()}; must be a new file in a folder that exists"
        ) from error
    return [f"written: {file}", f"next: sluice train {shlex.quote(str(file))}"]


def advice(folder: str, command: str) -> list[str]:
    """What a run of `command` in `folder` left there, and commands that show it: one line each."""
    files = {f"{folder}/{name}": what for name, what in _WRITTEN.items()}
    commands = {f"sluice {line.format(run=shlex.quote(folder), command=command)}": what for line, what in _NEXT.items()}
    width = max(map(len, files | commands))
    return [f"  {name:{width}}  {what}" for name, what in (files | commands).items()]
