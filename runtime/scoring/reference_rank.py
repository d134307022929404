"""One rank of a reference that is spread over several: log-probabilities of its share of the groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from runtime import codec
from runtime.cluster.topology import reference_takes_part
from runtime.commands import ComputeLogprobs, Offload, Onload
from runtime.config import Config
from runtime.errors import InvalidMessage
from runtime.scoring.offloadable_scorer import OffloadableScorer
from runtime.trainer.backend import use_megatron
from runtime.trainer.group_rank import GroupRank, join_group, require_memory

if TYPE_CHECKING:
    from runtime.scoring.scorer_megatron import MegatronScorer


class ReferenceRank(GroupRank):
    role = "reference"
    relayed = ComputeLogprobs | Onload | Offload

    def __init__(self, scorer: MegatronScorer, config: Config, rank: int, world_size: int):
        super().__init__(config, rank, world_size, config.deadlines.score)
        self._scorer = OffloadableScorer(scorer, away=reference_takes_part(config))

    def execute(self, command: Any) -> Any:
        """The encoded Logprobs of this rank's groups, in their order."""
        if isinstance(command, (Onload, Offload)):
            self._scorer.handle(command)
            return None
        if not isinstance(command, ComputeLogprobs):
            raise InvalidMessage(f"a {self.role} takes no {type(command).__name__}")
        return [codec.encode(logprobs) for logprobs in self._scorer.logprobs(command.groups)]


def make(config: Config, rank: int, world_size: int) -> ReferenceRank:
    """Build this rank's scorer; with several ranks, join torchrun's default group first. Raises UserError for a bad model."""
    device = join_group("reference", config.services.reference, world_size, config.deadlines.score)
    require_memory("reference", config, config.model.reference or config.model.path, device)
    use_megatron(config.services.reference, device)
    from runtime.scoring.scorer_megatron import MegatronScorer

    return ReferenceRank(MegatronScorer(config, world_size, device), config, rank, world_size)
