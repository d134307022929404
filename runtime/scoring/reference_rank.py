"""One rank of a reference that is spread over several: log-probabilities of its share of the groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime import codec
from runtime.cluster.topology import reference_takes_part
from runtime.commands import ComputeLogprobs, Offload, Onload
from runtime.config import Config
from runtime.scoring.scorer_torch import OffloadableScorer
from runtime.trainer.backend import use_megatron
from runtime.trainer.rank import GroupRank, join_group, require_memory

if TYPE_CHECKING:
    from runtime.scoring.scorer_megatron import MegatronScorer


class ReferenceRank(GroupRank):
    role = "reference"

    def __init__(self, scorer: MegatronScorer, config: Config, rank: int, world_size: int):
        super().__init__(config, rank, world_size)
        self._scorer = OffloadableScorer(scorer, away=reference_takes_part(config))

    def compute_logprobs(self, command: ComputeLogprobs) -> list[bytes]:
        """The encoded Logprobs of this rank's groups, in their order."""
        return [codec.encode(logprobs) for logprobs in self._scorer.logprobs(command.groups)]

    def onload(self, command: Onload) -> None:
        self._scorer.handle(command)

    def offload(self, command: Offload) -> None:
        self._scorer.handle(command)


def make(config: Config, rank: int, world_size: int) -> ReferenceRank:
    """Build this rank's scorer; with several ranks, join its group first. Raises UserError for a bad model."""
    device = join_group("reference", config.services.reference, world_size, config.deadlines.score)
    require_memory("reference", config, config.model.reference or config.model.path, device)
    use_megatron(config.services.reference, device)
    from runtime.scoring.scorer_megatron import MegatronScorer

    return ReferenceRank(MegatronScorer(config, world_size, device), config, rank, world_size)
