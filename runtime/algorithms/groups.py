"""Sums within groups of samples, of those that are valid."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


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
