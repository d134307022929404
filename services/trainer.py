"""The trainer role: an SPMD group of one or more ranks. `python -m services.trainer`, or under torchrun.

Rank 0 takes the commands in order and relays them; the other ranks carry them out on their own share of the data, which comes
to them over their own stream.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from runtime.actor import Letter
from runtime.commands import AbortWeights, Accumulate, HostWeights, SendWeights, WeightsHosted, WeightsSent
from runtime.config import Config
from runtime.errors import DeadlineExceeded, InvalidMessage, ServiceFault
from runtime.types import PolicyVersion
from services import process

if TYPE_CHECKING:
    from runtime.engines.train_rank import TrainRank
    from runtime.spmd import Relay
    from runtime.weights.group import WeightGroup
    from runtime.weights.sender import SendResult

log = logging.getLogger("sluice")


class TrainerService(process.Service):
    """Rank 0, or the only rank: commands run one at a time, in order, in the engine's thread."""

    role = "trainer"
    service = "Trainer"

    def __init__(self, config: Config, name: str, rank: int):
        super().__init__(config, name, rank)
        self._ranks = int(os.environ.get("WORLD_SIZE", "1"))
        self._thread = ThreadPoolExecutor(1, "engine")
        self._worker: TrainRank
        self._relay: Relay[Any] | None = None
        self._group: Future[WeightGroup] | None = None
        self._busy_seconds = 0.0

    def load(self) -> None:
        from runtime.engines import train_rank

        # The engine is made in its own thread, as some of torch's state belongs to the thread.
        self._worker = self._thread.submit(train_rank.make, self.config, self.rank, self._ranks).result()
        self._relay = self._worker.connect_relay(self.name)

    async def close(self) -> None:
        if self._relay is not None:
            await asyncio.to_thread(self._relay.close)
        self._leave()
        self._thread.shutdown(wait=False, cancel_futures=True)

    @property
    def version(self) -> PolicyVersion:
        return self._worker.version

    def gauges(self) -> dict[str, float]:
        return {"busy_seconds_total": self._busy_seconds, "steps_total": self._worker.version.step}

    async def receive(self, letters: Sequence[Letter]) -> None:
        (letter,) = letters
        if isinstance(letter.message, HostWeights):
            letter.reply(await self._host(letter.message))
        elif isinstance(letter.message, SendWeights):
            await self._send(letter)
        elif isinstance(letter.message, AbortWeights):
            self._leave()
            letter.reply()
        else:
            letter.reply(await self._execute(letter.message))

    async def _execute(self, command: Any) -> Any:
        before = time.monotonic()
        if self._relay is not None:
            self._relay.send(replace(command, groups=[]) if isinstance(command, Accumulate) else command)
        value = await asyncio.get_running_loop().run_in_executor(self._thread, self._worker.execute, command)
        self._busy_seconds += time.monotonic() - before
        return value

    def _leave(self) -> None:
        if self._group is not None and self._group.done() and self._group.exception() is None:
            self._group.result().abort()
        self._group = None

    async def _host(self, command: HostWeights) -> WeightsHosted:
        from runtime.weights import group
        from runtime.weights.sender import in_thread

        manifest = self._worker.manifest
        pending = group.host(
            command.epoch,
            command.world_size,
            self.config.network.interface,
            self._worker.publication_backend,
            self.config.publication.join_timeout,
            self.name,
        )
        self._group = in_thread("join-weights", pending.connect)
        return WeightsHosted(pending.address, manifest)

    async def _send(self, letter: Letter) -> None:
        """Snapshot in the engine's thread; the transfer goes on beside the next step, and answers the letter at its end."""
        command: SendWeights = letter.message
        if self._group is None:
            raise ServiceFault(self.name, "transfer", "there is no publication group")
        group = await asyncio.wait_for(asyncio.wrap_future(self._group), self.config.publication.join_timeout)
        await self._execute(command)
        loop = asyncio.get_running_loop()

        def done(future: Future[SendResult]) -> None:
            loop.call_soon_threadsafe(self._sent, letter, future)

        assert self._worker.sender is not None  # it is rank 0's
        sending = self._worker.sender.send(group, command.version, self.config.publication.transfer_timeout)
        sending.add_done_callback(done)

    def _sent(self, letter: Letter, future: Future[SendResult]) -> None:
        error = future.exception()
        if error is None:
            letter.reply(WeightsSent(future.result().nbytes, future.result().seconds))
        else:
            letter.fail(error if isinstance(error, Exception) else ServiceFault(self.name, "transfer", repr(error)))


class FollowerService(process.Service):
    """Another rank: a thread follows rank 0's commands; the mailbox takes only this rank's share of the data."""

    role = "trainer"
    service = "Trainer"

    def __init__(self, config: Config, name: str, rank: int):
        super().__init__(config, f"{name.rpartition('-')[0]}-{rank}", rank)
        self._ranks = int(os.environ["WORLD_SIZE"])
        self._thread = ThreadPoolExecutor(1, "engine")
        self._worker: TrainRank
        self._inbox: dict[tuple[int, int], Future[Letter]] = {}
        self._following: asyncio.Future[None] | None = None

    def load(self) -> None:
        from runtime.engines import train_rank

        self._worker = self._thread.submit(train_rank.make, self.config, self.rank, self._ranks).result()
        self._relay = self._worker.connect_relay(self.name)

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.background = self._loop.run_in_executor(self._thread, self._follow)

    async def close(self) -> None:
        if self._relay is not None:
            await asyncio.to_thread(self._relay.close)
        self._thread.shutdown(wait=False, cancel_futures=True)

    @property
    def version(self) -> PolicyVersion:
        return self._worker.version

    async def receive(self, letters: Sequence[Letter]) -> None:
        (letter,) = letters
        if not isinstance(letter.message, Accumulate):
            raise InvalidMessage(f"rank {self.rank} takes data only, not {type(letter.message).__name__}")
        self._slot(letter.message.step, letter.message.part).set_result(letter)

    def _slot(self, step: int, part: int) -> Future[Letter]:
        return self._inbox.setdefault((step, part), Future())

    def _follow(self) -> None:
        """In the engine's thread: carry out rank 0's commands until it closes the relay."""
        assert self._relay is not None
        while (command := self._relay.receive()) is not None:
            if not isinstance(command, Accumulate):
                self._worker.execute(command)
                continue
            timeout = self.config.deadlines.train
            try:
                letter = self._slot(command.step, command.part).result(timeout)
            except FutureTimeout:
                message = f"part {command.part} of step {command.step} did not come"
                raise DeadlineExceeded(self.name, "accumulate", message, timeout) from None
            del self._inbox[command.step, command.part]
            self._worker.execute(letter.message)
            self._loop.call_soon_threadsafe(letter.reply)


def make(config: Config, name: str, rank: int) -> process.Service:
    return FollowerService(config, name, rank) if rank else TrainerService(config, name, rank)


if __name__ == "__main__":
    process.main(make)
