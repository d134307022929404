"""Generation stopped between two steps, for as long as somebody writes to the engine's weights."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from runtime.errors import Cancelled

if TYPE_CHECKING:
    from runtime.rollout.engine import RolloutEngine


class Standstill:
    """Between who advances the engine and who writes to it, both on the event loop."""

    def __init__(self, engine: RolloutEngine, drains: bool):
        """`drains`: the samples that are running are finished first, and none is begun."""
        self.since: float | None = None
        """When it was asked for, on the loop's clock; None: generation goes on."""
        self._engine = engine
        self._drains = drains
        self._advancing = False
        self._reached: asyncio.Future[None] | None = None

    @property
    def stands(self) -> bool:
        """Whether the engine must not advance."""
        return self._reached is not None and self._reached.done()

    def interrupts(self) -> bool:
        """Whether `advance` is to return. From any thread."""
        return self._reached is not None and not self._drains

    @contextmanager
    def advancing(self) -> Iterator[None]:
        """Around each advance of the engine."""
        self._advancing = True
        try:
            yield
        finally:
            self._advancing = False
            self._look()

    async def begin(self) -> None:
        """Return once the engine stands still, which it does until `end`. Raises Cancelled when that comes first."""
        if self._reached is None:
            self._reached = asyncio.get_running_loop().create_future()
            self._reached.add_done_callback(lambda reached: reached.exception())  # nobody may be waiting any more
            self.since = self._reached.get_loop().time()
            if self._drains:
                self._engine.hold(True)
            self._look()
        await asyncio.shield(self._reached)

    def end(self) -> None:
        """Generation may go on. Idempotent."""
        reached, self._reached, self.since = self._reached, None, None
        if reached is None:
            return
        if not reached.done():
            reached.set_exception(Cancelled("it was withdrawn before generation stood still"))
        if self._drains:
            self._engine.hold(False)

    def _look(self) -> None:
        if self._reached is None or self._reached.done():
            return
        if not self._advancing and not (self._drains and self._engine.stats().running):
            self._reached.set_result(None)
