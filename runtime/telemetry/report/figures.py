"""Panels as plotly figures, and plotly's own script. The one module that loads plotly."""

from __future__ import annotations

import html
from collections.abc import Sequence
from itertools import cycle

import numpy as np
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from runtime.telemetry.report.panels import Panel

# Near Okabe and Ito's palette, told apart with any colour vision; without its black, with a lighter blue and a darker yellow:
# they are drawn on white and on black.
_COLOURS = ("#1F86C9", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#B8A800", "#999999")
_HEIGHT = 320
_FEW, _FEW_SPARSE = 40, 100  # points that are marked


def script() -> str:
    """plotly.js, whole, as it stands in a script element."""
    return get_plotlyjs()


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
        name, covered = html.escape(series.name), series.smooth is not None
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
                name=html.escape(series.name),
                legendgroup=html.escape(series.name),
                legendrank=rank,
                mode="lines",
                line={"color": colour, "width": 2.2},
            )


def _stack(figure: go.Figure, panel: Panel) -> None:
    *layers, wall = panel.series
    for series, colour in zip(layers, cycle(_COLOURS), strict=False):
        figure.add_scatter(
            **_points(series.steps, series.values),
            name=html.escape(series.name),
            stackgroup="phases",
            mode="lines",
            line={"color": colour, "width": 0},
            fillcolor=colour,
        )
    line = {"width": 1.8, "dash": "dash"}
    figure.add_scatter(**_points(wall.steps, wall.values), name=html.escape(wall.name), mode="lines", line=line)


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
