"""The reward model's role: scores of replies by a sequence classifier. `python -m services.reward_model`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from runtime.actor import Letter
from runtime.config import Config
from services import process

if TYPE_CHECKING:
    from runtime.rewards.model_scorer import ModelScorer


class RewardModelService(process.Service):
    """Everything that lies in the mailbox is scored in one go."""

    role = "reward_model"
    service = "Reward"
    batch = 256
    libraries = process.TRANSFORMERS

    def __init__(self, config: Config, name: str, rank: int):
        super().__init__(config, name, rank)
        self._scorer: ModelScorer
        self._thread = ThreadPoolExecutor(1, "scorer")
        self._busy_seconds = 0.0
        self._groups = 0

    def load(self) -> None:
        from runtime import platform
        from runtime.engines.reward_model_torch import TorchRewardModel
        from runtime.rewards.model_scorer import ModelScorer

        device, rewards = platform.device(), self.config.rewards
        assert rewards.model is not None
        settings = self.config.services.reward_model
        model = TorchRewardModel(
            rewards.model.path,
            device=device,
            dtype=platform.resolve_dtype(settings.dtype, device),
            max_tokens_per_microbatch=settings.max_tokens_per_microbatch,
        )
        self._scorer = ModelScorer(rewards.model, self.config.model.path, model, fail=rewards.on_error == "fail")

    async def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def receive(self, letters: Sequence[Letter]) -> None:
        before = time.monotonic()
        requests = [letter.message for letter in letters]
        loop = asyncio.get_running_loop()
        for letter, scores in zip(letters, await loop.run_in_executor(self._thread, self._scorer.score, requests), strict=True):
            letter.reply(scores)
        self._groups += len(letters)
        self._busy_seconds += time.monotonic() - before

    def gauges(self) -> dict[str, float]:
        return {"groups_total": self._groups, "busy_seconds_total": self._busy_seconds}


if __name__ == "__main__":
    process.main(RewardModelService)
