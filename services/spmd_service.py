"""What the SPMD roles share: every rank is given each command, in the same order, and carries it out on its share of the data.

the coordinator's session to this rank ──► event loop ──► the engine's thread, one command after the other
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from runtime.config import Config, Spread
from runtime.types import PolicyVersion
from services import process
from services.rpc import contract
from services.rpc.server import Handler

if TYPE_CHECKING:
    from runtime.trainer.group_rank import GroupRank

MakeRank = Callable[[Config, int, int], "GroupRank"]


class SpmdService(process.Service):
    """A rank, or the only one: its engine, in a thread of its own.

    A command is carried out even when its caller withdraws it: the other ranks carry it out as well.
    """

    def __init__(self, role: str, service: str, make_rank: MakeRank, config: Config, name: str, rank: int):
        """`service`: its name in proto/. `make_rank(config, rank, world_size)` builds the engine, in the engine's thread."""
        super().__init__(config, f"{name.rpartition('-')[0]}-{rank}" if rank else name, rank)
        self.role, self.service = role, service
        spread: Spread = getattr(config.services, role)
        self.libraries = process.TRANSFORMERS if spread.engine == "torch" else process.TORCH
        self._make_rank = make_rank
        self._thread = ThreadPoolExecutor(1, "engine")
        self._worker: GroupRank
        self._busy_seconds = 0.0

    def load(self) -> None:
        # The engine is made in its own thread, as some of torch's state belongs to the thread.
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        self._worker = self._thread.submit(self._make_rank, self.config, self.rank, ranks).result()

    async def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    @property
    def version(self) -> PolicyVersion:
        return self._worker.version

    def gauges(self) -> dict[str, float]:
        return {"busy_seconds_total": self._busy_seconds, "steps_total": self._worker.version.step}

    def handler(self, method: contract.Method) -> Handler:
        return getattr(self, method.handler, self.execute)

    def execute(self, command: Any) -> asyncio.Future[Any]:
        """Put it in line now. The engine's answer; of one that goes on beside the next commands, what comes of it."""
        loop = asyncio.get_running_loop()
        return loop.create_task(_answer(loop.run_in_executor(self._thread, self._carry_out, command)))

    def _carry_out(self, command: Any) -> Any:
        before = time.monotonic()
        try:
            return self._worker.execute(command)
        finally:
            self._busy_seconds += time.monotonic() - before


async def _answer(carried_out: asyncio.Future[Any]) -> Any:
    answer = await asyncio.shield(carried_out)
    return await asyncio.shield(asyncio.wrap_future(answer)) if isinstance(answer, Future) else answer
