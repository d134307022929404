"""The trainer role: an SPMD group of one or more ranks, of which rank 0 opens each weight sync's rendezvous, and sends the
weights, alone or with others. `python -m services.trainer`, alone or as a rank.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from runtime.commands import AbortWeights, HostWeights, JoinWeights, ResendWeights, SendWeights, WeightsHosted, WeightsSent
from runtime.config import Config
from services import process, weight_sending
from services.model_service import SpmdService
from services.weight_sending import Hosted, Hosting

if TYPE_CHECKING:
    from runtime.trainer.rank import TrainRank


def make_rank(config: Config, rank: int, world_size: int) -> TrainRank:
    from runtime.trainer import rank as ranks

    return ranks.make_rank(ranks.TrainRank, config, rank, world_size)


class TrainerService(SpmdService):
    """A rank. Those that send weights are members of the weight sync's group besides, whatever the engine does meanwhile."""

    _worker: TrainRank

    def __init__(self, config: Config, name: str, rank: int):
        super().__init__("trainer", make_rank, config, name, rank)
        self._hosting = Hosting(config, name)

    async def close(self) -> None:
        self._hosting.close()
        await super().close()
        if (member := self._worker.member) is not None:
            await asyncio.wrap_future(member.close())

    async def host_weights(self, command: HostWeights) -> WeightsHosted:
        """Rank 0."""
        worker, settings = self._worker, self.config.publication
        assert worker.member is not None
        full_every = settings.full_every if settings.encoding == "delta" else 0
        hosted = Hosted(worker.manifest, worker.publication_backend, worker.senders, full_every)
        return await self._hosting.host(command, worker.member, hosted)

    async def join_weights(self, command: JoinWeights) -> None:
        """The ranks that send besides rank 0; the others are asked as well, and have nothing to do."""
        from runtime.weights import rendezvous

        member, address = self._worker.member, self._worker.address_of(command.address)
        if member is not None:
            await asyncio.wrap_future(member.open(address.epoch))
            joining = member.connect(address.epoch, lambda: rendezvous.join(address, self.name))
            await asyncio.shield(asyncio.wrap_future(joining))

    def send_weights(self, command: SendWeights) -> asyncio.Future[WeightsSent]:
        return asyncio.get_running_loop().create_task(weight_sending.sent(self.execute(command)))

    async def resend_weights(self, command: ResendWeights) -> WeightsSent:
        member = self._worker.member
        return WeightsSent(0, 0.0) if member is None else await weight_sending.resend(member, command)

    async def abort_weights(self, command: AbortWeights) -> None:
        member = self._worker.member
        if member is not None and (left := member.leave(command.epoch)) is not None:
            await asyncio.shield(asyncio.wrap_future(left))


if __name__ == "__main__":
    process.main(TrainerService)
