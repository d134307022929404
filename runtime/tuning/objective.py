"""What supervised training learns: the likelihood of what the assistant wrote. It trains by the same steps and on the same
engines as reinforcement learning does (`runtime.trainer.step`), with groups that somebody else wrote."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from runtime import codec
from runtime.config import Config
from runtime.trainer.backend import ModelBackend, RankInfo
from runtime.trainer.micro_batch import MicroBatch
from runtime.trainer.objective import Objective
from runtime.trainer.rows import Needs, Rows
from runtime.trainer.statistics import StepStatistics
from runtime.trainer.step import ModelTrainer, model_trainer
from runtime.tuning.conversations import TaughtRow
from runtime.types import GroupPayload, Sample, TrainGroup

PREFIX = "tune/"


class SupervisedObjective(Objective):
    """`-log π(y_t | y_<t)`, the mean over all taught tokens of the step: the cross-entropy, in nats a token."""

    role = "trainer"
    averaged = f"{PREFIX}loss"

    def __init__(self, config: Config, backend: ModelBackend):
        super().__init__(config, backend)
        self._backend = backend
        self.needs = Needs()

    def columns(self, rows: Rows, step: int, statistics: StepStatistics) -> tuple[dict[str, np.ndarray], np.ndarray]:
        statistics.total(f"{PREFIX}tokens", float(rows.mask.sum()))
        return {}, np.ones(len(rows.length), bool)

    def per_token_output(self, batch: MicroBatch, outputs: torch.Tensor) -> torch.Tensor:
        return self._backend.token_logprobs(outputs, batch, 1.0, entropy_gradient=False)[0]

    def loss(self, batch: MicroBatch, outputs: torch.Tensor, statistics: StepStatistics) -> torch.Tensor:
        total = -(batch.grid(self.per_token_output(batch, outputs)) * batch.mask).sum()
        statistics.mean(self.averaged, total.detach(), batch.mask.sum())
        return total

    def named(self, metrics: dict[str, float]) -> dict[str, float]:
        own = ("lr", "grad_norm")
        return {PREFIX + name if name in own else name: value for name, value in metrics.items()}


def supervised_trainer(
    config: Config, *, rank: int = 0, world_size: int = 1, device: torch.device | str = "cpu"
) -> ModelTrainer:
    """The policy of `model.path` under supervision; otherwise as `policy_trainer`."""
    return model_trainer(SupervisedObjective, config, RankInfo(rank, world_size, torch.device(device)))


def taught_group(number: int, rows: Sequence[TaughtRow], shared: int) -> TrainGroup:
    """Rows whose first `shared` tokens are the same, of which none is taught: they are computed once."""
    samples = [
        Sample(
            tokens=row.tokens[shared:],
            loss_mask=row.mask[shared:].astype(np.uint8),
            logprobs=np.zeros(len(row.tokens) - shared, np.float32),
            versions=np.zeros(len(row.tokens) - shared, np.int64),
            finish_reason="stop",
        )
        for row in rows
    ]
    return TrainGroup(
        group_id=number,
        tokens=sum(len(row.tokens) for row in rows),
        rewards=np.zeros(len(rows), np.float32),
        valid=np.ones(len(rows), np.uint8),
        payload=codec.encode(GroupPayload.of(number, rows[0].tokens[:shared], samples)),
    )
