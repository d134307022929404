"""The reward role: rules, and a pool of killable workers for what they cannot decide at once. `python -m services.reward`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from runtime.actor import Letter
from runtime.config import Config
from runtime.data.tokenizer import Tokenizer
from runtime.rewards.scorer import RewardScorer
from services import process


class RewardService(process.Service):
    """Each letter, a group, is scored by itself and answered when it is: a slow rule holds up its own group alone."""

    role = "reward"
    service = "Reward"
    batch = 256

    def __init__(self, config: Config, name: str, rank: int):
        super().__init__(config, name, rank)
        self._scorer: RewardScorer
        self._tasks: set[asyncio.Task[None]] = set()
        self._groups = 0
        self._busy_seconds = 0.0

    def load(self) -> None:
        self._scorer = RewardScorer(self.config.rewards, Tokenizer(self.config.model.path))

    async def start(self) -> None:
        self._scorer.start()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._scorer.close()

    async def receive(self, letters: Sequence[Letter]) -> None:
        for letter in letters:
            task = asyncio.create_task(self._score(letter))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _score(self, letter: Letter) -> None:
        before = time.monotonic()
        try:
            (scores,) = await self._scorer.score([letter.message])
        except Exception as error:  # noqa: BLE001 - the error goes to whoever sent the letter
            letter.fail(error)
            return
        letter.reply(scores)
        self._groups += 1
        self._busy_seconds += time.monotonic() - before

    def gauges(self) -> dict[str, float]:
        return {"groups_total": self._groups, "busy_seconds_total": self._busy_seconds}


if __name__ == "__main__":
    process.main(RewardService)
