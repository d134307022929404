"""The sending side of a weight sync: what the trainer's ranks, and a rollout that brings another one up to date, do with the
commands to open an epoch's group and to send once more."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from runtime.cluster.topology import takes_turns
from runtime.commands import HostWeights, ResendWeights, WeightsHosted, WeightsSent
from runtime.config import Config
from runtime.errors import Cancelled, ServiceFault

if TYPE_CHECKING:
    from runtime.weights.group import PendingGroup
    from runtime.weights.plan import Manifest
    from runtime.weights.receiver import WeightReceiver
    from runtime.weights.sender import SendingMember, SendResult


@dataclass(frozen=True)
class Hosted:
    """What the members of an epoch are told by the one that opens it."""

    manifest: Manifest
    backend: str
    senders: Sequence[str]  # what they are called, that one first
    full_every: int = 0  # as `GroupAddress`


class Hosting:
    """Opens the rendezvous of one epoch after the other, as its rank 0."""

    def __init__(self, config: Config, name: str):
        self._config = config
        self._name = name
        self._newest: asyncio.Task[WeightsHosted] | None = None

    async def host(self, command: HostWeights, member: SendingMember, hosted: Hosted) -> WeightsHosted:
        """It goes on when its caller withdraws: the next epoch waits for its end."""
        left = member.open(command.epoch)
        self._newest = asyncio.create_task(self._host(command, member, hosted, left, self._newest))
        return await asyncio.shield(self._newest)

    def close(self) -> None:
        if self._newest is not None:
            self._newest.cancel()

    async def _host(
        self,
        command: HostWeights,
        member: SendingMember,
        hosted: Hosted,
        left: Future[None],
        before: asyncio.Task[WeightsHosted] | None,
    ) -> WeightsHosted:
        """In a thread: torch looks up names while it opens the store, for seconds where no name server answers, and the server
        of a shared folder may not answer at all. It begins once the epoch before is `left`, and its own hosting over."""
        if before is not None:
            await asyncio.wait({before})
        await asyncio.wrap_future(left)
        pending = await self._open(command, hosted)
        if self._newest is not asyncio.current_task():
            pending.abort()
            raise Cancelled(f"{self._name}: epoch {command.epoch} was given up")
        member.connect(command.epoch, pending.connect, pending.abort)
        return WeightsHosted(pending.address, hosted.manifest)

    async def _open(self, command: HostWeights, hosted: Hosted) -> PendingGroup:
        from runtime.weights import rendezvous
        from runtime.weights.sender import in_thread

        settings, network = self._config.publication, self._config.network
        return await asyncio.wrap_future(
            in_thread(
                "host-weights",
                lambda: rendezvous.host(
                    command.epoch,
                    len(hosted.senders) + command.world_size - 1,
                    network.interface,
                    hosted.backend,
                    settings.join_timeout,
                    self._name,
                    command.transport,
                    settings.folder,
                    hosted.full_every,
                    network.port_range,
                    (*hosted.senders, *command.names[1:]),
                    len(hosted.senders),
                ),
            )
        )


async def resend(member: SendingMember, command: ResendWeights) -> WeightsSent:
    """What `member` holds, once more, whatever the engine does meanwhile."""
    from runtime.weights.sender import in_thread

    begun: Future[Future[SendResult]] = in_thread("resend", lambda: member.resend(command.version, command.epoch))
    sending: Future[SendResult] = await asyncio.shield(asyncio.wrap_future(begun))
    return await sent(asyncio.wrap_future(sending))


async def sent(sending: asyncio.Future[Any]) -> WeightsSent:
    """Rank 0's result is that of all who send."""
    result: SendResult | None = await asyncio.shield(sending)
    return WeightsSent(0, 0.0) if result is None else WeightsSent(result.nbytes, result.seconds, result.gather_seconds)


class PeerSender:
    """A rollout that sends the version which its engine has to those that lack it, in an epoch of its own with them.

    It leaves from the buckets in which it was received. Generation goes on.
    """

    def __init__(self, config: Config, name: str):
        self._config = config
        self._name = name
        self._hosting = Hosting(config, name)
        self._member: SendingMember | None = None
        self._epoch = 0
        self.sending: asyncio.Task[WeightsSent] | None = None
        """The newest, which may still use the buckets when its group is left."""

    async def host(self, command: HostWeights, receiver: WeightReceiver | None) -> WeightsHosted:
        """Raises ServiceFault, phase "snapshot", where no buckets of `receiver` hold the version as it was received."""
        from runtime.process import platform
        from runtime.weights.sender import SendingMember, in_thread

        held = None if receiver is None else receiver.held
        if receiver is None or held is None:
            raise ServiceFault(self._name, "snapshot", "no version that was received is kept")
        self.leave()
        self._epoch, settings = command.epoch, self._config.publication
        try:
            sender = await asyncio.wrap_future(in_thread("verify-weights", held.sender))
        except RuntimeError as error:
            raise ServiceFault(self._name, "snapshot", str(error)) from error
        member = SendingMember(sender, self._name, settings.join_timeout, settings.transfer_timeout, held.version)
        if command.epoch != self._epoch:
            raise Cancelled(f"{self._name}: epoch {command.epoch} was given up")
        self._member = member
        backend = platform.collective_backend("gloo" if takes_turns(self._config) else settings.backend, platform.device())
        return await self._hosting.host(command, member, Hosted(receiver.manifest, backend, (self._name,)))

    async def resend(self, command: ResendWeights) -> WeightsSent:
        if self._member is None:
            raise ServiceFault(self._name, "transfer", f"there is no publication group of epoch {command.epoch}")
        self.sending = asyncio.create_task(resend(self._member, command))
        return await asyncio.shield(self.sending)

    def close(self) -> None:
        self.leave()
        self._hosting.close()

    def leave(self, epoch: int | None = None) -> None:
        """Leave the group of `epoch`, or whichever there is, and send nothing any more."""
        if epoch in (None, self._epoch):
            self._epoch = 0
            if self._member is not None:
                self._member.close()
                self._member = None
