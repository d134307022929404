"""What all commands do: a mistake in their arguments is one line, as one in the configuration is; SIGTERM ends in order."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


class CommandParser(argparse.ArgumentParser):
    """Its subcommands' parsers are of the same kind."""

    def error(self, message: str) -> NoReturn:
        """Ends the process with exit code 2. `message` names the argument, and the value that cannot be."""
        from runtime.telemetry.shown import shown

        self.exit(2, shown(f"error: {message}; see {self.prog} --help\n"))


@contextmanager
def ended_as_by_ctrl_c() -> Iterator[None]:
    """SIGTERM too ends what is inside in order: its processes with it, and its folders."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
