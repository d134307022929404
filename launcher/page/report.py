"""`sluice report`: the page of a run as one HTML file, at any time: during the run, after its end, after a kill. The file holds
page.html, page.css, the scripts, and the data of views, lanes and samples. Its script takes from `held` what it would ask a
server for."""

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
from launcher.page.views import PLAIN, STATIC, THIS, RunView
from runtime.errors import SluiceError, UserError

FILE = "report.html"
PIXELS = 4000  # of the lanes: a file cannot compute them again for a closer look
GROUPS, BYTES = 50, 4 << 20  # limits of the samples; the newest groups are taken

_SCRIPT = re.compile(r'<script src="/static/(\w+\.js)" defer></script>\n')
_STYLE = '<link rel="stylesheet" href="/static/page.css">\n'


def run(options: argparse.Namespace) -> None:
    print(report(options.run, options.output))


def report(folder: Path, output: Path | None) -> Path:
    """Write the whole file or nothing. Return its path. Raises UserError for no run, or a file that cannot be written."""
    path = output or folder / FILE
    try:
        content = text(held(folder))
    except UnicodeEncodeError as error:
        raise UserError(f"{folder}: it has a text that is not Unicode: {error.object[error.start : error.end]!r}") from error
    if path.is_dir():
        raise UserError(f"--output: {path} is a folder; must be a file")
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(content, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UserError(f"--output: cannot write {path}: {(error.strerror or str(error)).lower()}") from error
    return path


def held(folder: Path) -> dict[str, Any]:
    """Return the answers of a server for this run, by path. Raises UserError if the folder holds no run."""
    run = RunView(folder)
    summary = run.summary()
    summary["notes"].append(f"Made {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC from {folder.resolve()}")
    views: dict[str, Callable[[], Any]] = {
        **{name: getattr(run, name) for name in PLAIN[1:]},
        "metric": lambda: run.metric("eval/accuracy"),
        "why": lambda: run.why(None, None),
        "lanes": lambda: run.lanes(None, None, PIXELS),
        "configuration": lambda: run.configuration(None),
    }
    answers = {"summary": summary, **{name: _answer(view) for name, view in views.items()}}
    try:
        answers |= _samples(SampleReader(folder))
    except (SluiceError, OSError) as error:
        answers["samples"] = {"error": str(error)}
    return {"/api/runs": [{"id": THIS, **summary}], **{f"/api/run/{THIS}/{name}": found for name, found in answers.items()}}


def _answer(view: Callable[[], Any]) -> Any:
    """Return the view's data, or its error, which the page shows in the view's place."""
    try:
        return view()
    except (SluiceError, OSError) as error:
        return {"error": str(error)}


def _samples(samples: SampleReader) -> dict[str, Any]:
    """Return the newest groups, each whole, and their list."""
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
    """Return the page as one text. A browser that keeps to the policy runs only these scripts: no name in a run can add one."""
    page = (STATIC / "page.html").read_text(encoding="utf-8")
    scripts = ["\n" + (STATIC / name).read_text(encoding="utf-8") for name in _SCRIPT.findall(page)]
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{each}'" for each in hashes)
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    # Escaped, so that the JSON cannot end its HTML element.
    data = msgspec.json.encode(answers).decode().replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    inside = [f'<script type="application/json" id="held">{data}</script>', *(f"<script>{each}</script>" for each in scripts)]
    css = f"<style>\n{(STATIC / 'page.css').read_text(encoding='utf-8')}</style>\n"
    head, _, tail = _SCRIPT.sub("", page).replace(_STYLE, css).partition("</body>")
    head = head.replace("<head>\n", f'<head>\n<meta http-equiv="Content-Security-Policy" content="{policy}">\n', 1)
    return "".join([head, *(f"{each}\n" for each in inside), "</body>", tail])
