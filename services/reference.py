"""The reference role: log-probabilities of a frozen model. `python -m services.reference`, alone or as a rank.

On torch each process is a replica of its own; on megatron-core the ranks are one group that shares the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from runtime import types
from runtime.cluster.topology import reference_takes_part, teachers
from runtime.config import Config
from runtime.errors import InvalidMessage
from runtime.types import LogprobRequest
from services import process
from services.model_service import FrozenModelService, SpmdService

if TYPE_CHECKING:
    from runtime.scoring.reference_rank import ReferenceRank
    from runtime.scoring.scorer_torch import OffloadableScorer


class ReferenceService(FrozenModelService):
    """One replica. It loads the configured models, never a checkpoint: the run's reference, and teachers of data sources."""

    role = "reference"
    libraries = process.TORCH

    _scorers: dict[str, OffloadableScorer]  # by the model's name in a request

    def load(self) -> None:
        from runtime.models.families import FAMILIES
        from runtime.models.hf_folder import read_raw
        from runtime.process import platform
        from runtime.scoring.scorer_torch import OffloadableScorer, PolicyScorer, TorchScorer

        device, model = platform.device(), self.config.model
        settings, away = self.config.services.reference, reference_takes_part(self.config)
        dtype, budget = platform.resolve_dtype(settings.dtype, device, model.dtype), settings.max_tokens_per_microbatch

        def load(folder: str) -> OffloadableScorer:
            make = TorchScorer if read_raw(folder).get("model_type") in FAMILIES else PolicyScorer
            scorer = make(folder, device=device, dtype=dtype, max_tokens_per_microbatch=budget)
            return OffloadableScorer(scorer, away)

        self._scorers = {"": load(model.reference or model.path)}
        self._scorers |= {folder: load(folder) for folder in {*teachers(self.config).values()}}

    def answers(self, requests: Sequence[Any]) -> list[bytes | None]:
        """Answer in order. Adjacent requests for log-probabilities are computed together."""
        out: list[bytes | None] = []
        for asked, alike in groupby(requests, lambda request: isinstance(request, LogprobRequest)):
            together = list(alike)
            if asked:
                out += self._logprobs(together)
            else:
                for command in together:
                    for scorer in self._scorers.values():
                        scorer.handle(command)
                out += [None] * len(together)
        return out

    def _logprobs(self, requests: Sequence[LogprobRequest]) -> list[bytes]:
        """Compute log-probabilities, in the order of the requests. Raises InvalidMessage for a model that is not loaded."""
        found: dict[int, bytes] = {}
        for model in {request.model for request in requests}:
            if model not in self._scorers:
                raise InvalidMessage(f"model {model!r} is not one of {list(self._scorers)}")
            own = [at for at, request in enumerate(requests) if request.model == model]
            answers = self._scorers[model].logprobs([requests[at] for at in own])
            found |= zip(own, map(types.encode, answers), strict=True)
        return [found[at] for at in range(len(requests))]


def make_rank(config: Config, rank: int, world_size: int) -> ReferenceRank:
    from runtime.scoring import reference_rank

    return reference_rank.make(config, rank, world_size)


def make(config: Config, name: str, rank: int) -> process.Service:
    if config.services.reference.engine == "torch":
        return ReferenceService(config, name, rank)
    return SpmdService("reference", make_rank, config, name, rank)


if __name__ == "__main__":
    process.main(make)
