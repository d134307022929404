"""Questions to a group whose ranks answer them together: those that are asked at about the same time become one command."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

UNDER_WAY = 2  # commands: one that is computed, and one that is there when it is done


class Gathering:
    """What is asked in one turn of the event loop, or while `UNDER_WAY` commands are on their way, is one command."""

    def __init__(self, command: Callable[[list[Any]], Any], post: Callable[[Any], Coroutine[Any, Any, list[bytes]]]):
        """`command` is made of the questions, and `post` gives it to the ranks."""
        self._command, self._post = command, post
        self._asked: list[tuple[Any, asyncio.Future[bytes]]] = []
        self._computing: set[asyncio.Task[None]] = set()

    async def ask(self, request: Any) -> Any:
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
        command = self._command([request for request, _ in asked])
        task = asyncio.create_task(self._compute(self._post(command), asked))
        self._computing.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._computing.discard(task)
        self._flush()

    async def _compute(
        self, answering: Coroutine[Any, Any, list[bytes]], asked: list[tuple[Any, asyncio.Future[bytes]]]
    ) -> None:
        """One command. It is carried through even when those who asked withdraw: the ranks compute it together."""
        try:
            answers = await answering
        except Exception as error:  # noqa: BLE001 - the error goes to everyone who asked
            for _, future in asked:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), answer in zip(asked, answers, strict=True):
            if not future.done():
                future.set_result(answer)
