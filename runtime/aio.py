"""asyncio's task groups on every supported Python, and the one error out of them that matters."""

from __future__ import annotations

import sys

if sys.version_info >= (3, 11):
    from asyncio import TaskGroup  # novermin

    ExceptionGroups = BaseExceptionGroup  # noqa: F821  # novermin
else:
    from exceptiongroup import BaseExceptionGroup as ExceptionGroups
    from taskgroup import TaskGroup

__all__ = ["ExceptionGroups", "TaskGroup", "first_error"]


def first_error(error: BaseException) -> BaseException:
    """The first exception in a group of groups, or the exception itself."""
    while isinstance(error, ExceptionGroups):
        error = error.exceptions[0]
    return error
