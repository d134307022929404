"""Writing where there is no room for now, or a file system that fails: it waits, says so once, and tries again; and a sync."""

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
# How often the log tells of what strangers can repeat as they like: the first, the tenth, the hundredth and so on.

KINDS = 256  # that are told apart

counts: Counter[str] = Counter()  # by what is told


def counted(what: str) -> int:
    """How many of `what` there are now, where that is to be told: a power of ten; else 0."""
    what = what if what in counts or len(counts) < KINDS else "others"
    counts[what] += 1
    count = counts[what]
    return count if str(count).strip("0") == "1" else 0


T = TypeVar("T")

log = logging.getLogger("sluice")

_PASSES = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE, errno.ETIMEDOUT)


def write(file: FileIO, data: bytes) -> None:
    """All of `data`, once, from a thread that may wait; `file` is not buffered. Raises ServiceFault."""
    left = memoryview(data)

    def once() -> None:
        nonlocal left
        while left:
            left = left[file.write(left) :]

    until_done(once, Path(str(file.name)), len(data))


def until_done(work: Callable[[], T], path: Path, nbytes: int = 0) -> T:
    """What `work` gives, which writes to `path` (`nbytes`, where that is known). Raises ServiceFault for what does not pass."""
    told = False
    while True:
        try:
            return work()
        except OSError as error:
            why = _waits(error, path, nbytes)
            if not told:
                log.warning("%s", why)
            told = True
            time.sleep(timeouts.DISK_RETRY)


async def done(work: Callable[[], T], path: Path, say: Callable[[str], None] = log.warning) -> T:
    """The same from an event loop, which goes on meanwhile; given up when it is cancelled. `say`: shows a line."""
    told = False
    while True:
        try:
            return await asyncio.to_thread(work)
        except OSError as error:
            why = _waits(error, path, 0)
            if not told:
                say(why)
            told = True
            await asyncio.sleep(timeouts.DISK_RETRY)


def _waits(error: OSError, path: Path, nbytes: int) -> str:
    """Raises ServiceFault."""
    if error.errno not in _PASSES:
        raise ServiceFault("coordinator", "write", f"{path}: {error}") from error
    size = f"{nbytes} bytes can be written to " if nbytes else "there is room for "
    return f"waits until {size}{path}: {error.strerror}"


def sync(path: Path) -> int:
    """A file, or a folder's entries, survive a power cut. Returns its size in bytes, as the file system has it now."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)
