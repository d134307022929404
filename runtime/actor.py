"""An actor: a bounded mailbox, and one task that alone touches what the actor owns.

Senders get a future per letter. The task hands letters to the behaviour, control before data and otherwise in order of
arrival; between letters it lets the behaviour advance its own work (a decode step, say), which is told to return early
once there is mail. A letter whose caller gave up or whose deadline passed while it lay in the mailbox is never handed
over: it is counted. A behaviour may keep a letter and reply later.

Invariant: every letter taken in is answered exactly once, with a value or an exception; a late answer is dropped and counted.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Protocol

from msgspec import Struct

from runtime.errors import Cancelled, DeadlineExceeded, Overloaded, ServiceFault, SluiceError

log = logging.getLogger("sluice")

SMOOTHING = 0.1  # weight of the newest letter in the moving means
MINIMUM_RETRY = 0.01  # seconds


class Priority(enum.IntEnum):
    CONTROL = 0
    DATA = 1


class Letter:
    """A message on its way through an actor. `deadline` is on the event loop's clock, or None."""

    __slots__ = ("_actor", "deadline", "enqueued", "future", "message", "taken")

    def __init__(self, actor: Actor, message: Any, deadline: float | None, now: float):
        self._actor = actor
        self.message = message
        self.deadline = deadline
        self.enqueued = now
        self.taken = now
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def reply(self, value: Any = None) -> None:
        self._actor._settle(self, value, None)

    def fail(self, error: Exception) -> None:
        self._actor._settle(self, None, error)

    async def answer(self, work: Awaitable[Any]) -> None:
        """Reply with what `work` returns, or fail with what it raises: for what is done beside the actor."""
        try:
            self.reply(await work)
        except Exception as error:  # noqa: BLE001 - the error goes to whoever sent the letter
            self.fail(error)

    @property
    def abandoned(self) -> bool:
        """Whether nobody waits for the answer any more."""
        return self.future.done()


class MailboxStats(Struct, kw_only=True):
    """Counters since the start; `wait_seconds` and `service_seconds` are moving means."""

    depth: int = 0
    capacity: int = 0
    handled: int = 0
    failed: int = 0
    refused: int = 0
    expired: int = 0
    cancelled: int = 0
    late: int = 0
    wait_seconds: float = 0.0
    service_seconds: float = 0.0


class Behaviour(Protocol):
    """What an actor does with its letters."""

    @property
    def busy(self) -> bool:
        """Whether `advance` has something to do."""

    async def receive(self, letters: Sequence[Letter]) -> None:
        """Take letters of one priority; answer each now or later. An exception fails those not yet answered."""

    async def advance(self, interrupted: Callable[[], bool]) -> None:
        """Do a piece of the actor's own work; return soon once `interrupted()` (safe to call from any thread)."""


