"""An actor: one task that alone touches what it owns, and the requests that wait for it. A rollout is one.

Senders get a future per request. The task hands requests to the behaviour, control before data and otherwise in order of
arrival; between requests it lets the behaviour advance its own work (a decode step, say), which is told to return early
once a request waits. A request whose caller gave up while it waited is never handed over. A behaviour may keep a request and
reply later.

Invariant: every request taken in is answered exactly once, with a value or an exception; a late answer is dropped.
"""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Protocol

from runtime.errors import Cancelled, ServiceFault


class Priority(enum.IntEnum):
    CONTROL = 0
    DATA = 1


class Request:
    """A message on its way through an actor."""

    __slots__ = ("future", "message")

    def __init__(self, message: Any):
        self.message = message
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def reply(self, value: Any = None) -> None:
        if not self.future.done():
            self.future.set_result(value)

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)

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
    """Runs `behaviour` behind its requests. `batch` is the most data requests that are handed over at once.

    An exception out of `advance` ends the actor: every request fails with it, and `run` raises it.
    """

    def __init__(self, name: str, behaviour: Behaviour, *, batch: int = 1):
        self.name = name
        self._behaviour = behaviour
        self._batch = batch
        self._lanes: tuple[deque[Request], deque[Request]] = (deque(), deque())
        self._mail = asyncio.Event()
        self._pending = 0
        self._open: set[Request] = set()
        self._end: Exception | None = None  # why nothing is taken in any more

    def send(self, message: Any, priority: Priority = Priority.DATA) -> asyncio.Future[Any]:
        """Put a message in line; the future is its answer. Cancelling the future withdraws the request.

        Raises ServiceFault when the actor was stopped or has failed.
        """
        if self._end is not None:
            raise ServiceFault(self.name, "receive", f"has ended: {self._end}")
        request = Request(message)
        self._open.add(request)
        request.future.add_done_callback(lambda _: self._forget(request))
        self._lanes[priority].append(request)
        self._pending += 1
        self._mail.set()
        return request.future

    def interrupted(self) -> bool:
        """Whether a request waits. A plain attribute read, so that an engine's thread may ask between two steps."""
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
            self._fail(list(self._open), end)

    async def _serve_mail(self) -> None:
        while requests := self._take():
            try:
                await self._behaviour.receive(requests)
            except Exception as error:  # noqa: BLE001 - the error goes to whoever sent the requests
                self._fail(requests, error)

    def _fail(self, requests: Iterable[Request], error: Exception) -> None:
        for request in requests:
            request.fail(error)

    def _take(self) -> list[Request]:
        """The next requests: one of control, or up to a batch of data."""
        for lane, most in zip(self._lanes, (1, self._batch), strict=True):
            taken: list[Request] = []
            while lane and len(taken) < most:
                request = lane.popleft()
                self._pending -= 1
                if not request.abandoned:
                    taken.append(request)
            if taken:
                return taken
        return []

    def _forget(self, request: Request) -> None:
        if not request.future.cancelled():
            request.future.exception()  # marks it as seen: the caller may be gone
        self._open.discard(request)
