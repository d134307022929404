"""Continuous batching in a simulation: slots, a queue, and decode steps that take longer the more sequences they have.

Between two events all sequences advance alike, a token in `decode_step + B · decode_sequence` seconds. So the engine keeps one
count of tokens for all: a sequence that begins at count c ends at c plus its length, and one timer waits for the nearest end.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable
from itertools import count

from runtime.simulation.cores import Cores
from runtime.simulation.costs import Costs


class SimulatedEngine:
    """`pause` and `go_on` are counted: it decodes while nobody has paused it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, costs: Costs, slots: int, cores: Cores):
        self.busy = 0.0  # seconds
        self.tokens = self.steps = 0.0  # that were decoded
        self.slots = slots
        self._loop, self._costs, self._slots, self._cores = loop, costs, slots, cores
        self._queue: deque[tuple[object, int, int, Callable[[], None], Callable[[], None]]] = deque()
        self._running: list[tuple[float, int, object, Callable[[], None], int]] = []  # the last: tokens of the text in the end
        self._count = 0.0  # of tokens: that a sequence would have by now that had begun with the engine
        self._since = loop.time()
        self._prefill = 0.0  # seconds that come before the next token
        self._pauses = 0
        self._lent = 0.0  # devices that help out, for each of its own
        self._timer: asyncio.TimerHandle | None = None
        self._numbers = count()
        self._idle: list[asyncio.Future[None]] = []

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Sequences without a slot."""
        return len(self._queue)

    def submit(self, owner: object, prompt: int, tokens: int, begun: Callable[[], None], done: Callable[[], None]) -> None:
        """A sequence: `begun` is called as it gets a slot, `done` with its last token."""
        self._queue.append((owner, prompt, tokens, begun, done))
        self._update()

    def withdraw(self, owner: object) -> None:
        """All sequences of `owner`, without a word."""
        self.settle()
        self._queue = deque(one for one in self._queue if one[0] is not owner)
        self._running = [one for one in self._running if one[2] is not owner]
        heapq.heapify(self._running)
        self._update()

    def pause(self) -> None:
        self.settle()
        self._pauses += 1
        self._update()

    def go_on(self) -> None:
        self.settle()
        self._pauses -= 1
        self._update()

    def wake(self) -> None:
        """Go on after a sleep, in which keys and values were given up."""
        texts = sum(whole - (end - self._count) for end, *_, whole in self._running)
        self._prefill += texts * self._costs.prefill_token / (1 + self._lent)
        self.go_on()

    def help(self, lent: float) -> None:
        """From now on sequences are spread over `lent` devices besides, for each of its own."""
        self.settle()
        self._lent = lent
        self._update()

    async def drained(self) -> None:
        """Nothing runs; what waits is not begun until the caller is done with it."""
        self._slots, slots = 0, self._slots
        try:
            while self._running:
                idle = self._loop.create_future()
                self._idle.append(idle)
                await idle
        finally:
            self._slots = slots
            self._update()

    def _step(self) -> float:
        return self._costs.decode_step + self._costs.decode_sequence * len(self._running) / (1 + self._lent)

    def settle(self) -> None:
        """Account for the time since the last event."""
        now = self._loop.time()
        elapsed, self._since = now - self._since, now
        if self._pauses or not self._running:
            return
        self.busy += elapsed
        computed = elapsed * self._cores.speed
        prefill = min(computed, self._prefill)
        self._prefill -= prefill
        steps = (computed - prefill) / self._step()
        self._count += steps
        self.steps += steps
        self.tokens += steps * len(self._running)

    def _update(self) -> None:
        """Begin what has a slot, and wait for the nearest end."""
        self.settle()
        while self._queue and len(self._running) < self._slots * (1 + self._lent) and not self._pauses:
            owner, prompt, tokens, begun, done = self._queue.popleft()
            self._prefill += prompt * self._costs.prefill_token / (1 + self._lent)
            heapq.heappush(self._running, (self._count + tokens, next(self._numbers), owner, done, prompt + tokens))
            begun()
        (self._cores.join if self._running and not self._pauses else self._cores.leave)(self)
        self.rearm()

    def rearm(self) -> None:
        """Wait for the nearest end, at the speed of now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._running and not self._pauses:
            seconds = self._prefill + max(0.0, self._running[0][0] - self._count) * self._step()
            self._timer = self._loop.call_at(self._since + seconds / self._cores.speed, self._end)

    def _end(self) -> None:
        """The nearest end is reached, and whoever ends with it."""
        self.settle()
        ended = []
        limit = self._running[0][0] + 1e-9  # the one that the timer was set for, however its count was rounded
        self._count = max(self._count, self._running[0][0])
        while self._running and self._running[0][0] <= limit:
            ended.append(heapq.heappop(self._running)[3])
        for done in ended:
            done()
        if not self._running:
            idle, self._idle = self._idle, []
            for one in idle:
                if not one.done():
                    one.set_result(None)
        self._update()
