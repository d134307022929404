"""What a run says of itself where its output is no terminal."""

from __future__ import annotations

import io

from rich.console import Console

from launcher.view import View
from runtime.status import Progress


def test_what_a_phase_without_a_count_waits_for_is_a_line_each_time_that_it_changes() -> None:
    out = io.StringIO()
    with View(Console(file=out, width=80)) as view:
        for detail in ("", "waits for b, c", "waits for b, c", "waits for c", ""):
            view.progress(Progress(phase="starting", detail=detail))
    assert [line.strip() for line in out.getvalue().splitlines()] == [
        "starting",
        "starting  waits for b, c",
        "starting  waits for c",
    ]


def test_a_phase_that_goes_on_unchanged_is_one_line() -> None:
    out = io.StringIO()
    with View(Console(file=out, width=80), line_interval=0.0) as view:
        view.phase("starting")
        for done in (0, 0, 1):
            view.progress(Progress(phase="training", done=done, total=2))
        view.phase("starting")
    assert [line.strip() for line in out.getvalue().splitlines()] == ["starting", "training  0/2", "training  1/2", "starting"]


def test_an_alarm_is_a_line_of_its_own_once() -> None:
    out = io.StringIO()
    with View(Console(file=out, width=40)) as view:
        for alarm in ("", "rollout-1 has other weights than the trainer", "rollout-1 has other weights than the trainer"):
            view.progress(Progress(phase="training", done=1, total=2, alarm=alarm))
    assert [line.strip() for line in out.getvalue().splitlines()] == [
        "training  1/2",
        "ALARM: rollout-1 has other weights than the trainer",
    ]
