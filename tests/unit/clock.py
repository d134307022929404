"""A clock for tests of what waits: an event loop whose time stands still while something can run, and jumps to the next timer
when nothing can. So seconds are exact, and pass at once; for tests without threads, processes and sockets."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any

DEADLINE = 10.0  # seconds of that clock that one test may take: what is never to be waited for takes longer


class _Selector(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(None if timeout is None else 0)
        if not ready and timeout:
            self.now += timeout
        return ready


def run_by_clock(test: Coroutine[Any, Any, None]) -> None:
    """Run `test` on such a loop; raises asyncio.TimeoutError for one that waits for what never comes."""
    selector = _Selector()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now  # type: ignore[method-assign]
    try:
        loop.run_until_complete(asyncio.wait_for(test, DEADLINE))
    finally:
        loop.close()
