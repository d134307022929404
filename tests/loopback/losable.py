"""A process in memory that can be lost: what all fakes of roles have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import msgspec

from runtime.errors import Unreachable
from runtime.types import GroupRequest, LogprobRequest, ScoreRequest, ValueRequest, snake

T = TypeVar("T")


ASKED = {GroupRequest: "generate", ScoreRequest: "score", LogprobRequest: "logprobs", ValueRequest: "values"}


async def _answered(answer: Awaitable[Any]) -> Any:
    """The coroutine of any awaitable."""
    return await answer


class Losable:
    """`die` loses it: calls under way, and later ones, fail, as they do when it is given up."""

    name = ""

    def __init__(self, incarnation: int = 0) -> None:
        self.incarnation = incarnation
        self.gone = ""  # why
        self._tell: list[Callable[[str], None]] = []
        self._under_way: set[asyncio.Future[Any]] = set()

    def when_lost(self, tell: Callable[[str], None]) -> None:
        if self.gone:
            tell(self.gone)
        self._tell.append(tell)

    def give_up(self, reason: str) -> None:
        self.gone = self.gone or reason
        for call in self._under_way:
            if not call.done():
                call.set_exception(Unreachable(self.name, "call", self.gone))

    def acknowledge(self, command: Any) -> None:
        """It keeps nothing."""

    def die(self, reason: str = "connection lost") -> None:
        self.give_up(reason)
        told, self._tell = self._tell, []
        for tell in told:
            tell(reason)

    def post(self, command: Any) -> Coroutine[Any, Any, Any]:
        """Carried out by the method of its name: a request as it is, another command field by field."""
        name = ASKED.get(type(command))
        if name is not None:
            return _answered(getattr(self, name)(command))
        return _answered(getattr(self, snake(type(command).__name__))(*msgspec.structs.astuple(command)))

    async def call(self, command: Any) -> Any:
        return await self.post(command)

    async def reached(self, work: Awaitable[T]) -> T:
        """`work`, unless the process is lost first."""
        doing, lost = asyncio.ensure_future(work), asyncio.get_running_loop().create_future()
        if self.gone:
            lost.set_exception(Unreachable(self.name, "call", self.gone))
        self._under_way.add(lost)
        try:
            await asyncio.wait({doing, lost}, return_when=asyncio.FIRST_COMPLETED)
            return doing.result() if not lost.done() else lost.result()
        finally:
            self._under_way.discard(lost)
            doing.cancel()
            lost.cancel()
