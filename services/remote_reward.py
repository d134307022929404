"""The client of a remote reward: a process of the user's that serves RemoteReward."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import grpc

from runtime import config, timeouts
from runtime.errors import InvalidMessage, UserError
from runtime.rewards.remote import RemoteFailure
from runtime.rewards.remote_messages import RemoteItem, RemoteResult, RemoteScoreReply, RemoteScoreRequest
from services.rpc import contract
from services.rpc.server import OPTIONS

SCORE = contract.METHODS["RemoteReward", "Score"]
FIRST_DELAY, LONGEST_DELAY = 0.05, 1.0  # seconds between two attempts to reach a server that is not there
RECONNECT = (("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 1000))


class RemoteRewardClient:
    """Implements `runtime.rewards.remote.RemotePort`. Made on the event loop; plain text."""

    def __init__(self, settings: config.RemoteReward):
        self._settings = settings
        self._channel = grpc.aio.insecure_channel(settings.address, options=(*OPTIONS, *RECONNECT))
        # The reply is parsed here: gRPC would only log what its deserializer raises.
        self._call = self._channel.unary_unary(SCORE.path, lambda message: message.SerializeToString())

    async def check(self) -> None:
        """Ask for nothing, to see that somebody answers. Raises UserError when nobody does within `timeout`."""
        try:
            await self.score([], self._settings.timeout)
        except RemoteFailure as failure:
            raise UserError(
                f"rewards.remote: {self._settings.name}: no RemoteReward at {self._settings.address} "
                f"within {self._settings.timeout:g} s: {' '.join(str(failure).split())}"
            ) from None

    async def score(self, items: Sequence[RemoteItem], timeout: float) -> list[RemoteResult]:
        """One call, made again as long as the server cannot be reached. Raises RemoteFailure."""
        request = SCORE.request.pack(RemoteScoreRequest(list(items)))
        deadline, delay = time.monotonic() + timeout, FIRST_DELAY
        while True:
            try:
                data = await self._call(request, timeout=max(deadline - time.monotonic(), FIRST_DELAY))
                reply: RemoteScoreReply = SCORE.reply.parse(data)
                return reply.results
            except InvalidMessage as error:
                raise RemoteFailure("not a reply", str(error)) from None
            except grpc.aio.AioRpcError as error:
                left = deadline - time.monotonic()
                if error.code() is not grpc.StatusCode.UNAVAILABLE or left <= delay + timeouts.REMOTE_REWARD_LEAST:
                    raise RemoteFailure(error.code().name, error.details() or "") from None
            await asyncio.sleep(delay)
            delay = min(2 * delay, LONGEST_DELAY)

    async def close(self) -> None:
        await self._channel.close()
