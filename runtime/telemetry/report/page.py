"""The page: one HTML file with everything in it, which asks no network for anything and lets no text of the run act as HTML."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import jinja2
import numpy as np
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from runtime.telemetry.report import tables
from runtime.telemetry.report.panels import Panel
from runtime.telemetry.report.tables import Fact, Table
from runtime.telemetry.shown import shown

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
        autoescape=True,
        finalize=lambda told: shown(told) if type(told) is str else told,  # what is safe has a type of its own
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    template = environment.from_string((_FOLDER / "page.html").read_text(encoding="utf-8"))
    scripts = [get_plotlyjs(), (_FOLDER / "page.js").read_text(encoding="utf-8")]
    drawn = [
        (title, [(panel.title, _in_script(draw(panel, page.returns)) if panel.series else None) for panel in panels])
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


def _label(name: str) -> str:
    """As plotly takes it, for which some tags are styles."""
    return html.escape(shown(name))


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


# Near Okabe and Ito's palette, told apart with any colour vision; without its black, with a lighter blue and a darker yellow:
# they are drawn on white and on black.
_COLOURS = ("#1F86C9", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#B8A800", "#999999")
_HEIGHT = 320
_FEW, _FEW_SPARSE = 40, 100  # points that are marked


def draw(panel: Panel, returns: Sequence[int]) -> str:
    """A figure as JSON, without colours of its background: the page has them. `returns`: steps to mark."""
    figure = go.Figure(layout=go.Layout(template=None, height=_HEIGHT, margin={"l": 64, "r": 16, "t": 30, "b": 44}))
    if panel.kind == "bars":
        _bars(figure, panel)
    elif panel.kind == "stack":
        _stack(figure, panel)
    else:
        _curves(figure, panel)
    figure.update_xaxes(title_text=panel.x, rangemode="tozero" if panel.kind == "bars" else "normal")
    figure.update_yaxes(
        title_text=panel.unit,
        type="log" if panel.log else "linear",
        dtick="D2" if panel.log else None,
        tickformat="~%" if panel.share else None,
        hoverformat=".2%" if panel.share else ".4g",
        exponentformat="power" if panel.log else "e",
        rangemode="tozero" if panel.share or panel.kind in ("bars", "stack") else "normal",
    )
    figure.update_layout(
        hovermode="closest" if panel.kind == "bars" else "x unified",
        legend={"orientation": "h", "y": -0.2, "yanchor": "top", "x": 0.0, "xanchor": "left", "traceorder": "normal"},
        hoverlabel={"namelength": -1},
        showlegend=panel.kind != "bars" and len(panel.series) > 1,
    )
    if panel.kind != "bars":
        for step in returns:
            figure.add_vline(step + 0.5, line={"dash": "dash", "width": 1, "color": "#888888"})
    return str(figure.to_json())


def _curves(figure: go.Figure, panel: Panel) -> None:
    """What is smooth over what is not, and the first of each over the others."""
    drawn = list(zip(panel.series, cycle(_COLOURS), strict=False))[::-1]
    few = _FEW_SPARSE if panel.kind == "sparse" else _FEW
    for rank, (series, colour) in zip(range(len(drawn), 0, -1), drawn, strict=True):
        name, covered = _label(series.name), series.smooth is not None
        points = _points(series.steps, series.values, panel.log)
        figure.add_scatter(
            **points,
            name=f"{name}, each step" if covered else name,
            legendgroup=name,
            showlegend=not covered,
            legendrank=rank,
            mode="lines+markers" if len(series.steps) <= few or _has_lonely(points["y"]) else "lines",
            line={"color": colour, "width": 1 if covered else 1.8},
            opacity=0.45 if covered else 1.0,
        )
    for rank, (series, colour) in zip(range(len(drawn), 0, -1), drawn, strict=True):
        if series.smooth is not None:
            figure.add_scatter(
                **_points(series.steps, series.smooth, panel.log),
                name=_label(series.name),
                legendgroup=_label(series.name),
                legendrank=rank,
                mode="lines",
                line={"color": colour, "width": 2.2},
            )


def _stack(figure: go.Figure, panel: Panel) -> None:
    *layers, wall = panel.series
    for series, colour in zip(layers, cycle(_COLOURS), strict=False):
        figure.add_scatter(
            **_points(series.steps, series.values),
            name=_label(series.name),
            stackgroup="phases",
            mode="lines",
            line={"color": colour, "width": 0},
            fillcolor=colour,
        )
    line = {"width": 1.8, "dash": "dash"}
    figure.add_scatter(**_points(wall.steps, wall.values), name=_label(wall.name), mode="lines", line=line)


def _bars(figure: go.Figure, panel: Panel) -> None:
    for series in panel.series:
        total = series.values.sum()
        figure.add_bar(
            x=series.steps,
            y=series.values,
            marker={"color": _COLOURS[0]},
            text=[f"{value / total:.1%}" for value in series.values],
            hovertemplate="%{x}: %{y:,} (%{text})<extra></extra>",
        )
    figure.update_xaxes(dtick=1)


def _has_lonely(values: np.ndarray) -> bool:
    """Whether a number stands between gaps, so that no line would show it."""
    there = np.pad(~np.isnan(values), 1)
    return bool((there[1:-1] & ~there[:-2] & ~there[2:]).any())


def _points(steps: np.ndarray, values: np.ndarray, log: bool = False) -> dict[str, np.ndarray]:
    """In as few bytes as show no difference: plotly writes arrays as base64. A logarithmic axis shows nothing below 0."""
    whole = steps.astype(np.int32) if np.array_equal(steps, steps.astype(np.int32)) else steps.astype(np.float32)
    return {"x": whole, "y": (np.where(values > 0, values, np.nan) if log else values).astype(np.float32)}
