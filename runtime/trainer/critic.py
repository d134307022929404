"""What the critic learns, whatever its backend: the value loss on the samples of a step."""

from __future__ import annotations

import numpy as np
import torch

from runtime.algorithms.losses import clipped_value_loss
from runtime.config import Config
from runtime.trainer.backend import ModelBackend
from runtime.trainer.batch import MicroBatch
from runtime.trainer.objective import Objective
from runtime.trainer.rows import Needs, Rows
from runtime.trainer.statistics import StepStatistics

METRICS = "critic/"


class CriticObjective(Objective):
    """Learns the value targets of the advantage estimator by the clipped value loss, averaged over all tokens of the step.

    The value of a token is that of the state before it: the model's output at the token that predicts it. The outputs of its
    model are these values, float32 [N].
    """

    role = "critic"
    averaged = "critic/vf_loss"

    def __init__(self, config: Config, backend: ModelBackend):
        super().__init__(config, backend)
        assert config.critic is not None
        self._clip = config.critic.value_clip or float("inf")  # how far a value may move from the recorded one
        reference = config.algorithm.kl_coefficient != 0 and config.algorithm.kl_placement == "reward"
        self.needs = Needs(reference=reference, values=self._algorithm.advantage.needs_values)

    def columns(self, rows: Rows, step: int, statistics: StepStatistics) -> tuple[dict[str, np.ndarray], np.ndarray]:
        assert rows.values is not None
        targets = self.advantages.value_targets(rows, self.kl_control.coefficient, statistics)
        statistics.mean("response_length/mean", float(rows.length.sum()), float(len(rows.length)))
        return {"targets": targets, "recorded": rows.values * rows.mask}, np.ones(len(rows.length), bool)

    def per_token_output(self, batch: MicroBatch, outputs: torch.Tensor) -> torch.Tensor:
        return outputs

    def loss(self, batch: MicroBatch, outputs: torch.Tensor, statistics: StepStatistics) -> torch.Tensor:
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
            statistics.mean(METRICS + name, (each.detach() * batch.mask).sum(), tokens)
        counted = batch.mask != 0
        for name, each in (("values", values.detach()), ("returns", targets)):
            statistics.maximum(f"{METRICS}{name}/max", each.masked_fill(~counted, -torch.inf).max())
            statistics.minimum(f"{METRICS}{name}/min", each.masked_fill(~counted, torch.inf).min())
        return loss

    def named(self, metrics: dict[str, float]) -> dict[str, float]:
        metrics |= {METRICS + name: metrics[name] for name in ("lr", "grad_norm", "skipped_updates") if name in metrics}
        return {name: value for name, value in metrics.items() if name.startswith(METRICS)}
