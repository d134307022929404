"""Arguments, signals and the terminal of every command.

A mistake in an argument is one line. Ctrl-C, SIGTERM, SIGHUP and a lost terminal end a command in the same way.
"""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


class _Terminal:
    """A standard stream of this process on a terminal. Once the terminal is lost, the stream discards what is written, and the
    process gets SIGHUP."""

    def __init__(self, stream: Any):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return self._unless_lost(lambda: self._stream.write(text), len(text))

    def flush(self) -> None:
        self._unless_lost(self._stream.flush, None)

    def _unless_lost(self, work: Callable[[], Result], otherwise: Result) -> Result:
        try:
            return work()
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
            os.kill(os.getpid(), signal.SIGHUP)
            return otherwise


def outlive_terminal() -> None:
    """Let this process end in order when its terminal is lost, and not by the error of a write."""
    for name in ("stdout", "stderr"):
        if (stream := getattr(sys, name)).isatty():
            setattr(sys, name, _Terminal(stream))
