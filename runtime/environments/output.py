"""What the processes of agents print: it goes to the service's log, as far as somebody could read it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

from runtime.process.aio import now

BYTES = 1 << 16  # that are passed on in each `SECONDS`
SECONDS = 1.0


async def forward(stream: asyncio.StreamReader, dropped: Callable[[int], None]) -> None:
    """Until it ends. `dropped` is told how many bytes were too many."""
    began, passed, left_out = now(), 0, 0
    try:
        while data := await stream.read(1 << 16):
            if now() - began > SECONDS:
                _tell(left_out)
                began, passed, left_out = now(), 0, 0
            part = data[: max(0, BYTES - passed)]
            passed += len(part)
            _write(part)
            if more := len(data) - len(part):
                left_out += more
                dropped(more)
    finally:
        _tell(left_out)


def _tell(left_out: int) -> None:
    if left_out:
        _write(f"\n[{left_out} bytes of output were left out]\n".encode())


def _write(data: bytes) -> None:
    sys.stderr.buffer.write(data)
    sys.stderr.flush()
