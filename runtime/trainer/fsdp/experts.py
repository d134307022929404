"""The experts of a policy under training: replayed as the rollout's tokens took them, balanced, and counted.

B rows, T packed tokens; L layers with E experts, of which a token takes k.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from runtime.config import Moe
from runtime.models.families.shape import ExpertShape
from runtime.trainer.backend import RankInfo
from runtime.trainer.micro_batch import MicroBatch
from runtime.trainer.statistics import StepStatistics


class WatchedExperts:
    """`replay` before each pass of a model, `balance` behind it, `report` before an update and `correct` with it."""

    def __init__(self, model: Any, shape: ExpertShape | None, moe: Moe):
        """Without a `shape` nothing is done."""
        self._moe, (layers, _, self._count) = moe, (0, 0, 1) if shape is None else shape.routes
        self.routes = shape.routes if shape is not None and moe.replay == "routing" else None
        self._sigmoid = shape is not None and shape.corrected
        self._blocks = [module for module in model.modules() if layers and hasattr(module, "watch")]
        for block in self._blocks:
            block.watch.keeps = moe.losses
        self.clear()

    def clear(self) -> None:
        """Forget the passes since the last update."""
        self._loads: torch.Tensor | None = None  # [L, E], of all tokens how many choices an expert has
        for block in self._blocks:
            block.watch.logits = None

    def replay(self, batch: MicroBatch) -> None:
        for layer, block in enumerate(self._blocks):
            block.watch.taken = None if batch.experts is None else batch.experts[:, layer].long()

    def balance(self, batch: MicroBatch, statistics: StepStatistics) -> torch.Tensor | None:
        """As `ModelBackend.balance`."""
        if not self._blocks:
            return None
        rows, watches = len(batch.samples), [block.watch for block in self._blocks]  # no row: its one token is nobody's
        chosen = torch.stack([watch.chosen for watch in watches]) if rows else batch.cells.new_zeros(len(watches), 0, 1)
        loads = [torch.bincount(each.flatten(), minlength=self._count) for each in chosen]
        self._loads = torch.stack(loads).to(statistics.dtype) + (0 if self._loads is None else self._loads)
        if self._moe.replay == "routing":
            own = torch.stack([watch.own for watch in watches]) if rows else chosen
            differ = (own.sort(-1).values != chosen.sort(-1).values).any(-1)
            statistics.mean("moe/routing_differs", differ.sum(), differ.numel())
        if not self._moe.losses:
            return None
        share, found = shares_of_rows(batch), torch.zeros(len(batch.mask), 1, device=batch.mask.device)
        aux = [balance_loss(watch.logits.float(), watch.chosen, share, self._sigmoid) for watch in watches]
        z = [z_loss(watch.logits.float(), share) for watch in watches]
        for name, coefficient, losses in (("aux_loss", self._moe.aux_loss, aux), ("z_loss", self._moe.z_loss, z)):
            total = torch.stack(losses).sum(0)
            statistics.mean(f"moe/{name}", total.detach()[:rows].sum(), rows * len(watches))
            found = found + coefficient * total[:, None]
        return found

    def report(self, statistics: StepStatistics, rank_info: RankInfo) -> None:
        """The loads, of all ranks. Collective."""
        if not self._blocks:
            return
        none = torch.zeros(len(self._blocks), self._count, dtype=statistics.dtype, device=statistics.device)
        self._loads = rank_info.summed(none if self._loads is None else self._loads)
        there = float(self._loads.any())
        part = self._loads / self._loads.sum(1, keepdim=True).clamp(min=1)
        statistics.mean("moe/load_max", there * self._count * part.amax(1).mean(), there)
        entropy = torch.special.entr(part).sum(1).mean() / math.log(max(2, self._count))
        statistics.mean("moe/load_entropy", there * entropy, there)

    @torch.no_grad()
    def correct(self) -> None:
        """DeepSeek-V3's balance without a loss (arXiv:2412.19437, section 2.1.2): what corrects the scores of an expert rises
        by `moe.bias_update` where its load is less than the mean, and falls by it where it is more."""
        if self._moe.bias_update and self._loads is not None:
            for block, load in zip(self._blocks, self._loads, strict=True):
                block.gate.e_score_correction_bias += self._moe.bias_update * torch.sign(load.mean() - load)


def shares_of_rows(batch: MicroBatch) -> torch.Tensor:
    """float32 [B, T]: 1 / (tokens of the row) where a token is one of the row's, those that it shares included."""
    lengths = batch.sequences[:, 1] + batch.sequences[:, 2]
    row = np.repeat(np.arange(len(lengths)), lengths)
    share = np.zeros((len(lengths), batch.input_ids.shape[1]), np.float32)
    share[row, batch.paths] = (1 / lengths)[row]
    return torch.from_numpy(share).to(batch.input_ids.device)


def balance_loss(logits: torch.Tensor, chosen: torch.Tensor, share: torch.Tensor, sigmoid: bool) -> torch.Tensor:
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
