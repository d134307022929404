"""The trainer role: an SPMD group of one or more ranks, of which rank 0 publishes the weights.

`python -m services.trainer`, or under torchrun.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from runtime.actor import Letter
from runtime.commands import AbortWeights, HostWeights, SendWeights, WeightsHosted, WeightsSent
from runtime.config import Config
from runtime.errors import ServiceFault
from services import process
from services.spmd_service import Follower, Leader, SpmdRole

if TYPE_CHECKING:
    from runtime.engines.train_rank import TrainRank
    from runtime.weights.group import WeightGroup


def make_rank(config: Config, rank: int, world_size: int) -> TrainRank:
    from runtime.engines import train_rank

    return train_rank.make(config, rank, world_size)


ROLE = SpmdRole("trainer", "Trainer", make_rank)


class TrainerService(Leader):
    """Rank 0, or the only rank: a member of the publication group besides."""

    _worker: TrainRank

    def __init__(self, config: Config, name: str, rank: int):
        super().__init__(ROLE, config, name, rank)
        self._group: Future[WeightGroup] | None = None

    async def close(self) -> None:
        await super().close()
        self._leave()

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
            await super().receive(letters)

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
        assert self._worker.sender is not None  # it is rank 0's
        sending = self._worker.sender.send(group, command.version, self.config.publication.transfer_timeout)
        self._answer_at_end(letter, sending, "transfer", lambda sent: WeightsSent(sent.nbytes, sent.seconds))


def make(config: Config, name: str, rank: int) -> process.Service:
    return Follower(ROLE, config, name, rank) if rank else TrainerService(config, name, rank)


if __name__ == "__main__":
    process.main(make)
