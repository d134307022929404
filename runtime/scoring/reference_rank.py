"""One rank of a reference that is sharded over several: log-probabilities of its share of the groups."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist

from runtime import types
from runtime.cluster.topology import reference_takes_part
from runtime.commands import ComputeLogprobs, Offload, Onload
from runtime.config import Config
from runtime.process import platform
from runtime.scoring.scorer_torch import OffloadableScorer, replayed, score
from runtime.trainer.backend import RankInfo, micro_batches
from runtime.trainer.micro_batch import Columns, MicroBatch
from runtime.trainer.rank import GroupRank
from runtime.trainer.rank_group import join_group, require_memory
from runtime.trainer.rows import Rows
from runtime.types import LogprobRequest, Logprobs


class MegatronScorer:
    """The scorer of a frozen model on megatron-core, without gradients and optimizer. Every block of ranks that holds the model
    has its own share of the requests: the share of its first rank."""

    def __init__(self, config: Config, world_size: int, device: torch.device):
        """Load the reference's model. Raises UserError if the configuration or the folder is wrong."""
        from runtime.trainer.megatron import facade

        facade.prepare(device)  # before any other import of megatron-core
        from runtime.trainer.megatron.grid import ProcessGrid
        from runtime.trainer.megatron.passes import MegatronPasses

        settings = config.services.reference
        source = config.model.reference or config.model.path
        compute = platform.resolve_dtype(settings.dtype, device, config.model.dtype)
        self._grid = ProcessGrid(settings, device, config.run.seed, config.deadlines.score)
        self._passes = MegatronPasses(source, settings, compute, self._grid, value_head=False)
        self._routes = replayed(config, source)
        if self._routes is not None:
            self._passes.watch_experts(config.moe, replays=True)
        self._budget = settings.max_tokens_per_microbatch
        self._rank_info, self.device = RankInfo(dist.get_rank(), world_size, device), device
        self.weights: Iterable[torch.Tensor] = self._passes.model.eval().requires_grad_(False).parameters()

    def logprobs(self, requests: Sequence[LogprobRequest]) -> list[Logprobs]:
        """Return `score` of this block's requests on the block's first rank; on its other ranks nothing. Collective."""
        shared = types.decode(list[LogprobRequest], self._grid.bytes_of_leader(types.encode(list(requests))))
        found = score(shared, self._passes.shape.vocab_size, self._infer, self._routes)
        return found if self._grid.leads else []

    def _infer(self, rows: Rows, columns: Columns) -> Iterator[tuple[MicroBatch, torch.Tensor]]:
        routed = self._passes.routed
        batches = micro_batches(rows, rows.trained(), columns, self._budget, self._rank_info, routed=routed)
        return self._passes.infer(batches, lambda batch, outputs: self._passes.token_logprobs(outputs, batch)[0])


class ReferenceRank(GroupRank):
    role = "reference"

    def __init__(self, scorer: MegatronScorer, config: Config, rank: int, world_size: int):
        super().__init__(config, rank, world_size)
        self._scorer = OffloadableScorer(scorer, away=reference_takes_part(config))

    def compute_logprobs(self, command: ComputeLogprobs) -> list[bytes]:
        """Return the encoded Logprobs of this rank's groups, in their order."""
        return [types.encode(logprobs) for logprobs in self._scorer.logprobs(command.groups)]

    def offload(self, command: Onload | Offload) -> None:
        self._scorer.handle(command)

    onload = offload


def make(config: Config, rank: int, world_size: int) -> ReferenceRank:
    """Join the group if there are several ranks, and build this rank's scorer. Raises UserError for a bad model."""
    device = join_group("reference", config.services.reference, world_size, config.deadlines.score)
    require_memory("reference", config, config.model.reference or config.model.path, device)
    return ReferenceRank(MegatronScorer(config, world_size, device), config, rank, world_size)
