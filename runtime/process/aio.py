"""asyncio's task groups on every supported Python, the one error out of them that matters, and a wait for several."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

if sys.version_info >= (3, 11):
    from asyncio import TaskGroup  # novermin
else:
    from taskgroup import TaskGroup

__all__ = ["TaskGroup", "first_error", "still_missing"]

T = TypeVar("T")


def first_error(error: BaseException) -> BaseException:
    """The first exception in an exception group, however deep, or the exception itself."""
    while nested := getattr(error, "exceptions", ()):
        error = nested[0]
    return error


async def still_missing(missing: Callable[[], Sequence[T]], changed: asyncio.Event, deadline: float) -> Sequence[T]:
    """What is missing at `deadline`, on the clock of time.monotonic; nothing as soon as nothing is.

    `changed` is set whenever `missing()` may have become another.
    """
    while found := missing():
        changed.clear()
        try:
            await asyncio.wait_for(changed.wait(), max(0.0, deadline - time.monotonic()))
        except asyncio.TimeoutError:
            break
    return found
