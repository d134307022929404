"""The reference role: log-probabilities of a frozen model. `python -m services.reference`, or under torchrun.

On torch each process is a replica of its own; on megatron-core the ranks are one group that shares the model.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import TYPE_CHECKING, TypeVar

from runtime import codec
from runtime.actor import Letter
from runtime.cluster.topology import reference_takes_part
from runtime.commands import Offload, Onload
from runtime.config import Config
from services import process
from services.spmd_service import Follower, Leader, SpmdRole

if TYPE_CHECKING:
    from runtime.engines.lent_scorer import LentScorer
    from runtime.engines.reference_rank import ReferenceRank

A = TypeVar("A")
T = TypeVar("T")


class ReferenceService(process.Service):
    """A replica: everything that lies in the mailbox is scored in one go. It always loads its own model, never a checkpoint."""

    role = "reference"
    service = "Reference"
    batch = 256
    libraries = process.TORCH

    def __init__(self, config: Config, name: str, rank: int):
        super().__init__(config, name, rank)
        self._scorer: LentScorer
        self._thread = ThreadPoolExecutor(1, "scorer")
        self._busy_seconds = 0.0
        self._groups = 0

    def load(self) -> None:
        from runtime import platform
        from runtime.engines.lent_scorer import LentScorer
        from runtime.engines.scorer_torch import TorchScorer

        device = platform.device()
        settings = self.config.services.reference
        scorer = TorchScorer(
            self.config.model.reference or self.config.model.path,
            device=device,
            dtype=platform.resolve_dtype(settings.dtype, device),
            max_tokens_per_microbatch=settings.max_tokens_per_microbatch,
        )
        self._scorer = LentScorer(scorer, away=reference_takes_part(self.config))

    async def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def receive(self, letters: Sequence[Letter]) -> None:
        """In order: log-probabilities that are asked for one after the other are computed together."""
        for moves, alike in groupby(letters, lambda letter: isinstance(letter.message, (Onload, Offload))):
            together = list(alike)
            await (self._move(together) if moves else self._score(together))

    async def _move(self, letters: Sequence[Letter]) -> None:
        for letter in letters:
            await self._in_thread(self._scorer.handle, letter.message)
            letter.reply()

    async def _score(self, letters: Sequence[Letter]) -> None:
        before = time.monotonic()
        requests = [letter.message for letter in letters]
        for letter, logprobs in zip(letters, await self._in_thread(self._scorer.logprobs, requests), strict=True):
            letter.reply(codec.encode(logprobs))
        self._groups += len(letters)
        self._busy_seconds += time.monotonic() - before

    async def _in_thread(self, work: Callable[[A], T], argument: A) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, argument)

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
