"""Questions to a group whose ranks answer them together, each its own share."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from runtime.trainer.batching import balance
from services.rpc.session import Session

Request = TypeVar("Request")

UNDER_WAY = 2  # parts: one that is computed, and one that is there when it is done


class Parts(Generic[Request]):
    """What is asked in one turn of the event loop, or while `UNDER_WAY` parts are on their way, is one part, shared out over
    the leaders.
    """

    def __init__(
        self,
        sessions: Sequence[Session],
        leaders: Sequence[int],
        method: str,
        command: Callable[[int, list[Request]], Any],
        cost: Callable[[Request], float],
        timeout: float,
    ):
        """`command` makes a rank's order from a part's number and its share, which is empty on ranks that are no `leaders`.
        `cost`: of one request, which the shares are balanced by. `timeout`: seconds for a part.
        """
        self._sessions, self._leaders = sessions, leaders
        self._method, self._command = method, command
        self._cost, self._timeout = cost, timeout
        self._asked: list[tuple[Request, asyncio.Future[bytes]]] = []
        self._numbers = itertools.count()
        self._computing: set[asyncio.Task[None]] = set()

    async def ask(self, request: Request) -> bytes:
        """The encoded answer."""
        loop = asyncio.get_running_loop()
        if not self._asked:
            loop.call_soon(self._flush)
        future: asyncio.Future[bytes] = loop.create_future()
        self._asked.append((request, future))
        return await future

    def _flush(self) -> None:
        if not self._asked or len(self._computing) >= UNDER_WAY:
            return
        asked, self._asked = self._asked, []
        task = asyncio.ensure_future(self._compute(next(self._numbers), asked))
        self._computing.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._computing.discard(task)
        self._flush()

    async def _compute(self, part: int, asked: list[tuple[Request, asyncio.Future[bytes]]]) -> None:
        """One part. It is carried through even when those who asked withdraw: the leaders compute it together."""
        balanced = balance([self._cost(request) for request, _ in asked], len(self._leaders))
        of_leader = dict(zip(self._leaders, balanced, strict=True))
        shares = [of_leader.get(rank, []) for rank in range(len(self._sessions))]
        calls = (
            session.call(self._method, self._command(part, [asked[i][0] for i in share]), self._timeout)
            for session, share in zip(self._sessions, shares, strict=True)
        )
        try:
            replies: list[list[bytes]] = await asyncio.gather(*calls)
            answers = {
                i: one for share, reply in zip(shares, replies, strict=True) for i, one in zip(share, reply, strict=True)
            }
        except Exception as error:  # noqa: BLE001 - the error goes to everyone who asked
            for _, future in asked:
                if not future.done():
                    future.set_exception(error)
            return
        for index, (_, future) in enumerate(asked):
            if not future.done():
                future.set_result(answers[index])
