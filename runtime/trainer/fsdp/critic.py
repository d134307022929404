"""The embedded training engine of the critic: what `train_torch` does for the policy, for one value a token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from runtime.config import Config
from runtime.models import value_model
from runtime.trainer import critic
from runtime.trainer import model as train_model
from runtime.trainer.batch import MicroBatch
from runtime.trainer.critic import CriticLoop
from runtime.trainer.fsdp.update import TorchUpdateEngine
from runtime.trainer.model import RankPlace


class TorchCriticEngine(TorchUpdateEngine, CriticLoop):
    def __init__(self, config: Config, *, rank: int = 0, world_size: int = 1, device: torch.device | str = "cpu"):
        """Load the model of `config.critic.path`, or the policy's. Raises UserError for what the folder gets wrong."""
        assert config.critic is not None
        rank_place = RankPlace(rank, world_size, torch.device(device))
        compute = train_model.compute_dtype(config, rank_place.device)
        self._clip = config.critic.value_clip or float("inf")
        self._source = config.critic.path or config.model.path
        model = value_model.load_critic(self._source)
        train_model.place(model, config.services.critic, "services.critic", compute, rank_place)
        super().__init__(config, model, config.critic.optimizer, critic.needs(config), compute, rank_place)

    def _forward(self, batch: MicroBatch) -> torch.Tensor:
        """[N]"""
        with self._precision():
            values: torch.Tensor = self._model(
                input_ids=batch.input_ids,
                position_ids=batch.position_ids,
                packing=batch.packing,
                keep=batch.predictors,
            )
        return values.float()

    def begin_save(self, folder: str) -> Callable[[], None]:
        write = super().begin_save(folder)

        def write_described() -> None:
            write()
            if self._rank == 0:
                value_model.describe(Path(folder) / "model", self._model.architecture)

        return write_described
