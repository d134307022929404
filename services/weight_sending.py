"""How a rollout sends the version which its engine has to those that lack it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from runtime.cluster.topology import takes_turns
from runtime.commands import HostWeights, ResendWeights, WeightsHosted, WeightsSent
from runtime.config import Config
from runtime.errors import Cancelled, ServiceFault
from runtime.process.aio import in_thread

if TYPE_CHECKING:
    from runtime.weights.receiver import WeightReceiver
    from runtime.weights.sender import WeightSender


class PeerSender:
    """Sends in an epoch of its own with them, from the buckets in which the version was received. Generation goes on."""

    def __init__(self, config: Config, name: str):
        self._config = config
        self._name = name
        self._sender: WeightSender | None = None
        self._epoch = 0
        self.sending: asyncio.Task[WeightsSent] | None = None
        """The newest, which may still use the buckets when its group is left."""

    async def host(self, command: HostWeights, receiver: WeightReceiver | None) -> WeightsHosted:
        """Raises ServiceFault, phase "snapshot", where no buckets of `receiver` hold the version as it was received."""
        from runtime.process import platform
        from runtime.weights.sender import WeightSender

        held = None if receiver is None else receiver.held
        if held is None:
            raise ServiceFault(self._name, "snapshot", "no version that was received is kept")
        self.leave()
        self._epoch = command.epoch
        try:
            buffers = await asyncio.wrap_future(in_thread("verify-weights", held.sender))
        except RuntimeError as error:
            raise ServiceFault(self._name, "snapshot", str(error)) from error
        if command.epoch != self._epoch:
            raise Cancelled(f"{self._name}: epoch {command.epoch} was given up")
        backend = "gloo" if takes_turns(self._config) else self._config.publication.backend
        backend = platform.collective_backend(backend, platform.device())
        self._sender = WeightSender(buffers, self._config, self._name, backend=backend)
        return await self._sender.open(command)

    async def resend(self, command: ResendWeights) -> WeightsSent:
        if self._sender is None:
            raise ServiceFault(self._name, "transfer", f"there is no publication group of epoch {command.epoch}")
        self.sending = asyncio.create_task(self._sender.send(command.version, command.epoch))
        return await asyncio.shield(self.sending)

    def close(self) -> None:
        self.leave()

    def leave(self, epoch: int | None = None) -> None:
        """Leave the group of `epoch`, or whichever there is, and send nothing any more."""
        if epoch in (None, self._epoch):
            self._epoch = 0
            if self._sender is not None:
                self._sender.close()
                self._sender = None
