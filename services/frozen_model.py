"""What a process around a frozen model does, forward only: the reference's replicas and the reward model."""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from runtime.actor import Request
from runtime.config import Config
from services import process

A = TypeVar("A")
T = TypeVar("T")


class FrozenModelService(process.Service):
    """Everything that lies in the mailbox is computed in one go, in a thread of its own."""

    batch = 256

    def __init__(self, config: Config, name: str, rank: int):
        super().__init__(config, name, rank)
        self._thread = ThreadPoolExecutor(1, "model")
        self._busy_seconds = 0.0
        self._groups = 0

    @abstractmethod
    def answers(self, requests: Sequence[Any]) -> Sequence[Any]:
        """What is replied to each request, a group; in the thread."""

    async def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def receive(self, requests: Sequence[Request]) -> None:
        before = time.monotonic()
        answers = await self.in_thread(self.answers, [request.message for request in requests])
        for request, answer in zip(requests, answers, strict=True):
            request.reply(answer)
        self._groups += len(requests)
        self._busy_seconds += time.monotonic() - before

    async def in_thread(self, work: Callable[[A], T], argument: A) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, argument)

    def gauges(self) -> dict[str, float]:
        return {"groups_total": self._groups, "busy_seconds_total": self._busy_seconds}
