"""What training the critic means, whatever kind of model it is: the value loss on the samples of a step, and values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from runtime.algorithms.losses import clipped_value_loss
from runtime.chosen_algorithm import choose
from runtime.config import Config
from runtime.trainer import rows as train_rows
from runtime.trainer.batch import Columns, MicroBatch
from runtime.trainer.engine import CriticEngine
from runtime.trainer.loop import UpdateLoop
from runtime.trainer.rows import Needs, Rows
from runtime.types import ValueRequest, Values

METRICS = "critic/"


class CriticLoop(UpdateLoop, CriticEngine):
    """Learns the value targets of the advantage estimator by the clipped value loss, averaged over all tokens of the step.

    The value of a token is that of the state before it: the model's output at the token that predicts it. The outputs of its
    model are these values, float32 [N].
    """

    role = "critic"
    averaged = "critic/vf_loss"
    _clip: float  # how far a value may move from the recorded one

    def _columns(self, rows: Rows) -> tuple[Columns, np.ndarray]:
        assert rows.values is not None
        targets = self._advantages.value_targets(rows, self._kl_control.coefficient, self._statistics)
        self._statistics.mean("response_length/mean", float(rows.length.sum()), float(len(rows.length)))
        return {"targets": targets, "recorded": rows.values * rows.mask}, np.ones(len(rows.length), bool)

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
        counted = batch.mask != 0
        for name, each in (("values", values.detach()), ("returns", targets)):
            self._statistics.maximum(f"{METRICS}{name}/max", each.masked_fill(~counted, -torch.inf).max())
            self._statistics.minimum(f"{METRICS}{name}/min", each.masked_fill(~counted, torch.inf).min())
        return loss

    def _close_step(self) -> dict[str, float]:
        metrics = super()._close_step()
        metrics |= {METRICS + name: metrics[name] for name in ("lr", "grad_norm", "skipped_updates") if name in metrics}
        return {name: value for name, value in metrics.items() if name.startswith(METRICS)}

    def values(self, groups: Sequence[ValueRequest]) -> list[Values]:
        rows = train_rows.decode_samples(groups, self._vocab_size)
        parts = rows.by_group(self._forward_only(rows))
        return [Values(group_id=group.group_id, values=part) for group, part in zip(groups, parts, strict=True)]


def needs(config: Config) -> Needs:
    """What a critic takes besides samples and rewards."""
    reference = config.algorithm.kl_coefficient != 0 and config.algorithm.kl_placement == "reward"
    return Needs(reference=reference, values=choose(config).advantage.needs_values)
