"""One rank of the critic group: besides the steps, it computes values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from runtime import codec
from runtime.cluster.topology import alternates
from runtime.commands import Accumulate, Apply, BeginStep, ComputeValues, Offload, Onload, Restore, Save
from runtime.config import Config
from runtime.ledger import checkpoint
from runtime.trainer.engine import CriticEngine
from runtime.trainer.group_rank import join_group, require_memory, use_megatron
from runtime.trainer.update_rank import UpdateRank


class CriticRank(UpdateRank[CriticEngine]):
    role = "critic"
    relayed = Restore | BeginStep | Accumulate | Apply | ComputeValues | Save | Onload | Offload
    last = Apply
    seconds_of = {  # noqa: RUF012
        "onload": "timing/critic_onload",
        "offload": "timing/critic_offload",
        "save": "timing/critic_save",
    }

    def __init__(self, engine: CriticEngine, config: Config, rank: int, world_size: int):
        super().__init__(engine, config, rank, world_size, alternates(config))

    def state(self, folder: Path) -> Path:
        return checkpoint.critic_state(folder)

    def execute(self, command: Any) -> Any:
        """Of ComputeValues, the encoded Values of this rank's groups, in their order."""
        if isinstance(command, ComputeValues):
            return [codec.encode(values) for values in self.engine.values(command.groups)]
        return super().execute(command)


def make(config: Config, rank: int, world_size: int) -> CriticRank:
    """Build this rank's engine; with several ranks, join torchrun's default group first. Raises UserError for a bad model."""
    device = join_group("critic", config.services.critic, world_size, config.deadlines.train)
    assert config.critic is not None
    require_memory("critic", config, config.critic.path or config.model.path, device)
    engine = engine_type(config, device)(config, rank=rank, world_size=world_size, device=device)
    return CriticRank(engine, config, rank, world_size)


def engine_type(config: Config, device: torch.device) -> Callable[..., CriticEngine]:
    """Raises UserError when the engine's package is missing."""
    if use_megatron(config.services.critic, device):
        from runtime.trainer.megatron.critic import MegatronCriticEngine

        return MegatronCriticEngine
    from runtime.trainer.fsdp.critic import TorchCriticEngine

    return TorchCriticEngine
