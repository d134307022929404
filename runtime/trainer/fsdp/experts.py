"""The experts of a policy under training: replayed as the rollout's tokens took them, balanced, and counted.

B rows, T packed tokens; L layers with E experts, of which a token takes k.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from runtime.config import Moe
from runtime.models.experts import watch_routers
from runtime.models.families.shape import ExpertShape
from runtime.trainer.backend import MicroBatch
from runtime.trainer.fsdp import sharding
from runtime.trainer.statistics import StepStatistics


class WatchedExperts:
    """`replay` before each pass of a model, `balance` behind it, `report` before an update and `correct` with it."""

    def __init__(self, model: Any, shape: ExpertShape, moe: Moe):
        self._moe, self._shape = moe, shape
        self._blocks = watch_routers(model, moe.losses)
        if len(self._blocks) != len(shape.layers):
            raise ValueError(f"{len(self._blocks)} blocks of experts are watched, the model has {len(shape.layers)}")
        self.clear()

    def clear(self) -> None:
        """Forget the passes since the last update."""
        self._loads: torch.Tensor | None = None  # [L, E], tokens
        for _, watch in self._blocks:
            watch.taken = watch.logits = watch.chosen = watch.own = None

    def replay(self, batch: MicroBatch) -> None:
        for layer, (_, watch) in enumerate(self._blocks):
            watch.taken = None if batch.experts is None else batch.experts[:, layer].long()

    def balance(self, batch: MicroBatch, statistics: StepStatistics) -> torch.Tensor | None:
        """What is to be added to the loss of each token of a row, [B, 1]; None for nothing."""
        there = float(len(batch.samples) > 0)  # else its one token is nobody's
        count, size = self._shape.count, statistics.dtype
        loads = [
            torch.bincount(watch.chosen.flatten(), minlength=count) for _, watch in self._blocks if watch.chosen is not None
        ]
        added = torch.stack(loads).to(size) * there
        self._loads = added if self._loads is None else self._loads + added
        if self._moe.replay == "routing":
            tokens = there * batch.input_ids.shape[1] * len(self._blocks)
            statistics.mean(
                "moe/routing_differs", there * sum(_differ(watch.chosen, watch.own) for _, watch in self._blocks), tokens
            )
        if not self._moe.losses:
            return None
        found = torch.zeros(len(batch.mask), 1, device=added.device)
        share = shares_of_rows(batch)
        for name, coefficient in (("aux_loss", self._moe.aux_loss), ("z_loss", self._moe.z_loss)):
            if coefficient:
                each = [self._loss(name, share, watch.logits, watch.chosen) for _, watch in self._blocks]
                total = torch.stack(each).sum(0)
                rows = there * len(batch.samples)
                statistics.mean(f"moe/{name}", there * total.detach().sum() / len(self._blocks), rows)
                found = found + coefficient * total[:, None]
        return found

    def _loss(self, name: str, share: torch.Tensor, logits: Any, chosen: Any) -> torch.Tensor:
        if name == "z_loss":
            return z_loss(logits.float(), share)
        return balance_loss(logits.float(), chosen, share, sigmoid=self._shape.corrected)

    def report(self, statistics: StepStatistics, world_size: int) -> None:
        """Loads over all ranks. Collective."""
        if self._loads is None:
            self._loads = torch.zeros(len(self._blocks), self._shape.count, dtype=statistics.dtype, device=statistics.device)
        self._loads = sharding.batch_sum(self._loads, self._loads.device, world_size)
        there = float(self._loads.sum() > 0)
        part = self._loads / self._loads.sum(1, keepdim=True).clamp(min=1)
        statistics.mean("moe/load_max", there * (part.amax(1) * self._shape.count).mean(), there)
        entropy = torch.special.entr(part).sum(1) / np.log(max(2, self._shape.count))
        statistics.mean("moe/load_entropy", there * entropy.mean(), there)
        statistics.mean("moe/idle_experts", there * (part == 0).to(part).mean(), there)

    @torch.no_grad()
    def correct(self) -> None:
        """DeepSeek-V3's balance without a loss (arXiv:2412.19437, section 2.1.2): what corrects the scores of an expert rises
        by `moe.bias_update` where its load is less than the mean, and falls by it where it is more."""
        if self._moe.bias_update and self._loads is not None:
            for (block, _), load in zip(self._blocks, self._loads, strict=True):
                block.gate.e_score_correction_bias += self._moe.bias_update * torch.sign(load.mean() - load)


def _differ(chosen: Any, own: Any) -> torch.Tensor:
    """How many tokens have one set of experts in `chosen`, and another in `own`, [T, k] both."""
    return (chosen.sort(-1).values != own.sort(-1).values).any(-1).sum()


def shares_of_rows(batch: MicroBatch) -> torch.Tensor:
    """float32 [B, T]: 1 / (tokens of the row) where a token is one of the row's, those that it shares included."""
    lengths = batch.sequences[:, 1] + batch.sequences[:, 2]
    row = np.repeat(np.arange(len(lengths)), lengths)
    share = np.zeros((len(lengths), batch.input_ids.shape[1]), np.float32)
    share[row, batch.paths] = (1 / lengths)[row]
    return torch.from_numpy(share).to(batch.input_ids.device)


def balance_loss(logits: torch.Tensor, chosen: torch.Tensor, share: torch.Tensor, *, sigmoid: bool) -> torch.Tensor:
    """E · Σ_i f_i · P_i of each row, [B]: f_i is expert i's share of what its tokens chose, P_i its mean probability; 1 where
    all is balanced (Switch Transformer, arXiv:2101.03961, equations 4 to 6; by rows as DeepSeek-V3 has it, arXiv:2412.19437,
    equations 17 to 20). `logits` [T, E], `chosen` [T, k], `share` as of `shares_of_rows`; probabilities are the softmax, or
    with `sigmoid` sigmoids over their sum."""
    scores = torch.sigmoid(logits) if sigmoid else torch.softmax(logits, -1)
    probability = scores / scores.sum(-1, keepdim=True)
    picks = torch.zeros_like(logits).scatter_(1, chosen, 1.0 / chosen.shape[1])
    return logits.shape[1] * ((share @ picks) * (share @ probability)).sum(1)


def z_loss(logits: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """[B]: the mean over a row's tokens of (log Σ exp `logits`)² (ST-MoE, arXiv:2202.08906, equation 5)."""
    return share @ torch.logsumexp(logits, -1).square()
