"""`sluice report`: the page of a run as one HTML file, at any time: while the run is under way, after it, after a kill.

::

    page.html, page.css, *.js ──┐
                                ├──► report.html, whose script takes from `held` what it would ask a server for
    views, lanes, samples ──────┘
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from launcher.page.samples import SampleFilter, SampleReader
from launcher.page.views import STATIC, THIS, RunView
from runtime.errors import SluiceError, UserError

FILE = "report.html"
PIXELS = 4000  # of the lanes, which a file cannot ask for again when somebody looks closer
GROUPS, BYTES = 50, 4 << 20  # of samples at most, the newest

_SCRIPT = re.compile(r'<script src="/static/(\w+\.js)" defer></script>\n')
_STYLE = re.compile(r'<link rel="stylesheet" href="/static/(\w+\.css)">\n')


def run(options: argparse.Namespace) -> None:
    print(report(options.run, options.output))


def report(folder: Path, output: Path | None) -> Path:
    """Write the file, whole or not at all; returns its path. Raises UserError for what is no run's folder, and for a file that
    cannot be written."""
    path = output or folder / FILE
    try:
        content = text(held(folder))
    except UnicodeEncodeError as error:
        raise UserError(f"{folder}: a text in it is no Unicode: {error.object[error.start : error.end]!r}") from error
    if path.is_dir():
        raise UserError(f"--output: {path} is a folder; a file is wanted")
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(content, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UserError(f"--output: cannot write {path}: {(error.strerror or str(error)).lower()}") from error
    return path


def held(folder: Path) -> dict[str, Any]:
    """What a server of this run would answer, by path. Raises UserError for what is no run's folder."""
    run = RunView(folder)
    told = run.summary()
    told["notes"].append(f"Made {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC from {folder.resolve()}")
    views: dict[str, Callable[[], Any]] = {
        "curves": run.curves,
        "metric": lambda: run.metric("eval/accuracy"),
        "why": lambda: run.why(None, None),
        "lanes": lambda: run.lanes(None, None, PIXELS),
        "occupancy": run.occupancy,
        "weights": run.weights,
        "evaluations": run.evaluations,
        "processes": run.processes,
        "configuration": lambda: run.configuration(None),
    }
    answers = {"summary": told, **{name: _answer(view) for name, view in views.items()}}
    try:
        answers |= _samples(SampleReader(folder))
    except (SluiceError, OSError) as error:
        answers["samples"] = {"error": str(error)}
    return {"/api/runs": [{"id": THIS, **told}], **{f"/api/run/{THIS}/{name}": found for name, found in answers.items()}}


def _answer(view: Callable[[], Any]) -> Any:
    """What cannot be read is said where it would be shown."""
    try:
        return view()
    except (SluiceError, OSError) as error:
        return {"error": str(error)}


def _samples(samples: SampleReader) -> dict[str, Any]:
    """The newest groups, each whole, and their list."""
    index = samples.index(SampleFilter())
    groups: dict[str, Any] = {}
    room = BYTES
    for group in reversed(index["ids"][-GROUPS:]):
        found = msgspec.json.encode(samples.group(group))
        room -= len(found)
        if room < 0:
            break
        groups[f"group?id={group}"] = msgspec.Raw(found)
    first = len(index["ids"]) - len(groups)
    newest = {name: index[name][first:] for name in ("ids", "rows", "steps")}
    return {"samples": {**newest, "next": None, "of": len(index["ids"])}, **groups}


def text(answers: dict[str, Any]) -> str:
    """The page's files in one. A browser that keeps to its policy runs these scripts and no others, whatever a run has named
    its rules, and loads nothing."""
    page = (STATIC / "page.html").read_text(encoding="utf-8")
    scripts = ["\n" + (STATIC / name).read_text(encoding="utf-8") for name in _SCRIPT.findall(page)]
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    # JSON that cannot end the element in which it stands.
    data = msgspec.json.encode(answers).decode().replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    inside = [f'<script type="application/json" id="held">{data}</script>', *(f"<script>{each}</script>" for each in scripts)]
    head, _, tail = _STYLE.sub(_styled, _SCRIPT.sub("", page)).partition("</body>")
    head = head.replace("<head>\n", f'<head>\n<meta http-equiv="Content-Security-Policy" content="{policy}">\n', 1)
    return "".join([head, *(f"{each}\n" for each in inside), "</body>", tail])


def _styled(found: re.Match[str]) -> str:
    return f"<style>\n{(STATIC / found[1]).read_text(encoding='utf-8')}</style>\n"


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
