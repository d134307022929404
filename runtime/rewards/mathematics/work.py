"""A bound on the work of one comparison, counted in estimated microseconds: the same verdict at any speed of the machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from runtime.rewards.mathematics.tree import TooCostly

LIMIT = 300_000.0

_left: ContextVar[list[float] | None] = ContextVar("left", default=None)


@contextmanager
def limited(limit: float = LIMIT) -> Iterator[None]:
    """Within it, `spend` raises TooCostly once more than `limit` has been spent."""
    token = _left.set([limit])
    try:
        yield
    finally:
        _left.reset(token)


def spend(cost: float) -> None:
    left = _left.get()
    if left is not None:
        left[0] -= cost
        if left[0] < 0:
            raise TooCostly("too much arithmetic")
