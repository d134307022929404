"""What the SPMD roles share: rank 0 takes the commands in order and relays them; the other ranks carry them out on their own
share of the data, which comes to them over their own stream.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec.structs import replace

from runtime.actor import Request
from runtime.commands import PartKey, Shared
from runtime.config import Config, Spread
from runtime.errors import DeadlineExceeded, InvalidMessage, ServiceFault
from runtime.types import PolicyVersion
from services import process

if TYPE_CHECKING:
    from runtime.spmd import Relay
    from runtime.trainer.group_rank import GroupRank


T = TypeVar("T")


@dataclass(frozen=True)
class SpmdRole:
    """`service` is its name in proto/; `make_rank(config, rank, world_size)` builds the engine, in the engine's thread."""

    name: str
    service: str
    make_rank: Callable[[Config, int, int], GroupRank]


class SpmdService(process.Service):
    """Any rank: its engine, in a thread of its own, and its end of the relay."""

    def __init__(self, role: SpmdRole, config: Config, name: str, rank: int):
        super().__init__(config, name, rank)
        self.role, self.service = role.name, role.service
        spread: Spread = getattr(config.services, role.name)
        self.libraries = process.TRANSFORMERS if spread.engine == "torch" else process.TORCH
        self._make_rank = role.make_rank
        self._thread = ThreadPoolExecutor(1, "engine")
        self._worker: GroupRank
        self._relay: Relay[Any] | None = None

    def load(self) -> None:
        # The engine is made in its own thread, as some of torch's state belongs to the thread.
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        self._worker = self._thread.submit(self._make_rank, self.config, self.rank, ranks).result()
        self._relay = self._worker.connect_relay()

    async def close(self) -> None:
        if self._relay is not None:
            await asyncio.to_thread(self._relay.close)
        self._thread.shutdown(wait=False, cancel_futures=True)

    @property
    def version(self) -> PolicyVersion:
        return self._worker.version


class Leader(SpmdService):
    """Rank 0, or the only rank: commands run one at a time, in order."""

    def __init__(self, role: SpmdRole, config: Config, name: str, rank: int):
        super().__init__(role, config, name, rank)
        self._busy_seconds = 0.0

    def gauges(self) -> dict[str, float]:
        return {"busy_seconds_total": self._busy_seconds, "steps_total": self._worker.version.step}

    async def receive(self, requests: Sequence[Request]) -> None:
        (request,) = requests
        await self._carry_out(request)

    async def _carry_out(self, request: Request) -> None:
        answer = await self._execute(request.message)
        if isinstance(answer, Future):
            self._answer_at_end(request, answer, "save")
        else:
            request.reply(answer)

    def _answer_at_end(
        self, request: Request, work: Future[T], phase: str, made: Callable[[T], Any] = lambda value: value
    ) -> None:
        """Answer `request` with what is `made` of the result of `work`, which goes on in a thread beside the next commands."""
        loop = asyncio.get_running_loop()

        def answer() -> None:
            error = work.exception()
            if error is None:
                request.reply(made(work.result()))
            else:
                request.fail(error if isinstance(error, Exception) else ServiceFault(self.name, phase, repr(error)))

        def tell(_: Future[T]) -> None:
            with suppress(RuntimeError):  # the service has closed, and with it its loop
                loop.call_soon_threadsafe(answer)

        work.add_done_callback(tell)

    async def _execute(self, command: Any) -> Any:
        before = time.monotonic()
        if self._relay is not None:
            self._relay.send(replace(command, groups=[]) if isinstance(command, Shared) else command)
        value = await asyncio.get_running_loop().run_in_executor(self._thread, self._worker.execute, command)
        self._busy_seconds += time.monotonic() - before
        return value


class Follower(SpmdService):
    """Another rank: a thread follows rank 0's commands; the mailbox takes only this rank's share of the data."""

    def __init__(self, role: SpmdRole, config: Config, name: str, rank: int):
        super().__init__(role, config, f"{name.rpartition('-')[0]}-{rank}", rank)
        self._inbox: dict[PartKey, Future[Request]] = {}

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.background = self._loop.run_in_executor(self._thread, self._follow)

    async def receive(self, requests: Sequence[Request]) -> None:
        (request,) = requests
        if not isinstance(request.message, Shared):
            raise InvalidMessage(f"rank {self.rank} takes data only, not {type(request.message).__name__}")
        self._part(request.message.key).set_result(request)

    async def close(self) -> None:
        await super().close()
        await asyncio.to_thread(self._worker.close)

    def _part(self, key: PartKey) -> Future[Request]:
        return self._inbox.setdefault(key, Future())

    def _follow(self) -> None:
        """In the engine's thread: carry out rank 0's commands until it closes the relay."""
        assert self._relay is not None
        while (command := self._relay.receive()) is not None:
            if not isinstance(command, Shared):
                self._worker.execute(command)
                continue
            request = self._share(command.key)
            self._loop.call_soon_threadsafe(request.reply, self._worker.execute(request.message))

    def _share(self, key: PartKey) -> Request:
        """This rank's share of a part. Raises DeadlineExceeded."""
        timeout = self._worker.timeout
        try:
            request = self._part(key).result(timeout)
        except FutureTimeout:
            kind, step, part = key
            raise DeadlineExceeded(self.name, kind, f"part {part} of step {step} did not come", timeout) from None
        del self._inbox[key]
        return request
