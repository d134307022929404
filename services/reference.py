"""The reference role: log-probabilities of a frozen model. `python -m services.reference`, alone or as a rank.

On torch each process is a replica of its own; on megatron-core the ranks are one group that shares the model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from runtime import codec
from runtime.cluster.topology import reference_takes_part
from runtime.commands import Offload, Onload
from runtime.config import Config
from runtime.types import LogprobRequest
from services import process
from services.models import FrozenModelService, SpmdService

if TYPE_CHECKING:
    from runtime.scoring.reference_rank import ReferenceRank
    from runtime.scoring.scorer_torch import OffloadableScorer


class ReferenceService(FrozenModelService):
    """A replica. It always loads its own model, never a checkpoint."""

    role = "reference"
    service = "Reference"
    libraries = process.TORCH

    _scorer: OffloadableScorer

    def load(self) -> None:
        from runtime.process import platform
        from runtime.scoring.scorer_torch import OffloadableScorer, TorchScorer

        device = platform.device()
        settings = self.config.services.reference
        scorer = TorchScorer(
            self.config.model.reference or self.config.model.path,
            device=device,
            dtype=platform.resolve_dtype(settings.dtype, device),
            max_tokens_per_microbatch=settings.max_tokens_per_microbatch,
        )
        self._scorer = OffloadableScorer(scorer, away=reference_takes_part(self.config))

    def logprobs(self, request: LogprobRequest) -> asyncio.Future[bytes]:
        return self.ask(request)

    def onload(self, command: Onload) -> asyncio.Future[None]:
        return self.ask(command)

    def offload(self, command: Offload) -> asyncio.Future[None]:
        return self.ask(command)

    def answers(self, requests: Sequence[Any]) -> list[bytes | None]:
        """In order: log-probabilities that are asked for one after the other are computed together."""
        out: list[bytes | None] = []
        for asked, alike in groupby(requests, lambda request: isinstance(request, LogprobRequest)):
            together = list(alike)
            if asked:
                out += [codec.encode(logprobs) for logprobs in self._scorer.logprobs(together)]
            else:
                for command in together:
                    self._scorer.handle(command)
                out += [None] * len(together)
        return out


def make_rank(config: Config, rank: int, world_size: int) -> ReferenceRank:
    from runtime.scoring import reference_rank

    return reference_rank.make(config, rank, world_size)


def make(config: Config, name: str, rank: int) -> process.Service:
    if config.services.reference.engine == "torch":
        return ReferenceService(config, name, rank)
    return SpmdService("reference", "ReferenceGroup", make_rank, config, name, rank)


if __name__ == "__main__":
    process.main(make)
