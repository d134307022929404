"""Writing where there is no room for now, or a file system that fails: it waits, says once for what, and tries again. In a
thread that may wait."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import TypeVar

from runtime import timeouts
from runtime.errors import ServiceFault

T = TypeVar("T")

log = logging.getLogger("sluice")

_PASSES = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE, errno.ETIMEDOUT)


def write(file: FileIO, data: bytes) -> None:
    """All of `data`, once; `file` is not buffered. Raises ServiceFault."""
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
            if error.errno not in _PASSES:
                raise ServiceFault("coordinator", "write", f"{path}: {error}") from error
            if not told:
                size = f"{nbytes} bytes can be written to " if nbytes else "there is room for "
                log.warning("waits until %s%s: %s", size, path, error.strerror)
            told = True
            time.sleep(timeouts.DISK_RETRY)
