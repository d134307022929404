"""asyncio's task groups on every supported Python, and the one error out of them that matters."""

from __future__ import annotations

import sys

if sys.version_info >= (3, 11):
    from asyncio import TaskGroup  # novermin
else:
    from taskgroup import TaskGroup

__all__ = ["TaskGroup", "first_error"]


def first_error(error: BaseException) -> BaseException:
    """The first exception in an exception group, however deep, or the exception itself."""
    while nested := getattr(error, "exceptions", ()):
        error = nested[0]
    return error
