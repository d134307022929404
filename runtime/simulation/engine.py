"""Continuous batching in a simulation: slots, a queue, and decode steps that take longer the more sequences they have.

Between two events all sequences advance alike, a token in `decode_step + B · decode_sequence` seconds. So the engine
keeps one count of tokens for all: a sequence that begins at count c ends at c plus its length, and one timer waits for
the nearest end."""

from __future__ import annotations

import asyncio
import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, Protocol

import msgspec
import numpy as np
from msgspec import Struct

from runtime.types import PolicyVersion, Sample

# ---- Costs
#
# What things cost in a simulation: lengths in tokens, durations in seconds. Pure: who draws brings the chance.


class Distribution(Protocol):
    def draw(self, chance: random.Random) -> float:
        """One value."""


class ReplyLengths(Struct, frozen=True):
    """Of replies in tokens, by group, as they were measured: those of one prompt are alike."""

    groups: Sequence[Sequence[int]]

    def draw_group(self, chance: random.Random, size: int) -> list[float]:
        group = self.groups[chance.randrange(len(self.groups))]
        return [float(chance.choice(group)) for _ in range(size)]


class Fixed(Struct, frozen=True):
    value: float

    def draw(self, chance: random.Random) -> float:
        return self.value


class LogNormal(Struct, frozen=True):
    median: float
    sigma: float  # of the logarithm

    def draw(self, chance: random.Random) -> float:
        return self.median * math.exp(self.sigma * chance.gauss(0.0, 1.0))


class Pareto(Struct, frozen=True):
    """P(x > v) = (least / v)^shape, cut at `most`."""

    least: float
    shape: float
    most: float = math.inf

    def draw(self, chance: random.Random) -> float:
        return min(self.most, self.least * chance.paretovariate(self.shape))


class Costs(Struct, frozen=True, kw_only=True):
    """Of one run. Seconds, unless it says otherwise; a decode step of B sequences takes `decode_step + B · decode_sequence`."""

    prompt_tokens: int = 16
    reply_tokens: Distribution | ReplyLengths = LogNormal(8.0, 0.5)  # cut at sampling.max_new_tokens
    length_scale: float = 1.0  # of all of them
    decode_step: float = 1e-3
    decode_sequence: float = 5e-5
    prefill_token: float = 1e-5
    score: Distribution = Fixed(2e-3)  # of a group, by one of `rewards.workers`
    reference_token: float = 1e-5
    train_token: float = 5e-5
    update: float = 2e-3  # of the optimizer, whatever the batch
    weights_bytes: float = 4e6
    bandwidth: float = 1e9  # bytes a second, from the trainer to each rollout
    swap: float = 1e-3  # of a rollout to a version that it has
    save: float = 1e-2
    start: Distribution = Fixed(2.0)  # of a process, until it registers
    delay: Distribution = Fixed(2e-4)  # of a message, one way
    storage: Distribution = Fixed(5e-4)  # of what the coordinator writes or reads
    coordinator_message: float = 0.0  # of the coordinator's one thread, for each answer that it is given
    coordinator_byte: float = 0.0  # of that thread, for all that is done with a byte of a finished group
    cores: int = 0  # of a node, which all its processes share; 0: each has what it computes on
    tools: Distribution = Fixed(0.0)  # of a reply, which holds no slot meanwhile

    def lengths(self, chance: random.Random, size: int, limit: int) -> list[int]:
        """Of the replies of one group, int in 1 … `limit`."""
        drawn = (
            self.reply_tokens.draw_group(chance, size)
            if isinstance(self.reply_tokens, ReplyLengths)
            else [self.reply_tokens.draw(chance) for _ in range(size)]
        )
        return [max(1, min(limit, round(length * self.length_scale))) for length in drawn]


class CommandDeadlines(Protocol):
    def seconds(self, role: str, command: Any) -> float:
        """Until the answer of a process of `role` to `command`, as the contract has it."""


# ---- Cores
#
# The processors of a node in a simulation: all that compute at the same time get even shares, as a fair scheduler gives.


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
        self._prefill += texts * self._costs.prefill_token
        self.go_on()

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
        return self._costs.decode_step + self._costs.decode_sequence * len(self._running)

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
        while self._queue and len(self._running) < self._slots and not self._pauses:
            owner, prompt, tokens, begun, done = self._queue.popleft()
            self._prefill += prompt * self._costs.prefill_token
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


STATE = "simulated.json"  # what a model leaves in a checkpoint


class Stamp(msgspec.Struct, frozen=True):
    """A payload: whose it is, the packed versions of its oldest and newest token, and how many tokens it has."""

    group_id: int
    oldest: int
    newest: int
    tokens: int  # prompts included


class ModelState(msgspec.Struct):
    """What an update changes: the next step, and every group that was trained, in order."""

    step: int = 0
    trained: list[int] = []


def _samples(lengths: list[int], versions: list[PolicyVersion]) -> list[Sample]:
    return [
        Sample(
            tokens=np.ones(length, np.int32),
            loss_mask=np.ones(length, np.uint8),
            logprobs=np.full(length, -0.5, np.float32),
            versions=np.full(length, version.pack(), np.int64),
            finish_reason="stop",
        )
        for length, version in zip(lengths, versions, strict=True)
    ]
