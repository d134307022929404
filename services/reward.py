"""The reward role: rules, with a pool of killable workers, and remote rewards. `python -m services.reward`."""

from __future__ import annotations

import asyncio
import time

from runtime.config import Config
from runtime.data.tokenizer import Tokenizer
from runtime.rewards.combination import combine
from runtime.rewards.remote import RemoteScorer
from runtime.rewards.scorer import RewardScorer
from runtime.types import ScoreRequest, Scores
from services import process
from services.remote_reward import RemoteRewardClient


class RewardService(process.Service):
    """Each request, a group, is scored by itself and answered when it is: a slow rule holds up its own group alone."""

    role = "reward"
    service = "Reward"

    def __init__(self, config: Config, name: str, rank: int):
        super().__init__(config, name, rank)
        self._tokenizer: Tokenizer
        self._rules: RewardScorer | None = None
        self._clients: list[RemoteRewardClient] = []
        self._scorers: list[RewardScorer | RemoteScorer] = []
        self._groups = 0
        self._busy_seconds = 0.0

    def load(self) -> None:
        self._tokenizer = Tokenizer(self.config.model.path)
        if self.config.rewards.rules:
            self._rules = RewardScorer(self.config.rewards, self._tokenizer)
            self._scorers.append(self._rules)

    async def start(self) -> None:
        """Raises UserError for a remote reward that does not answer."""
        fail = self.config.rewards.on_error == "fail"
        for settings in self.config.rewards.remote:
            client = RemoteRewardClient(settings)
            self._clients.append(client)
            self._scorers.append(RemoteScorer(settings, self._tokenizer, client, fail))
        await asyncio.gather(*(client.check() for client in self._clients))
        if self._rules is not None:
            self._rules.start()

    async def close(self) -> None:
        if self._rules is not None:
            await self._rules.close()
        for client in self._clients:
            await client.close()

    async def score(self, request: ScoreRequest) -> Scores:
        before = time.monotonic()
        scores = combine(await asyncio.gather(*(scorer.score(request) for scorer in self._scorers)))
        self._groups += 1
        self._busy_seconds += time.monotonic() - before
        return scores

    def gauges(self) -> dict[str, float]:
        return {"groups_total": self._groups, "busy_seconds_total": self._busy_seconds}


if __name__ == "__main__":
    process.main(RewardService)
