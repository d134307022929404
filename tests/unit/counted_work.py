"""How much work a rule does on a text, counted and not timed: the same on every machine, however busy.

What is counted is what a loop of Python's does: the lines that run in the modules of rules, and the characters that they slice,
search or count. What one regular expression does is not seen here: tests give it megabytes, on which time that grows with the
square would be hours, and leave that to the suite's deadline.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

MODULES = "runtime.rewards"


class _Text(str):
    """A text that adds up how many characters of it were looked at or copied."""

    looked_at: list[int]

    def _span(self, start: int | None = None, end: int | None = None, found: int = -1) -> None:
        begin, stop, _ = slice(start, end).indices(len(self))
        self.looked_at[0] += max((stop if found < 0 else found) - begin, 1)

    def __getitem__(self, key: Any) -> str:
        part = super().__getitem__(key)
        self.looked_at[0] += len(part)
        return _text(part, self.looked_at)

    def __contains__(self, part: str) -> bool:  # type: ignore[override]
        self._span()
        return super().__contains__(part)

    def find(self, part: str, start: int | None = None, end: int | None = None) -> int:  # type: ignore[override]
        found = super().find(part, start, end)
        self._span(start, end, found)
        return found

    def rfind(self, part: str, start: int | None = None, end: int | None = None) -> int:  # type: ignore[override]
        found = super().rfind(part, start, end)
        self._span(start if found < 0 else found, end)
        return found

    def count(self, part: str, start: int | None = None, end: int | None = None) -> int:  # type: ignore[override]
        self._span(start, end)
        return super().count(part, start, end)


def _text(text: str, looked_at: list[int]) -> _Text:
    made = _Text(text)
    made.looked_at = looked_at
    return made


def work(call: Callable[[str], object], text: str) -> int:
    """Lines that run in modules of rules while `call(text)` does, and characters of `text` that are looked at one by one."""
    looked_at, lines = [0], 0

    def in_frame(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return in_frame

    def enter(frame: FrameType, event: str, argument: object) -> Any:
        return in_frame if frame.f_globals.get("__name__", "").startswith(MODULES) else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        call(_text(text, looked_at))
    finally:
        sys.settrace(before)
    return lines + looked_at[0]


def is_linear(call: Callable[[str], object], made: Callable[[int], str], size: int) -> bool:
    """Whether twice the text takes at most twice the work, but for a few lines and characters more."""
    once, twice = (work(call, made(length)) for length in (size, 2 * size))
    return twice <= 2.1 * once + 100
