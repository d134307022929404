"""One rank of the critic group: besides the steps, it computes values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from runtime import codec
from runtime.cluster.topology import alternates
from runtime.commands import Apply, ComputeValues
from runtime.config import Config
from runtime.ledger import checkpoint
from runtime.trainer.group_rank import join_group, require_memory
from runtime.trainer.step import ModelTrainer, critic_trainer
from runtime.trainer.update_rank import UpdateRank


class CriticRank(UpdateRank):
    role = "critic"
    last = Apply
    seconds_of = {  # noqa: RUF012
        "onload": "timing/critic_onload",
        "offload": "timing/critic_offload",
        "save": "timing/critic_save",
    }

    def __init__(self, engine: ModelTrainer, config: Config, rank: int, world_size: int):
        super().__init__(engine, config, rank, world_size, alternates(config))

    def state(self, folder: Path) -> Path:
        return checkpoint.critic_state(folder)

    def execute(self, command: Any) -> Any:
        """Values need nothing of what is away between steps."""
        return self.compute_values(command) if isinstance(command, ComputeValues) else super().execute(command)

    def compute_values(self, command: ComputeValues) -> list[bytes]:
        """The encoded Values of this rank's groups, in their order."""
        return [codec.encode(values) for values in self.engine.values(command.groups)]


def make(config: Config, rank: int, world_size: int) -> CriticRank:
    """Build this rank's engine; with several ranks, join torchrun's default group first. Raises UserError for a bad model."""
    device = join_group("critic", config.services.critic, world_size, config.deadlines.train)
    assert config.critic is not None
    require_memory("critic", config, config.critic.path or config.model.path, device)
    engine = critic_trainer(config, rank=rank, world_size=world_size, device=device)
    return CriticRank(engine, config, rank, world_size)
