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
