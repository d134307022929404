"""The reference role: log-probabilities of a frozen model. `python -m services.reference`, or under torchrun.

On torch each process is a replica of its own; on megatron-core the ranks are one group that shares the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from runtime import codec
from runtime.actor import Request
from runtime.cluster.topology import reference_takes_part
from runtime.commands import Offload, Onload
from runtime.config import Config
from runtime.types import LogprobRequest
from services import process
from services.frozen_model import FrozenModelService
from services.spmd_service import Follower, Leader, SpmdRole

if TYPE_CHECKING:
    from runtime.scoring.offloadable_scorer import OffloadableScorer
    from runtime.scoring.reference_rank import ReferenceRank


class ReferenceService(FrozenModelService):
    """A replica. It always loads its own model, never a checkpoint."""

    role = "reference"
    service = "Reference"
    libraries = process.TORCH

    _scorer: OffloadableScorer

    def load(self) -> None:
        from runtime.process import platform
        from runtime.scoring.offloadable_scorer import OffloadableScorer
        from runtime.scoring.scorer_torch import TorchScorer

        device = platform.device()
        settings = self.config.services.reference
        scorer = TorchScorer(
            self.config.model.reference or self.config.model.path,
            device=device,
            dtype=platform.resolve_dtype(settings.dtype, device),
            max_tokens_per_microbatch=settings.max_tokens_per_microbatch,
        )
        self._scorer = OffloadableScorer(scorer, away=reference_takes_part(self.config))

    async def receive(self, requests: Sequence[Request]) -> None:
        """In order: log-probabilities that are asked for one after the other are computed together."""
        for moves, alike in groupby(requests, lambda request: isinstance(request.message, (Onload, Offload))):
            together = list(alike)
            await (self._move(together) if moves else super().receive(together))

    async def _move(self, requests: Sequence[Request]) -> None:
        for request in requests:
            await self.in_thread(self._scorer.handle, request.message)
            request.reply()

    def answers(self, requests: Sequence[LogprobRequest]) -> list[bytes]:
        return [codec.encode(logprobs) for logprobs in self._scorer.logprobs(requests)]


def make_rank(config: Config, rank: int, world_size: int) -> ReferenceRank:
    from runtime.scoring import reference_rank

    return reference_rank.make(config, rank, world_size)


ROLE = SpmdRole("reference", "ReferenceGroup", make_rank)


def make(config: Config, name: str, rank: int) -> process.Service:
    if config.services.reference.engine == "torch":
        return ReferenceService(config, name, rank)
    return Follower(ROLE, config, name, rank) if rank else Leader(ROLE, config, name, rank)


if __name__ == "__main__":
    process.main(make)
