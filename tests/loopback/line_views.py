"""Where a supervisor shows its lines in tests."""

from __future__ import annotations

from collections.abc import Callable


class Lines:
    """Keeps what is said in `said`; `output(name, line)`, if given, is told what the processes write."""

    def __init__(self, said: list[str], output: Callable[[str, str], None] | None = None):
        self._said = said
        self._output = output
        self.verbose = output is not None

    def say(self, line: str) -> None:
        self._said.append(line)

    def output(self, name: str, line: str) -> None:
        assert self._output is not None
        self._output(name, line)
