"""Writes that wait while a disk is full or a file system fails, with one log line, and then try again; and a sync."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import TypeVar

from runtime import timeouts
from runtime.errors import ServiceFault

# ---- Counted log
#
# Limits the log lines about events that strangers can repeat: logged at counts of 1, 10, 100 and so on.

KINDS = 256  # counted separately

counts: Counter[str] = Counter()  # by kind


def counted(what: str) -> int:
    """Count one more of `what`. Returns the count if it is a power of ten, and so to be logged; else 0."""
    what = what if what in counts or len(counts) < KINDS else "others"
    counts[what] += 1
    count = counts[what]
    return count if str(count).strip("0") == "1" else 0


T = TypeVar("T")

log = logging.getLogger("sluice")

_PASSES = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE, errno.ETIMEDOUT)


def write(file: FileIO, data: bytes) -> None:
    """Write all of `data` once, from a thread that may wait. `file` must be unbuffered. Raises ServiceFault."""
    left = memoryview(data)

    def once() -> None:
        nonlocal left
        while left:
            left = left[file.write(left) :]

    until_done(once, Path(str(file.name)), len(data))


def until_done(work: Callable[[], T], path: Path, nbytes: int = 0) -> T:
    """Repeat `work` until it succeeds, and return its result. `work` writes to `path` (`nbytes`, if known). Raises ServiceFault
    for a permanent error."""
    logged = False
    while True:
        try:
            return work()
        except OSError as error:
            why = _waits(error, path, nbytes)
            if not logged:
                log.warning("%s", why)
            logged = True
            time.sleep(timeouts.DISK_RETRY)


async def done(work: Callable[[], T], path: Path, say: Callable[[str], None] = log.warning) -> T:
    """Do the same as `until_done` on an event loop, without blocking it, until cancelled. `say`: shows a line."""
    shown = False
    while True:
        try:
            return await asyncio.to_thread(work)
        except OSError as error:
            why = _waits(error, path, 0)
            if not shown:
                say(why)
            shown = True
            await asyncio.sleep(timeouts.DISK_RETRY)


def _waits(error: OSError, path: Path, nbytes: int) -> str:
    """Return the line about a passing error. Raises ServiceFault for a permanent error."""
    if error.errno not in _PASSES:
        raise ServiceFault("coordinator", "write", f"{path}: {error}") from error
    size = f"{nbytes} bytes can be written to " if nbytes else "there is room for "
    return f"waits until {size}{path}: {error.strerror}"


def sync(path: Path) -> int:
    """Make a file, or a folder's entries, survive a power cut. Returns the current size in bytes."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)
