"""The reward role: rules, with a pool of killable workers, and remote rewards. `python -m services.reward`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import grpc

from runtime import config, timeouts
from runtime.config import Config
from runtime.data.tokenizer import Tokenizer
from runtime.errors import InvalidMessage, UserError
from runtime.rewards.remote import RemoteFailure, RemoteItem, RemoteResult, RemoteScorer, RemoteScoreReply, RemoteScoreRequest
from runtime.rewards.scorer import RewardScorer, score_all
from runtime.types import ScoreRequest, Scores
from services import process
from services.rpc import contract, security
from services.rpc.server import OPTIONS, Handler

# ---- The client of a remote reward, which is a process of the user's that serves RemoteReward.


SCORE = contract.METHODS["RemoteReward", "Score"]
RECONNECT = (
    ("grpc.initial_reconnect_backoff_ms", int(1000 * timeouts.REMOTE_REWARD_RECONNECT)),
    ("grpc.max_reconnect_backoff_ms", int(1000 * timeouts.REMOTE_REWARD_RETRY_MOST)),
)


class RemoteRewardClient:
    """Asks the process of one entry of `rewards.remote`. Made on the event loop."""

    def __init__(self, settings: config.RemoteReward, key: str = "rewards.remote"):
        """Open the channel. Raises UserError if the token is not in the environment. `key`: of the settings."""
        self._settings = settings
        self._channel, self._metadata = security.to_server(settings, key, (*OPTIONS, *RECONNECT))
        # The reply is parsed here: gRPC would only log an exception of its deserializer.
        self._call = self._channel.unary_unary(SCORE.path, SCORE.request.serialize)

    async def check(self) -> None:
        """Send an empty request. Raises UserError if the server does not answer within `timeout`."""
        try:
            await self.score([], self._settings.timeout)
        except RemoteFailure as failure:
            what = f"{self._settings.name}: no RemoteReward at {self._settings.address} within {self._settings.timeout:g} s"
            raise UserError(f"rewards.remote: {what}: {' '.join(str(failure).split())}") from None

    async def score(self, items: Sequence[RemoteItem], timeout: float) -> list[RemoteResult]:
        """Score the items in one call, which is repeated while the server cannot be reached. Raises RemoteFailure."""
        request = RemoteScoreRequest(list(items))
        deadline, delay = time.monotonic() + timeout, timeouts.REMOTE_REWARD_RETRY
        while True:
            try:
                left = max(deadline - time.monotonic(), timeouts.REMOTE_REWARD_RETRY)
                data = await self._call(request, timeout=left, metadata=self._metadata)
                reply: RemoteScoreReply = SCORE.reply.parse(data)
                return reply.results
            except InvalidMessage as error:
                raise RemoteFailure("not a reply", str(error)) from None
            except grpc.aio.AioRpcError as error:
                left = deadline - time.monotonic()
                if error.code() is not grpc.StatusCode.UNAVAILABLE or left <= delay + timeouts.REMOTE_REWARD_LEAST:
                    raise RemoteFailure(error.code().name, error.details() or "") from None
            await asyncio.sleep(delay)
            delay = min(2 * delay, timeouts.REMOTE_REWARD_RETRY_MOST)

    async def close(self) -> None:
        await self._channel.close()


class RewardService(process.Service):
    """Scores and answers each group by itself: a slow rule delays only its own group."""

    role = "reward"

    def __init__(self, config: Config, name: str, rank: int):
        super().__init__(config, name, rank)
        self._tokenizer: Tokenizer
        self._rules: RewardScorer | None = None
        self._clients: list[RemoteRewardClient] = []
        self._scorers: list[Callable[[ScoreRequest], Awaitable[Scores]]] = []

    def load(self) -> None:
        self._tokenizer = Tokenizer(self.config.model.path)
        if self.config.rewards.rules:
            self._rules = RewardScorer(self.config.rewards, self._tokenizer.texts, self.config.services.reward.env)
            self._scorers.append(self._rules.score)

    async def start(self) -> None:
        """Start the scorers. Raises UserError if a remote reward does not answer, or if a sandbox does not work here."""
        fail = self.config.rewards.on_error == "fail"
        for index, settings in enumerate(self.config.rewards.remote):
            client = RemoteRewardClient(settings, f"rewards.remote.{index}")
            self._clients.append(client)
            self._scorers.append(RemoteScorer(settings, self._tokenizer.texts, client.score, fail).score)
        await asyncio.gather(*(client.check() for client in self._clients))
        if self._rules is not None:
            await self._rules.check()
            self._rules.start()

    async def close(self) -> None:
        if self._rules is not None:
            await self._rules.close()
        for client in self._clients:
            await client.close()

    def handler(self, method: contract.Method) -> Handler:
        return partial(score_all, self._scorers)


if __name__ == "__main__":
    process.main(RewardService)
