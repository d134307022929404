"""The trainer role: an SPMD group of one or more ranks, of which rank 0 opens each weight sync's rendezvous, and sends the
weights, alone or with others. `python -m services.trainer`, alone or as a rank.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from runtime.commands import AbortWeights, HostWeights, JoinWeights, ResendWeights, SendWeights, WeightsHosted, WeightsSent
from runtime.config import Config
from runtime.errors import Cancelled
from services import process
from services.models import SpmdService

if TYPE_CHECKING:
    from runtime.trainer.rank import TrainRank
    from runtime.weights.group import PendingGroup
    from runtime.weights.sender import SendResult


def make_rank(config: Config, rank: int, world_size: int) -> TrainRank:
    from runtime.trainer.rank import make_train_rank

    return make_train_rank(config, rank, world_size)


class TrainerService(SpmdService):
    """A rank. Those that send weights are members of the weight sync's group besides, whatever the engine does meanwhile."""

    _worker: TrainRank

    def __init__(self, config: Config, name: str, rank: int):
        super().__init__("trainer", "Trainer", make_rank, config, name, rank)
        self._hosting: asyncio.Task[WeightsHosted] | None = None

    async def close(self) -> None:
        if self._hosting is not None:
            self._hosting.cancel()
        await super().close()
        if (member := self._worker.member) is not None:
            await asyncio.wrap_future(member.close())

    async def host_weights(self, command: HostWeights) -> WeightsHosted:
        """Rank 0. It goes on when its caller withdraws: the next epoch waits for its end."""
        assert self._worker.member is not None
        left = self._worker.member.open(command.epoch)
        self._hosting = asyncio.create_task(self._host(command, left, self._hosting))
        return await asyncio.shield(self._hosting)

    async def join_weights(self, command: JoinWeights) -> None:
        """The ranks that send besides rank 0; the others are asked as well, and have nothing to do."""
        from runtime.weights import rendezvous

        member, address = self._worker.member, self._worker.address_of(command.address)
        if member is not None:
            await asyncio.wrap_future(member.open(address.epoch))
            joining = member.connect(address.epoch, lambda: rendezvous.join(address, self.name))
            await asyncio.shield(asyncio.wrap_future(joining))

    def send_weights(self, command: SendWeights) -> asyncio.Future[WeightsSent]:
        return asyncio.get_running_loop().create_task(_sent(self.execute(command)))

    async def resend_weights(self, command: ResendWeights) -> WeightsSent:
        from runtime.weights.sender import in_thread

        member = self._worker.member
        if member is None:
            return WeightsSent(0, 0.0)
        begun: Future[Future[SendResult]] = in_thread("resend", lambda: member.resend(command.version, command.epoch))
        sending: Future[SendResult] = await asyncio.shield(asyncio.wrap_future(begun))
        return await _sent(asyncio.wrap_future(sending))

    async def abort_weights(self, command: AbortWeights) -> None:
        member = self._worker.member
        if member is not None and (left := member.leave(command.epoch)) is not None:
            await asyncio.shield(asyncio.wrap_future(left))

    async def _host(
        self, command: HostWeights, left: Future[None], before: asyncio.Task[WeightsHosted] | None
    ) -> WeightsHosted:
        """In a thread: torch looks up names while it opens the store, for seconds where no name server answers, and the server
        of a shared folder may not answer at all. It begins once the epoch before is `left`, and its own hosting over."""
        member = self._worker.member
        assert member is not None
        if before is not None:
            await asyncio.wait({before})
        await asyncio.wrap_future(left)
        pending = await self._open(command)
        if self._hosting is not asyncio.current_task():
            pending.abort()
            raise Cancelled(f"{self.name}: epoch {command.epoch} was given up")
        member.connect(command.epoch, pending.connect, pending.abort)
        return WeightsHosted(pending.address, self._worker.manifest)

    async def _open(self, command: HostWeights) -> PendingGroup:
        from runtime.weights import rendezvous
        from runtime.weights.sender import in_thread

        settings, network, senders = self.config.publication, self.config.network, self._worker.senders
        return await asyncio.wrap_future(
            in_thread(
                "host-weights",
                lambda: rendezvous.host(
                    command.epoch,
                    len(senders) + command.world_size - 1,
                    network.interface,
                    self._worker.publication_backend,
                    settings.join_timeout,
                    self.name,
                    command.transport,
                    settings.folder,
                    settings.full_every if settings.encoding == "delta" else 0,
                    network.port_range,
                    (*senders, *command.names[1:]),
                    len(senders),
                ),
            )
        )


async def _sent(sending: asyncio.Future[Any]) -> WeightsSent:
    """Rank 0's result is that of all who send."""
    result: SendResult | None = await asyncio.shield(sending)
    return WeightsSent(0, 0.0) if result is None else WeightsSent(result.nbytes, result.seconds, result.gather_seconds)


def make(config: Config, name: str, rank: int) -> process.Service:
    return TrainerService(config, name, rank)


if __name__ == "__main__":
    process.main(make)
