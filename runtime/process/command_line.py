"""Arguments, signals and the terminal of every command.

A mistake in an argument gives one line. Ctrl-C, SIGTERM, SIGHUP and a lost terminal end a command in the same way. A failed
write to a standard stream ends no command.
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
    """A parser, also for subcommands."""

    def error(self, message: str) -> NoReturn:
        """End the process with exit code 2. `message` names the argument and the wrong value."""
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
    """A standard stream of this process. Discards output without a reader; a lost terminal also gives SIGHUP."""

    def __init__(self, stream: Any):
        self._stream, self._terminal = stream, stream.isatty()
        self.ends = False  # whether the process ends when its reader does

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
    """Let no failed write to a standard stream raise an error. Characters outside its encoding are replaced, and a lost
    terminal ends the process in order. After the end of its reader the process goes on; with `ends`, it ends."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or Path(os.devnull).open("w")  # noqa: SIM115 - None: closed at the start
        if not isinstance(stream, _OutputStream):
            if getattr(stream, "errors", "") in ("strict", "surrogateescape"):
                stream.reconfigure(errors="replace")
            stream = _OutputStream(stream)
            setattr(sys, name, stream)
        stream.ends = ends
