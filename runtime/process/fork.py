"""What an agent asks of its fork server."""

from __future__ import annotations

from msgspec import Struct

LARGEST = 1 << 20  # bytes of a request
ROOM = 1024  # bytes for the command line of what is forked


class ForkRequest(Struct):
    """A process to be forked. `command`: as `sluice.start` gives it. `env`: all of its variables."""

    command: list[str]
    env: dict[str, str]
