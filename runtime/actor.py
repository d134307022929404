"""An actor: a bounded mailbox, and one task that alone touches what the actor owns.

Senders get a future per request. The task hands requests to the behaviour, control before data and otherwise in order of
arrival; between requests it lets the behaviour advance its own work (a decode step, say), which is told to return early
once there is mail. A request whose caller gave up or whose deadline passed while it lay in the mailbox is never handed
over: it is counted. A behaviour may keep a request and reply later.

Invariant: every request taken in is answered exactly once, with a value or an exception; a late answer is dropped and counted.
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

SMOOTHING = 0.1  # weight of the newest request in the moving means
MINIMUM_RETRY = 0.01  # seconds


class Priority(enum.IntEnum):
    CONTROL = 0
    DATA = 1


class Request:
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
        except Exception as error:  # noqa: BLE001 - the error goes to whoever sent the request
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
    """What an actor does with its requests."""

    @property
    def busy(self) -> bool:
        """Whether `advance` has something to do."""

    async def receive(self, requests: Sequence[Request]) -> None:
        """Take requests of one priority; answer each now or later. An exception fails those not yet answered."""

    async def advance(self, interrupted: Callable[[], bool]) -> None:
        """Do a piece of the actor's own work; return soon once `interrupted()` (safe to call from any thread)."""


class Actor:
    """Runs `behaviour` behind a mailbox of `capacity` data requests; control requests are always let in.

    `batch` is the most data requests that are handed over at once. An exception out of `advance` ends the actor: every request
    fails with it, and `run` raises it.
    """

    def __init__(self, name: str, behaviour: Behaviour, *, capacity: int, batch: int = 1):
        self.name = name
        self._behaviour = behaviour
        self._capacity = capacity
        self._batch = batch
        self._lanes: tuple[deque[Request], deque[Request]] = (deque(), deque())
        self._mail = asyncio.Event()
        self._pending = 0
        self._open: set[Request] = set()
        self._draining = False
        self._settled = asyncio.Event()
        self._stats = MailboxStats(capacity=capacity)
        self._logged: Exception | None = None  # the newest, which several requests may get
        self._end: Exception | None = None  # why nothing is taken in any more

    def send(self, message: Any, *, priority: Priority = Priority.DATA, timeout: float | None = None) -> asyncio.Future[Any]:
        """Put a message in the mailbox; the future is its answer. Cancelling the future withdraws the request.

        Raises Overloaded when the mailbox is full, ServiceFault when the actor is draining, was stopped or has failed.
        """
        if self._end is not None:
            raise ServiceFault(self.name, "receive", f"has ended: {self._end}")
        if self._draining and priority is Priority.DATA:
            raise ServiceFault(self.name, "receive", "is stopping")
        if priority is Priority.DATA and len(self._lanes[Priority.DATA]) >= self._capacity:
            self._stats.refused += 1
            wait = max(MINIMUM_RETRY, self._stats.service_seconds * self._capacity / 2)
            raise Overloaded(f"{self.name}: mailbox is full ({self._capacity} requests)", wait)
        loop = asyncio.get_running_loop()
        now = loop.time()
        request = Request(self, message, None if timeout is None else now + timeout, now)
        self._open.add(request)
        request.future.add_done_callback(lambda _: self._forget(request))
        self._lanes[priority].append(request)
        self._pending += 1
        self._mail.set()
        return request.future

    @property
    def stats(self) -> MailboxStats:
        self._stats.depth = sum(map(len, self._lanes))
        return self._stats

    def interrupted(self) -> bool:
        """Whether there is mail. A plain attribute read, so that an engine's thread may ask between two steps."""
        return self._pending > 0

    async def run(self) -> None:
        """Serve until cancelled. Requests still unanswered then fail with Cancelled."""
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
        """Refuse new data requests and wait until all that came before are answered; False when `timeout` passed first."""
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
        while requests := self._take():
            try:
                await self._behaviour.receive(requests)
            except Exception as error:  # noqa: BLE001 - the error goes to whoever sent the requests
                self._fail_unanswered(requests, error)

    def _fail_unanswered(self, requests: Iterable[Request], error: Exception) -> None:
        for request in requests:
            if not request.abandoned:
                request.fail(error)

    def _take(self) -> list[Request]:
        """The next requests: one of control, or up to a batch of data."""
        now = asyncio.get_running_loop().time()
        for lane, most in zip(self._lanes, (1, self._batch), strict=True):
            taken: list[Request] = []
            while lane and len(taken) < most:
                request = lane.popleft()
                self._pending -= 1
                if request.abandoned:
                    continue
                if request.deadline is not None and now >= request.deadline:
                    self._stats.expired += 1
                    waited = request.deadline - request.enqueued
                    request.future.set_exception(DeadlineExceeded(self.name, "mailbox", "was not reached in time", waited))
                    continue
                request.taken = now
                self._stats.wait_seconds += SMOOTHING * (now - request.enqueued - self._stats.wait_seconds)
                taken.append(request)
            if taken:
                return taken
        return []

    def _settle(self, request: Request, value: Any, error: Exception | None) -> None:
        if request.future.done():
            self._stats.late += 1
            return
        seconds = asyncio.get_running_loop().time() - request.taken
        self._stats.service_seconds += SMOOTHING * (seconds - self._stats.service_seconds)
        if error is None:
            self._stats.handled += 1
            request.future.set_result(value)
        else:
            self._stats.failed += 1
            if not isinstance(error, SluiceError) and error is not self._logged:  # who asked hears its last line alone
                self._logged = error
                log.error("%s: %s failed", self.name, type(request.message).__name__, exc_info=error)
            request.future.set_exception(error)

    def _forget(self, request: Request) -> None:
        if request.future.cancelled():
            self._stats.cancelled += 1
        else:
            request.future.exception()  # marks it as seen: the caller may be gone
        self._open.discard(request)
        if not self._open:
            self._settled.set()
