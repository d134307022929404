"""The view of a run: progress bars on a terminal, lines at intervals elsewhere."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column

from runtime import status, timeouts
from runtime.telemetry.shown import say, shown


class View:
    """One line a phase, with figures beside its bar; without a terminal a line each `line_interval` seconds at most."""

    def __init__(self, console: Console, line_interval: float = timeouts.PROGRESS_LINE, verbose: bool = False):
        self.verbose = verbose
        self._width = 0  # of the longest name so far
        self._console = console
        self._line_interval = line_interval
        self._bars = Progress(
            TextColumn("{task.description:<10}", markup=False),
            BarColumn(bar_width=12, table_column=Column(min_width=12)),
            TextColumn("{task.fields[count]}", justify="right", markup=False),
            TimeElapsedColumn(table_column=Column(min_width=7)),
            TextColumn("{task.fields[detail]}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="crop")),
            console=console,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._phase = self._detail = self._line = ""
        self._last_line = 0.0
        self._alarm = ""

    def __enter__(self) -> View:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def phase(self, name: str, done: int = 0, total: int = 0, detail: str = "") -> None:
        """Show a phase and its progress; `total` is 0 if it is unknown."""
        name, detail = shown(name), shown(detail)
        fresh = name != self._phase
        if fresh:
            self._close()
            self._task = self._bars.add_task(name, total=None, count="", detail="")
            self._phase = name
        assert self._task is not None
        count = f"{done}/{total}" if total else ""
        self._bars.update(self._task, completed=done, total=total or None, count=count, detail=detail)
        now, text = time.monotonic(), "  ".join(filter(None, (name, count, detail)))
        waits_for_another = not total and detail not in ("", self._detail)
        self._detail = detail
        if self._console.is_terminal or text == self._line:  # an unchanged phase is reported again
            return
        if fresh or waits_for_another or now - self._last_line >= self._line_interval:
            self._line, self._last_line = text, now
            say(self._console, text)

    def say(self, line: str) -> None:
        say(self._console, line)

    def output(self, name: str, line: str) -> None:
        """Print what a process wrote, behind its name. May be called from any thread."""
        self._width = max(self._width, len(name))
        self.say(f"{name:<{self._width}} | {line}")

    def _close(self) -> None:
        """End the previous phase: its bar stands still, and full."""
        if self._task is not None:
            total = self._bars.tasks[self._task].total or 1
            self._bars.update(self._task, total=total, completed=total, detail="")
            self._bars.stop_task(self._task)

    def progress(self, progress: status.Progress) -> None:
        if progress.phase in ("finished", "failed"):
            self._close()
            return
        if progress.alarm not in ("", self._alarm):
            self._alarm = progress.alarm
            say(self._console, f"ALARM: {progress.alarm}", "bold red")
        self.phase(progress.phase, progress.done, progress.total, progress.detail)
