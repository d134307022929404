"""The embedded training engine of the critic: what `train_torch` does for the policy, for one value a token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from runtime.algorithms.value_losses import clipped_value_loss
from runtime.chosen_algorithm import choose
from runtime.config import Config
from runtime.engines import train_model, train_rows, value_model
from runtime.engines.train_base import CriticEngine
from runtime.engines.train_batch import Columns, MicroBatch
from runtime.engines.train_model import Placement
from runtime.engines.train_rows import Needs, Rows
from runtime.engines.update_torch import TorchUpdateEngine
from runtime.types import ValueRequest, Values

METRICS = "critic/"


class TorchCriticEngine(TorchUpdateEngine, CriticEngine):
    """Learns the value targets of the advantage estimator by the clipped value loss, averaged over all tokens of the step.

    The value of a token is that of the state before it: the model's output at the token that predicts it.
    """

    role = "critic"
    averaged = "critic/vf_loss"

    def __init__(self, config: Config, *, rank: int = 0, world_size: int = 1, device: torch.device | str = "cpu"):
        """Load the model of `config.critic.path`, or the policy's. Raises UserError for what the folder gets wrong."""
        assert config.critic is not None
        placement = Placement(rank, world_size, torch.device(device))
        compute = train_model.compute_dtype(config, placement.device)
        self._clip = config.critic.value_clip or float("inf")
        self._source = config.critic.path or config.model.path
        model = value_model.load_critic(self._source)
        train_model.place(model, config.services.critic, "services.critic", compute, placement)
        reference = config.algorithm.kl_coefficient != 0 and config.algorithm.kl_placement == "reward"
        needs = Needs(reference=reference, values=choose(config).advantage.needs_values)
        super().__init__(config, model, config.critic.optimizer, needs, compute, placement)

    def _columns(self, rows: Rows) -> tuple[Columns, np.ndarray]:
        assert rows.values is not None
        targets = self._advantages.value_targets(rows, self._kl_control.coefficient, self._statistics)
        self._statistics.mean("response_length/mean", float(rows.length.sum()), float(len(rows.length)))
        return {"targets": targets, "recorded": rows.values * rows.mask}, np.ones(len(rows.length), bool)

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

    def _numbers(self, batch: MicroBatch, outputs: torch.Tensor) -> torch.Tensor:
        return outputs

    def _loss(self, batch: MicroBatch, outputs: torch.Tensor) -> torch.Tensor:
        values, tokens = batch.grid(outputs), batch.mask.sum()
        targets = batch.columns["targets"]
        losses, clipped = clipped_value_loss(values, batch.columns["recorded"], targets, self._clip)
        loss = (losses * batch.mask).sum()
        for name, each in (
            ("vf_loss", losses),
            ("vf_clipfrac", clipped),
            ("values/mean", values),
            ("returns/mean", targets),
            ("vf_error", (values - targets).square()),
        ):
            self._statistics.mean(METRICS + name, (each.detach() * batch.mask).sum(), tokens)
        return loss

    def _close_step(self) -> dict[str, float]:
        metrics = super()._close_step()
        metrics |= {METRICS + name: metrics[name] for name in ("lr", "grad_norm", "skipped_updates") if name in metrics}
        return {name: value for name, value in metrics.items() if name.startswith(METRICS)}

    def values(self, groups: Sequence[ValueRequest]) -> list[Values]:
        rows = train_rows.decode_samples(groups, self._vocab_size)
        flat = self._forward_only(rows)
        ends = np.cumsum(np.bincount(rows.group, weights=rows.length, minlength=len(groups)).astype(np.int64))
        parts = np.split(flat, ends[:-1]) if groups else []
        return [Values(group_id=group.group_id, values=part) for group, part in zip(groups, parts, strict=True)]

    def save(self, folder: str) -> None:
        super().save(folder)
        if self._rank == 0:
            value_model.describe(Path(folder) / "model", self._model.architecture)
