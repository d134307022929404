"""The trainer role: an SPMD group, which also sends the weights. `python -m services.trainer`, alone or as a rank."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from runtime.commands import AbortWeights, InitWeightGroup, JoinWeights, ResendWeights, WeightGroupReady, WeightsSent
from runtime.config import Config
from services import process
from services.model_service import SpmdService

if TYPE_CHECKING:
    from runtime.trainer.rank import TrainRank


def make_rank(config: Config, rank: int, world_size: int) -> TrainRank:
    from runtime.trainer import rank as ranks

    return ranks.make_rank(ranks.TrainRank, config, rank, world_size)


class TrainerService(SpmdService):
    """One rank. It is also a member of the weight sync's group, whatever the engine does meanwhile. The methods here answer
    beside the engine. Other commands, such as SendWeights, wait for its thread: `TrainRank` has them."""

    _worker: TrainRank

    def __init__(self, config: Config, name: str, rank: int):
        super().__init__("trainer", make_rank, config, name, rank)

    async def close(self) -> None:
        await super().close()
        await asyncio.wrap_future(self._worker.sender.close())

    async def init_weight_group(self, command: InitWeightGroup) -> WeightGroupReady:
        """Open the rendezvous. Called on rank 0."""
        return await self._worker.sender.open(command)

    async def join_weights(self, command: JoinWeights) -> None:
        """Join the rendezvous. Called on all other ranks."""
        await self._worker.sender.join(command.address)

    async def resend_weights(self, command: ResendWeights) -> WeightsSent:
        return await self._worker.sender.send(command.version, command.epoch)

    async def abort_weights(self, command: AbortWeights) -> None:
        # Answer after the group is left: the next epoch may use the same port.
        await asyncio.wrap_future(self._worker.sender.close(command.epoch))


if __name__ == "__main__":
    process.main(TrainerService)
