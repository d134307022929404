"""A trainer's devices that generate while it waits for data: what a run would gain at most.

Sequences are spread evenly over the rollouts and the devices that are lent, and take nothing with them when they move: no keys
and values are computed again. So what is simulated is more than what could be had.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

SMOOTHING = 0.2  # weight of the newest wait in the mean of its place in a step
WORTH = 2.0  # moves, there and back, that a wait has to be longer than


class Borrower(Protocol):
    def lend(self, lent: bool) -> None:
        """The devices generate from now on, or are the trainer's again."""


class Lending:
    """`borrower` is told once the devices generate, and as they are taken back; either takes `move` seconds. None: they are
    never lent.

    The gate: they are lent where the waits at this place of earlier steps were `WORTH` moves long on the mean.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, move: float | None, borrower: Borrower):
        self._loop, self._move, self._borrower = loop, move, borrower
        self._place = self._next = 0  # of the wait under way, or the last one, and of the next, within a step
        self._since: float | None = None  # when it began to wait
        self._waits: dict[int, float] = {}  # by place, seconds on the mean
        self._turning: asyncio.TimerHandle | None = None
        self._away = False

    def begin_step(self) -> None:
        self._next = 0

    def offer(self) -> None:
        """The trainer has nothing to do."""
        if self._move is None:
            return
        self._since = self._loop.time()
        self._place, self._next = self._next, self._next + 1
        if self._waits.get(self._place, 0.0) > WORTH * self._move:
            self._turning = self._loop.call_later(self._move, self._turned)

    async def take_back(self) -> None:
        """The trainer goes on, once it has its devices."""
        if self._move is None or self._since is None:
            return
        now = self._loop.time()
        mean = self._waits.get(self._place, now - self._since)
        self._waits[self._place] = mean + SMOOTHING * (now - self._since - mean)
        self._since = None
        if self._turning is None:
            return
        back = self._move - max(0.0, self._turning.when() - now)  # as long as they were on their way
        self._turning.cancel()
        self._turning = None
        if self._away:
            self._away = False
            self._borrower.lend(False)
        if back:
            await asyncio.sleep(back)

    def _turned(self) -> None:
        self._away = True
        self._borrower.lend(True)
