"""The reference role: log-probabilities of a frozen model. `python -m services.reference`, alone or as a rank.

On torch each process is a replica of its own; on megatron-core the ranks are one group that shares the model."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from runtime.cluster.topology import reference_takes_part, teachers
from runtime.config import Config
from services import process
from services.model_service import FrozenModelService, SpmdService

if TYPE_CHECKING:
    from runtime.scoring.reference_rank import ReferenceRank
    from runtime.trainer.rows import Routes


class ReferenceService(FrozenModelService):
    """One replica. It loads the configured models, never a checkpoint: the run's reference, and teachers of data sources."""

    role = "reference"
    libraries = process.TORCH

    def load(self) -> None:
        from runtime.models.families import FAMILIES
        from runtime.models.hf_folder import read_raw
        from runtime.process import platform
        from runtime.scoring.scorer_torch import OffloadableScorer, PolicyScorer, TorchScorer, answers, replayed

        device, model = platform.device(), self.config.model
        settings, away = self.config.services.reference, reference_takes_part(self.config)
        dtype, budget = platform.resolve_dtype(settings.dtype, device, model.dtype), settings.max_tokens_per_microbatch

        def load(folder: str, routes: Routes | None = None) -> OffloadableScorer:
            make = TorchScorer if read_raw(folder).get("model_type") in FAMILIES else PolicyScorer
            scorer = make(folder, device=device, dtype=dtype, max_tokens_per_microbatch=budget)
            scorer.routes = routes
            return OffloadableScorer(scorer, away)

        reference = model.reference or model.path
        scorers = {"": load(reference, replayed(self.config, reference))}
        scorers |= {folder: load(folder) for folder in {*teachers(self.config).values()}}
        self.answers = partial(answers, scorers)


def make_rank(config: Config, rank: int, world_size: int) -> ReferenceRank:
    from runtime.scoring import reference_rank

    return reference_rank.make(config, rank, world_size)


def make(config: Config, name: str, rank: int) -> process.Service:
    if config.services.reference.engine == "torch":
        return ReferenceService(config, name, rank)
    return SpmdService("reference", make_rank, config, name, rank)


if __name__ == "__main__":
    process.main(make)
