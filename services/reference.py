"""The reference role: log-probabilities of a frozen model. `python -m services.reference`, or under torchrun.

On torch each process is a replica of its own; on megatron-core the ranks are one group that shares the model.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from runtime import codec
from runtime.actor import Letter
from runtime.config import Config
from services import process
from services.spmd_service import Follower, Leader, SpmdRole

if TYPE_CHECKING:
    from runtime.engines.reference_rank import ReferenceRank
    from runtime.engines.scorer_torch import TorchScorer


class ReferenceService(process.Service):
    """A replica: everything that lies in the mailbox is scored in one go. It always loads its own model, never a checkpoint."""

    role = "reference"
    service = "Reference"
    batch = 256
    libraries = process.TORCH

    def __init__(self, config: Config, name: str, rank: int):
        super().__init__(config, name, rank)
        self._scorer: TorchScorer
        self._thread = ThreadPoolExecutor(1, "scorer")
        self._busy_seconds = 0.0
        self._groups = 0

    def load(self) -> None:
        from runtime import platform
        from runtime.engines.scorer_torch import TorchScorer

        device = platform.device()
        settings = self.config.services.reference
        self._scorer = TorchScorer(
            self.config.model.reference or self.config.model.path,
            device=device,
            dtype=platform.resolve_dtype(settings.dtype, device),
            max_tokens_per_microbatch=settings.max_tokens_per_microbatch,
        )

    async def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def receive(self, letters: Sequence[Letter]) -> None:
        before = time.monotonic()
        requests = [letter.message for letter in letters]
        for letter, logprobs in zip(
            letters,
            await asyncio.get_running_loop().run_in_executor(self._thread, self._scorer.logprobs, requests),
            strict=True,
        ):
            letter.reply(codec.encode(logprobs))
        self._groups += len(letters)
        self._busy_seconds += time.monotonic() - before

    def gauges(self) -> dict[str, float]:
        return {"groups_total": self._groups, "busy_seconds_total": self._busy_seconds}


def make_rank(config: Config, rank: int, world_size: int) -> ReferenceRank:
    from runtime.engines import reference_rank

    return reference_rank.make(config, rank, world_size)


ROLE = SpmdRole("reference", "ReferenceGroup", make_rank)


def make(config: Config, name: str, rank: int) -> process.Service:
    if config.services.reference.engine == "torch":
        return ReferenceService(config, name, rank)
    return Follower(ROLE, config, name, rank) if rank else Leader(ROLE, config, name, rank)


if __name__ == "__main__":
    process.main(make)
