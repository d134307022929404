"""The trainer role: an SPMD group of one or more ranks, of which rank 0 publishes the weights, and others send a part of them.

`python -m services.trainer`, or under torchrun.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING

from runtime.actor import Request
from runtime.commands import (
    AbortWeights,
    HostWeights,
    MeetWeights,
    ResendWeights,
    SendWeights,
    WeightsHosted,
    WeightsSent,
)
from runtime.config import Config
from runtime.errors import Cancelled, ServiceFault
from runtime.types import PolicyVersion
from services import process
from services.spmd_service import Follower, Leader, SpmdRole

if TYPE_CHECKING:
    from runtime.trainer.rank import TrainRank
    from runtime.weights.group import PendingGroup, WeightGroup


def make_rank(config: Config, rank: int, world_size: int) -> TrainRank:
    from runtime.trainer import rank as train_rank

    return train_rank.make(config, rank, world_size)


log = logging.getLogger("sluice")

ROLE = SpmdRole("trainer", "Trainer", make_rank)


class TrainerService(Leader):
    """Rank 0, or the only rank: a member of the publication group besides.

    Commands to the engine wait in line, so that the group can be left and met anew while the engine computes.
    """

    _worker: TrainRank

    def __init__(self, config: Config, name: str, rank: int):
        super().__init__(ROLE, config, name, rank)
        self._epoch = 0  # that it hosts, or is about to
        self._pending: PendingGroup | None = None
        self._group: Future[WeightGroup] | None = None
        self._leaving: Future[None] | None = None
        self._hosting: asyncio.Task[None] | None = None
        self._snapshot: PolicyVersion | None = None  # what the sender's buckets hold, or are being filled with
        self._line: asyncio.Queue[Request] = asyncio.Queue()
        self._working: asyncio.Task[None] | None = None
        self._resending: asyncio.Task[bool] | None = None

    async def start(self) -> None:
        self._working = asyncio.create_task(self._work())

    async def close(self) -> None:
        for task in (self._working, self._resending, self._hosting):
            if task is not None:
                task.cancel()
        await super().close()
        await asyncio.wrap_future(self._leave())

    async def receive(self, requests: Sequence[Request]) -> None:
        (request,) = requests
        message = request.message
        if isinstance(message, HostWeights):
            left = self._leave()
            self._epoch = message.epoch
            self._hosting = asyncio.create_task(request.answer(self._host(request, left, self._hosting)))
        elif isinstance(message, AbortWeights):
            if message.epoch == self._epoch:
                left = self._leave()
                self._tell_senders(message)
                self._answer_at_end(request, left, "abort")
            else:
                request.reply()
        elif isinstance(message, SendWeights) and message.version == self._snapshot and self._is_intact():
            self._tell_senders(ResendWeights(message.version, message.epoch))
            self._resending = asyncio.create_task(self._send(request))  # the engine may have gone on
        else:
            self._line.put_nowait(request)

    def _is_intact(self) -> bool:
        return self._worker.sender is not None and self._worker.sender.intact

    async def _work(self) -> None:
        while True:
            request = await self._line.get()
            if request.abandoned:
                continue
            try:
                if isinstance(request.message, SendWeights):
                    await self._gather(request)
                else:
                    await self._carry_out(request)
            except Exception as error:  # noqa: BLE001 - the error goes to whoever sent the request
                request.fail(error)

    async def _gather(self, request: Request) -> None:
        """Gather the weights, and send each bucket as soon as it is whole. What is left of the transfer goes on beside the next
        step. With `publication.overlap` the copy is made even if it cannot be sent: for the next epoch."""
        command: SendWeights = request.message
        settings, sender = self.config.publication, self._worker.sender
        assert sender is not None  # it is rank 0's
        if command.version < self._worker.version:
            raise ServiceFault(
                self.name, "snapshot", f"version {command.version} was not kept: {self._worker.version} is there"
            )
        self._snapshot = None
        await asyncio.to_thread(sender.begin, settings.transfer_timeout)
        if settings.overlap:
            self._snapshot = command.version
        if not await self._send(request) and not settings.overlap:
            return
        try:
            await self._execute(command)
        except Exception as error:  # noqa: BLE001 - the error goes to whoever sent the request
            self._snapshot = None
            log.warning("%s: version %s was not gathered: %r", self.name, command.version, error)  # the request may be answered
            request.fail(error)  # AbortWeights follows. To end the transfer here would make it seem the receivers' failure

    async def _send(self, request: Request) -> bool:
        """Whether a transfer has begun. It answers the request at its end."""
        try:
            await self._transfer(request)
        except Exception as error:  # noqa: BLE001 - the error goes to whoever sent the request
            request.fail(error)
            return False
        return True

    def _tell_senders(self, command: MeetWeights | AbortWeights | ResendWeights) -> None:
        """The ranks that send besides this one, whatever their engines do."""
        if self._relay is not None and len(self._worker.senders) > 1:
            self._relay.send(command, aside=True)

    def _leave(self) -> Future[None]:
        """Out of the epoch's group. In a thread, one after the other: to leave one that meets in a folder takes its server."""
        from runtime.weights.sender import in_thread

        group, pending, before = self._group, self._pending, self._leaving
        self._group = self._pending = None
        self._epoch = 0

        def leave() -> None:
            if before is not None:
                wait([before])
            if group is None or pending is None:
                return
            if not group.done():
                pending.abort()
            if self._worker.sender is not None:
                self._worker.sender.abort()
            group.add_done_callback(_abandon)

        self._leaving = in_thread("leave-weights", leave)
        return self._leaving

    async def _host(self, request: Request, left: Future[None], before: asyncio.Task[None] | None) -> WeightsHosted:
        """Beside the actor, and in a thread: torch looks up names while it opens the store, for seconds where no name server
        answers, and the server of a shared folder may not answer at all. It begins once the epoch before is `left`, and its
        own hosting over."""
        command: HostWeights = request.message
        if before is not None:
            await asyncio.wait({before})
        await asyncio.wrap_future(left)
        pending = await self._open(command)
        if self._hosting is not asyncio.current_task() or command.epoch != self._epoch or request.abandoned:
            pending.abort()
            raise Cancelled(f"{self.name}: epoch {command.epoch} was given up")
        self._meet(pending)
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

    def _meet(self, pending: PendingGroup) -> None:
        from runtime.weights.sender import in_thread

        self._pending = pending
        self._group = in_thread("join-weights", pending.connect)
        self._tell_senders(MeetWeights(pending.address))

    async def _transfer(self, request: Request) -> None:
        """Begin to send what the buckets hold, or are being filled with."""
        command: SendWeights = request.message
        timeout, sender = self.config.publication.transfer_timeout, self._worker.sender
        if self._group is None or self._pending is None or self._pending.address.epoch != command.epoch:
            raise ServiceFault(self.name, "transfer", f"there is no publication group of epoch {command.epoch}")
        group = await asyncio.wait_for(asyncio.wrap_future(self._group), self.config.publication.join_timeout)
        assert sender is not None
        sending = await asyncio.to_thread(sender.send, group, command.version, timeout)
        self._answer_at_end(request, sending, "transfer", lambda sent: WeightsSent(sent.nbytes, sent.seconds))


def _abandon(connected: Future[WeightGroup]) -> None:
    if connected.exception() is None:
        connected.result().abort()


def make(config: Config, name: str, rank: int) -> process.Service:
    return Follower(ROLE, config, name, rank) if rank else TrainerService(config, name, rank)


if __name__ == "__main__":
    process.main(make)
