"""Arguments, signals and the terminal of every command.

A mistake in an argument is one line. Ctrl-C, SIGTERM, SIGHUP and a lost terminal end a command in the same way. What is written
ends none.
"""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

Result = TypeVar("Result")


class CommandParser(argparse.ArgumentParser):
    """Its subcommands' parsers are of the same kind."""

    def error(self, message: str) -> NoReturn:
        """Ends the process with exit code 2. `message` names the argument, and the value that cannot be."""
        from runtime.telemetry.shown import shown

        self.exit(2, shown(f"error: {message}; see {self.prog} --help\n"))


def ending_signals() -> list[signal.Signals]:
    """Return the signals by which a user ends a command in order. SIGHUP is left out where it is ignored, as below `nohup`."""
    hangs_up = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGINT, signal.SIGTERM, *hangs_up]


@contextmanager
def ended_as_by_ctrl_c() -> Iterator[None]:
    """Let every ending signal raise KeyboardInterrupt: what is inside ends its processes and removes its folders."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in ending_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _OutputStream:
    """A standard stream of this process. What nobody reads any more is discarded; a lost terminal gives SIGHUP too."""

    def __init__(self, stream: Any):
        self._stream, self._terminal = stream, stream.isatty()
        self.ends = False  # the process with its reader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return self._unless_lost(lambda: self._stream.write(text), len(text))

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._unless_lost(self._stream.flush, None)

    def _unless_lost(self, work: Callable[[], Result], otherwise: Result) -> Result:
        try:
            return work()
        except OSError as error:
            hung_up = error.errno == errno.EIO and self._terminal
            if error.errno != errno.EPIPE and not hung_up:
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
            if hung_up:
                os.kill(os.getpid(), signal.SIGHUP)
            elif self.ends:
                sys.exit(0)
            return otherwise


def outlive_readers(ends: bool = False) -> None:
    """Let no write to a standard stream end this process by an error: what the stream's encoding lacks is replaced, a terminal
    that is lost ends the process in order, and a reader that has gone is outlived. `ends`: the process ends with its reader."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or Path(os.devnull).open("w")  # noqa: SIM115 - None: it was closed from the first
        if not isinstance(stream, _OutputStream):
            if getattr(stream, "errors", "") in ("strict", "surrogateescape"):
                stream.reconfigure(errors="replace")
            stream = _OutputStream(stream)
            setattr(sys, name, stream)
        stream.ends = ends
