"""The training engine of the critic on megatron-core: what `train_megatron` does for the policy, for one value a token."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runtime import codec
from runtime.config import Config
from runtime.trainer import critic
from runtime.trainer import model as train_model
from runtime.trainer.critic import CriticLoop
from runtime.trainer.megatron.update import MegatronUpdateEngine
from runtime.trainer.model import RankPlace
from runtime.types import ValueRequest, Values


class MegatronCriticEngine(MegatronUpdateEngine, CriticLoop):
    """`megatron.facade.prepare` has been called in this process."""

    def __init__(self, config: Config, *, rank: int = 0, world_size: int = 1, device: torch.device | str = "cpu"):
        """Load the model of `config.critic.path`, or the policy's. Raises UserError for what the folder gets wrong."""
        assert config.critic is not None
        rank_place = RankPlace(rank, world_size, torch.device(device))
        compute = train_model.compute_dtype(config, rank_place.device)
        self._clip = config.critic.value_clip or float("inf")
        source, options = config.critic.path or config.model.path, config.critic.optimizer
        needs = critic.needs(config)
        super().__init__(config, source, config.services.critic, options, needs, compute, rank_place, value_head=True)

    def values(self, groups: Sequence[ValueRequest]) -> list[Values]:
        shared = codec.decode(list[ValueRequest], self._grid.bytes_of_leader(codec.encode(list(groups))))
        values = super().values(shared)
        return values if self._grid.leads else []
