"""What the user sees of a run: progress bars on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from runtime import status

LINE_INTERVAL = 5.0  # seconds between two lines where there is no terminal


class View:
    """A context manager. One bar for the phase that is under way; figures beside it."""

    def __init__(self, console: Console):
        self._console = console
        self._bars = Progress(
            TextColumn("{task.description:<10}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[detail]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._phase = ""
        self._last_line = 0.0

    def __enter__(self) -> View:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bars.stop()

    def phase(self, name: str, done: int = 0, total: int | None = None, detail: str = "") -> None:
        """What is going on, and how far it is."""
        fresh = name != self._phase
        if fresh:
            if self._task is not None:
                self._bars.stop_task(self._task)
            self._task = self._bars.add_task(name, total=total, detail=detail)
            self._phase = name
        assert self._task is not None
        self._bars.update(self._task, completed=done, total=total, detail=detail)
        if self._console.is_terminal:
            return
        now = time.monotonic()
        if fresh or now - self._last_line >= LINE_INTERVAL:
            self._last_line = now
            counted = f" {done}/{total}" if total else ""
            self._console.print(f"{name}{counted}{'  ' + detail if detail else ''}", highlight=False)

    def progress(self, progress: status.Progress) -> None:
        """The run's own word on where it is."""
        total = progress.steps if progress.phase == "training" else None
        self.phase(progress.phase, progress.step if total else 0, total, progress.detail)