class Actor:
    """Runs `behaviour` behind a mailbox of `capacity` data letters; control letters are always let in.

    `batch` is the most data letters that are handed over at once. An exception out of `advance` ends the actor: every letter
    fails with it, and `run` raises it.
    """

    def __init__(self, name: str, behaviour: Behaviour, *, capacity: int, batch: int = 1):
        self.name = name
        self._behaviour = behaviour
        self._capacity = capacity
        self._batch = batch
        self._lanes: tuple[deque[Letter], deque[Letter]] = (deque(), deque())
        self._mail = asyncio.Event()
        self._pending = 0
        self._open: set[Letter] = set()
        self._draining = False
        self._settled = asyncio.Event()
        self._stats = MailboxStats(capacity=capacity)
        self._logged: Exception | None = None  # the newest, which several letters may get
        self._end: Exception | None = None  # why nothing is taken in any more

    def send(self, message: Any, *, priority: Priority = Priority.DATA, timeout: float | None = None) -> asyncio.Future[Any]:
        """Put a message in the mailbox; the future is its answer. Cancelling the future withdraws the letter.

        Raises Overloaded when the mailbox is full, ServiceFault when the actor is draining, was stopped or has failed.
        """
        if self._end is not None:
            raise ServiceFault(self.name, "receive", f"has ended: {self._end}")
        if self._draining and priority is Priority.DATA:
            raise ServiceFault(self.name, "receive", "is stopping")
        if priority is Priority.DATA and len(self._lanes[Priority.DATA]) >= self._capacity:
            self._stats.refused += 1
            wait = max(MINIMUM_RETRY, self._stats.service_seconds * self._capacity / 2)
            raise Overloaded(f"{self.name}: mailbox is full ({self._capacity} letters)", wait)
        loop = asyncio.get_running_loop()
        now = loop.time()
        letter = Letter(self, message, None if timeout is None else now + timeout, now)
        self._open.add(letter)
        letter.future.add_done_callback(lambda _: self._forget(letter))
        self._lanes[priority].append(letter)
        self._pending += 1
        self._mail.set()
        return letter.future

    @property
    def stats(self) -> MailboxStats:
        self._stats.depth = sum(map(len, self._lanes))
        return self._stats

    def interrupted(self) -> bool:
        """Whether there is mail. A plain attribute read, so that an engine's thread may ask between two steps."""
        return self._pending > 0

    async def run(self) -> None:
        """Serve until cancelled. Letters still unanswered then fail with Cancelled."""
        end: Exception = Cancelled(f"{self.name} was stopped")
        try:
            while True:
                await self._serve_mail()
                if self._behaviour.busy:
                    await self._behaviour.advance(self.interrupted)
                elif not self._pending:
                    self._mail.clear()
                    await self._mail.wait()
        except Exception as error:
            end = error
            raise
        finally:
            self._end = end
            self._fail_unanswered(self._open, end)

    async def drain(self, timeout: float) -> bool:
        """Refuse new data letters and wait until all that came before are answered; False when `timeout` passed first."""
        self._draining = True
        deadline = time.monotonic() + timeout
        while self._open:
            self._settled.clear()
            try:
                await asyncio.wait_for(self._settled.wait(), max(0.0, deadline - time.monotonic()))
            except asyncio.TimeoutError:
                return False
        return True

    async def _serve_mail(self) -> None:
        while letters := self._take():
            try:
                await self._behaviour.receive(letters)
            except Exception as error:  # noqa: BLE001 - the error goes to whoever sent the letters
                self._fail_unanswered(letters, error)

    def _fail_unanswered(self, letters: Iterable[Letter], error: Exception) -> None:
        for letter in letters:
            if not letter.abandoned:
                letter.fail(error)

    def _take(self) -> list[Letter]:
        """The next letters: one of control, or up to a batch of data."""
        now = asyncio.get_running_loop().time()
        for lane, most in zip(self._lanes, (1, self._batch), strict=True):
            taken: list[Letter] = []
            while lane and len(taken) < most:
                letter = lane.popleft()
                self._pending -= 1
                if letter.abandoned:
                    continue
                if letter.deadline is not None and now >= letter.deadline:
                    self._stats.expired += 1
                    waited = letter.deadline - letter.enqueued
                    letter.future.set_exception(DeadlineExceeded(self.name, "mailbox", "was not reached in time", waited))
                    continue
                letter.taken = now
                self._stats.wait_seconds += SMOOTHING * (now - letter.enqueued - self._stats.wait_seconds)
                taken.append(letter)
            if taken:
                return taken
        return []

    def _settle(self, letter: Letter, value: Any, error: Exception | None) -> None:
        if letter.future.done():
            self._stats.late += 1
            return
        seconds = asyncio.get_running_loop().time() - letter.taken
        self._stats.service_seconds += SMOOTHING * (seconds - self._stats.service_seconds)
        if error is None:
            self._stats.handled += 1
            letter.future.set_result(value)
        else:
            self._stats.failed += 1
            if not isinstance(error, SluiceError) and error is not self._logged:  # who asked hears its last line alone
                self._logged = error
                log.error("%s: %s failed", self.name, type(letter.message).__name__, exc_info=error)
            letter.future.set_exception(error)

    def _forget(self, letter: Letter) -> None:
        if letter.future.cancelled():
            self._stats.cancelled += 1
        else:
            letter.future.exception()  # marks it as seen: the caller may be gone
        self._open.discard(letter)
        if not self._open:
            self._settled.set()
