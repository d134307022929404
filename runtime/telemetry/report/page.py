"""The page: one HTML file with everything in it, which asks no network for anything and lets no text of the run act as HTML."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from pathlib import Path

import jinja2

from runtime.telemetry.report import figures, tables
from runtime.telemetry.report.panels import Panel
from runtime.telemetry.report.tables import Fact, Table

_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Page:
    """What the template tells, but for the scripts."""

    name: str
    state: str
    notes: list[str]
    facts: list[Fact]
    sections: list[tuple[str, list[Panel]]]
    before: list[Table]  # the curves
    after: list[Table]
    startup: str
    configuration: str
    returns: list[int]
    made: str


def render(page: Page) -> str:
    """The file's text."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    template = environment.from_string((_FOLDER / "page.html").read_text(encoding="utf-8"))
    scripts = [figures.script(), (_FOLDER / "page.js").read_text(encoding="utf-8")]
    drawn = [
        (title, [(panel.title, _in_script(figures.draw(panel, page.returns)) if panel.series else None) for panel in panels])
        for title, panels in page.sections
    ]
    return template.render(
        page=page,
        sections=drawn,
        style=(_FOLDER / "page.css").read_text(encoding="utf-8"),
        scripts=scripts,
        # A browser that keeps to it runs these scripts and no others, whatever a run has named its rules.
        hashes=[_hash(script) for script in scripts],
        not_measured=tables.NOT_MEASURED,
    )


def _in_script(data: str) -> str:
    """JSON that cannot end the script element it stands in."""
    return data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
