"""How a gateway reaches those who play: the run's own processes, which the coordinator names, and servers of the user's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import grpc

from runtime import timeouts
from runtime.cluster.topology import players
from runtime.commands import PeerAddress
from runtime.config import Config, RemoteServer
from runtime.environments.messages import CancelRequest, EnvironmentDescription, EpisodeEvent, EpisodeRequest
from runtime.errors import InvalidMessage, Unreachable, UserError
from runtime.process import keys
from runtime.process.keys import Keys
from services.rpc import contract, security
from services.rpc.server import OPTIONS, options

DESCRIBE, RUN, CANCEL = (contract.METHODS["Environment", name] for name in ("Describe", "Run", "Cancel"))


class EnvironmentChannel:
    """Implements `runtime.gateway.players.EnvironmentPort`. Made on the event loop."""

    def __init__(self, name: str, channel: Any, metadata: Sequence[tuple[str, str]]):
        self.name = name
        self._channel, self._metadata = channel, tuple(metadata)
        self._closed = False
        self._under_way = set[Any]()  # calls, which gRPC does not end with their channel while they are read
        # Replies are parsed here: gRPC would only log what its deserializer raises.
        self._run = channel.unary_stream(RUN.path, RUN.request.serialize)
        self._cancel = channel.unary_unary(CANCEL.path, CANCEL.request.serialize)
        self._describe = channel.unary_unary(DESCRIBE.path, DESCRIBE.request.serialize)

    async def run(self, request: EpisodeRequest) -> AsyncGenerator[EpisodeEvent, None]:
        call = self._run(request, metadata=self._metadata)
        self._under_way.add(call)
        try:
            async for data in call:
                yield RUN.reply.parse(data)
        except (grpc.aio.AioRpcError, InvalidMessage) as error:
            raise _lost(self.name, "Run", error) from None
        except asyncio.CancelledError:  # also what gRPC raises in a call that `close` ended
            if not self._closed:
                raise
            raise Unreachable(self.name, "Run", "it serves no more") from None
        finally:
            self._under_way.discard(call)
            call.cancel()

    async def describe(self, seconds: float) -> EnvironmentDescription:
        """Raises Unreachable when it does not come within so many seconds."""
        try:
            found: EnvironmentDescription = DESCRIBE.reply.parse(
                await self._describe(None, timeout=seconds, metadata=self._metadata, wait_for_ready=True)
            )
        except (grpc.aio.AioRpcError, InvalidMessage) as error:
            raise _lost(self.name, "Describe", error) from None
        return found

    async def cancel(self, episode: str) -> None:
        try:
            await self._cancel(CancelRequest(episode), timeout=timeouts.CONTROL_CALL, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise _lost(self.name, "Cancel", error) from None

    async def close(self) -> None:
        """What is under way ends with Unreachable."""
        self._closed = True
        for call in self._under_way:
            call.cancel()
        await self._channel.close()


def _lost(name: str, phase: str, error: Exception) -> Unreachable:
    if isinstance(error, grpc.aio.AioRpcError):
        return Unreachable(name, phase, f"{error.code().name}: {security.in_words(error.details() or '')}")
    return Unreachable(name, phase, str(error))


class EnvironmentChannels:
    """One channel for each process, by the name of its environment."""

    def __init__(self, config: Config, own_keys: Keys | None):
        """Raises UserError for a token that this process's environment has not."""
        self._config, self._keys = config, own_keys
        self._own: dict[PeerAddress, EnvironmentChannel] = {}
        self._paths = players(config)
        self._servers = {
            name: _to_server(name, settings.server)
            for name, settings in config.services.environment.items()
            if settings.server is not None
        }

    async def check(self) -> None:
        """Raises UserError for a server of the user's that does not answer within `deadlines.silence`."""
        silence = self._config.deadlines.silence
        for name, channel in self._servers.items():
            try:
                await channel.describe(silence)
            except Unreachable as error:
                what = f"no Environment answers within {silence:g} s: {error.reason}"
                raise UserError(f"services.environment.{name}.server.address: {what}") from None

    def use(self, processes: Sequence[PeerAddress]) -> list[EnvironmentChannel]:
        """The run's own that serve, from now on. Returns the channels to those that do not any more, to be closed."""
        left = [self._own.pop(address) for address in list(self._own) if address not in processes]
        for address in processes:
            if address not in self._own:
                self._own[address] = self._to(address)
        return left

    def _to(self, to: PeerAddress) -> EnvironmentChannel:
        called = keys.process(to.name, to.incarnation)
        channel = security.connection(grpc.aio, to.address, self._keys, called, options(self._config.deadlines.silence))
        return EnvironmentChannel(to.name, channel, security.shown_to(called, self._keys, to.token))

    def by_name(self) -> dict[str, list[EnvironmentChannel]]:
        found = {name: [channel] for name, channel in self._servers.items()}
        for address, channel in self._own.items():
            found.setdefault(self._paths[address.name].rpartition(".")[2], []).append(channel)
        return found

    async def close(self) -> None:
        for channel in [*self._own.values(), *self._servers.values()]:
            await channel.close()


def _to_server(name: str, server: RemoteServer) -> EnvironmentChannel:
    channel, metadata = security.to_server(server, f"services.environment.{name}.server", OPTIONS)
    return EnvironmentChannel(f"{name} at {server.address}", channel, metadata)
