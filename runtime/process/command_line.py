"""The arguments of Sluice's commands: a mistake in them is one line, as one in the configuration is."""

from __future__ import annotations

import argparse
from typing import NoReturn


class CommandParser(argparse.ArgumentParser):
    """Its subcommands' parsers are of the same kind."""

    def error(self, message: str) -> NoReturn:
        """Ends the process with exit code 2. `message` names the argument, and the value that cannot be."""
        self.exit(2, f"error: {message}; see {self.prog} --help\n")
