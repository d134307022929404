"""The end of a process that a bench started, and that ends by itself with its standard input."""

from __future__ import annotations

import asyncio

ENDING = 10.0  # seconds


async def end(process: asyncio.subprocess.Process) -> None:
    """Close its input, and kill it if that is not enough."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), ENDING)
    except asyncio.TimeoutError:
        process.kill()
        await process.wait()
