"""The processors of a node in a simulation: all that compute at the same time get even shares, as a fair scheduler gives."""

from __future__ import annotations

import asyncio
import heapq
from itertools import count
from typing import Protocol


class Timeshared(Protocol):
    """What computes for as long as it likes, at a speed that changes."""

    def settle(self) -> None:
        """Called before the speed changes: account for the time until now."""

    def rearm(self) -> None:
        """Called after it has changed."""


class Cores:
    """`number` processors; 0: as many as are wanted."""

    def __init__(self, loop: asyncio.AbstractEventLoop, number: int):
        self._loop, self._number = loop, number
        self._pieces: list[tuple[float, int, asyncio.Future[None]]] = []  # each with what `_done` is when it ends
        self._steady: dict[Timeshared, None] = {}
        self._done = 0.0  # seconds that a piece would have computed by now that had begun with these processors
        self._since = loop.time()
        self._order = count()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def speed(self) -> float:
        """Of each that computes; 1 where it has a processor of its own."""
        active = len(self._pieces) + len(self._steady)
        return min(1.0, self._number / active) if self._number and active else 1.0

    async def spend(self, seconds: float) -> None:
        """Return after `seconds` on a processor of its own, or as much longer as others compute too."""
        if not self._number:
            await asyncio.sleep(seconds)
            return
        piece = self._loop.create_future()
        self._settle()
        heapq.heappush(self._pieces, (self._done + seconds, next(self._order), piece))
        self._rearm()
        try:
            await piece
        finally:
            if any(one[2] is piece for one in self._pieces):  # it was cancelled
                self._settle()
                self._pieces = [one for one in self._pieces if one[2] is not piece]
                heapq.heapify(self._pieces)
                self._rearm()

    def join(self, computing: Timeshared) -> None:
        """`computing` computes from now on, until it leaves. Both are idempotent."""
        if self._number and computing not in self._steady:
            self._settle()
            self._steady[computing] = None
            self._rearm(computing)

    def leave(self, computing: Timeshared) -> None:
        if computing in self._steady:
            self._settle()
            del self._steady[computing]
            self._rearm(computing)

    def _settle(self) -> None:
        now = self._loop.time()
        self._done += (now - self._since) * self.speed
        self._since = now
        for computing in self._steady:
            computing.settle()

    def _rearm(self, but: Timeshared | None = None) -> None:
        for computing in self._steady:
            if computing is not but:
                computing.rearm()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._pieces:
            seconds = max(0.0, self._pieces[0][0] - self._done) / self.speed
            self._timer = self._loop.call_at(self._since + seconds, self._end)

    def _end(self) -> None:
        """The nearest piece is done."""
        self._settle()
        limit = self._pieces[0][0] + 1e-12
        self._done = max(self._done, self._pieces[0][0])
        while self._pieces and self._pieces[0][0] <= limit:
            piece = heapq.heappop(self._pieces)[2]
            if not piece.done():
                piece.set_result(None)
        self._rearm()
