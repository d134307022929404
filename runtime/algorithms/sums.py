"""Sums and means over rows of tokens, groups of samples and the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from runtime.algorithms.interfaces import own_part

if TYPE_CHECKING:
    from torch import Tensor


def row_sum(values: Tensor, mask: Tensor) -> Tensor:
    """[B, 1] from [B, T]; 0 in a row without masked tokens."""
    return (values * mask).sum(-1, keepdim=True)


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """[B, 1] from [B, T]; 0 in a row without masked tokens."""
    return row_sum(values, mask) / mask.sum(-1, keepdim=True).clamp(min=1)


class GroupSums:
    """The rewards of B samples by group. Samples that are not valid count nowhere, whatever their reward.

    rewards [B], groups int64 [B] from 0, valid bool [B] or None for all.
    """

    def __init__(self, rewards: Tensor, groups: Tensor, valid: Tensor | None):
        self.weight = rewards.new_ones(rewards.shape) if valid is None else valid.to(rewards.dtype)
        self.rewards = rewards.where(self.weight > 0, rewards.new_zeros(()))
        self._groups = groups
        self._count = int(groups.max()) + 1 if groups.numel() else 0
        size = self.sums(self.weight)
        self.size = size[groups]  # [B], of each sample's group
        self.sum = self.sums(self.rewards)[groups]  # [B]

    def sums(self, values: Tensor) -> Tensor:
        """[number of groups], from values [B]."""
        return values.new_zeros(self._count).index_add(0, self._groups, values)

    def equal(self) -> Tensor:
        """bool [B]: whether the rewards of the sample's group are all equal."""
        low, high = (
            self.rewards.new_full((self._count,), sign * float("inf")).scatter_reduce(
                0, self._groups, self.rewards.masked_fill(self.weight == 0, sign * float("inf")), reduction
            )
            for sign, reduction in ((1, "amin"), (-1, "amax"))
        )
        return (low >= high)[self._groups]

    def deviation(self) -> Tensor:
        """`r - mean_g`, [B]: 0 in a group of equal rewards, r in a group of one, 0 where not valid."""
        single = self.size <= 1
        mean = (self.sum / self.size.clamp(min=1)).masked_fill(single, 0.0)
        # Rounding leaves the mean of equal rewards off by an ulp, which eps would not hide.
        return ((self.rewards - mean) * self.weight).where(~self.equal() | single, 0.0)


EPS = 1e-8


def whiten(values: Tensor, mask: Tensor, batch_sum: Callable[[Tensor], Tensor] = own_part) -> Tensor:
    """`(x - mean) / sqrt(var + 1e-8)` with moments of the masked values, variance unbiased; 0 outside the mask. [B, T].

    `batch_sum` adds up a tensor over the parts of the batch. Mean and squares take a sum each, as the square of a sum
    loses digits where the mean is large.
    """
    count = batch_sum(mask.sum())
    mean = batch_sum((values * mask).sum()) / count.clamp(min=1)
    centred = (values - mean) * mask
    variance = batch_sum(centred.square().sum()) / (count - 1).clamp(min=1)
    return centred / (variance + EPS).sqrt()
