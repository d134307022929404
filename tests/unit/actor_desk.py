"""What the tests of the actor share: a behaviour that notes what it is handed, and an actor that runs meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from services.model_service import Actor, Request
from tests.coroutines import within

run = within(60.0)


class Desk:
    """A behaviour that notes what it is handed and echoes it, unless `serve` says otherwise. It advances `work` times."""

    def __init__(self, serve: Callable[[Sequence[Request]], Awaitable[None]] | None = None):
        self.seen: list[list[Any]] = []
        self.kept: dict[Any, Request] = {}
        self.work = 0
        self._serve = serve

    @property
    def busy(self) -> bool:
        return self.work > 0

    async def receive(self, requests: Sequence[Request]) -> None:
        self.seen.append([request.message for request in requests])
        if self._serve is not None:
            await self._serve(requests)
            return
        for request in requests:
            request.reply(request.message)

    async def advance(self, interrupted: Callable[[], bool]) -> None:
        self.work -= 1

    async def keep(self, requests: Sequence[Request]) -> None:
        """A `serve` that answers nothing yet."""
        self.kept |= {request.message: request for request in requests}


def keeper() -> Desk:
    desk = Desk()
    desk._serve = desk.keep
    return desk


@asynccontextmanager
async def running(actor: Actor) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(actor.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def settle() -> None:
    """Let everything that is ready to run do so."""
    for _ in range(20):
        await asyncio.sleep(0)
