"""What a process around a frozen model does, forward only: the reference's replicas and the reward model."""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from runtime.config import Config
from services import process

MOST = 256  # questions that are answered in one go


class FrozenModelService(process.Service):
    """Everything that was asked while the model computed is computed next, in one go, in a thread of its own."""

    def __init__(self, config: Config, name: str, rank: int):
        super().__init__(config, name, rank)
        self._thread = ThreadPoolExecutor(1, "model")
        self._asked: list[tuple[Any, asyncio.Future[Any]]] = []
        self._computing: asyncio.Task[None] | None = None
        self._busy_seconds = 0.0
        self._groups = 0

    @abstractmethod
    def answers(self, requests: Sequence[Any]) -> Sequence[Any]:
        """What is replied to each request, a group; in the thread."""

    def ask(self, request: Any) -> asyncio.Future[Any]:
        """The answer, behind what was asked before. Cancelling it withdraws the question."""
        future = asyncio.get_running_loop().create_future()
        self._asked.append((request, future))
        if self._computing is None or self._computing.done():
            self._computing = asyncio.create_task(self._compute())
        return future

    async def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _compute(self) -> None:
        loop = asyncio.get_running_loop()
        while self._asked:
            taken, self._asked = self._asked[:MOST], self._asked[MOST:]
            wanted = [(request, future) for request, future in taken if not future.done()]
            if not wanted:
                continue
            before = time.monotonic()
            try:
                answers = await loop.run_in_executor(self._thread, self.answers, [request for request, _ in wanted])
            except Exception as error:  # noqa: BLE001 - the error goes to everyone who asked
                answers = [error] * len(wanted)
            for (_, future), answer in zip(wanted, answers, strict=True):
                if future.done():
                    continue
                if isinstance(answer, Exception):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)
            self._groups += len(wanted)
            self._busy_seconds += time.monotonic() - before

    def gauges(self) -> dict[str, float]:
        return {"groups_total": self._groups, "busy_seconds_total": self._busy_seconds}
