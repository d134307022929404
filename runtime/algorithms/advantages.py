"""Advantages of whole samples, from their rewards and their groups'."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from runtime.algorithms.groups import GroupSums
from runtime.algorithms.interfaces import AdvantageInputs, AdvantageOptions, advantage, own_part

if TYPE_CHECKING:
    from torch import Tensor


def group_norm(
    rewards: Tensor,
    groups: Tensor,
    valid: Tensor | None = None,
    *,
    eps: float = 1e-6,
    ddof: int = 1,
    scale: str = "group",
    batch_sum: Callable[[Tensor], Tensor] = own_part,
) -> Tensor:
    """`(r - mean_g) / (std_g + eps)` per sample, [B] (GRPO, arXiv:2402.03300, section 4.1.2).

    `scale` is "group", "batch" (the standard deviation of all valid rewards) or "none" (Dr. GRPO, arXiv:2503.20783,
    section 3.2). Only valid samples count; the others get 0. Equal rewards give exactly 0; a group of one has mean 0 and
    deviation 1. Raises ValueError for another scale.
    """
    within = GroupSums(rewards, groups, valid)
    deviation = within.deviation()
    if scale == "none":
        return deviation
    if scale == "batch":
        total = batch_sum(within.weight.sum())
        mean = batch_sum(within.rewards.sum()) / total.clamp(min=1)
        squares = batch_sum(((within.rewards - mean) * within.weight).square().sum())
        return deviation / ((squares / (total - ddof).clamp(min=1)).sqrt() + eps)
    if scale != "group":
        raise ValueError(f"scale is 'group', 'batch' or 'none', not {scale!r}")
    squares = within.sums(deviation.square())[groups]
    std = (squares / (within.size - ddof).clamp(min=1)).sqrt().masked_fill(within.size <= 1, 1.0)
    return deviation / (std + eps)


def rloo(rewards: Tensor, groups: Tensor, valid: Tensor | None = None) -> Tensor:
    """`r_i - mean of the others in the group`, [B] (RLOO, arXiv:2402.14740, section 3).

    Only valid samples count; the others get 0. A group of one keeps its reward.
    """
    within = GroupSums(rewards, groups, valid)
    # r - (S - r) / (n - 1) = n / (n - 1) · (r - S / n)
    return within.deviation() * (within.size / (within.size - 1).clamp(min=1)).clamp(min=1)


@advantage("group_norm", streamable=lambda options: options.group_std != "batch")
def group_norm_advantage(inputs: AdvantageInputs, options: AdvantageOptions) -> Tensor:
    return group_norm(
        inputs.rewards,
        inputs.groups,
        inputs.valid,
        eps=options.eps,
        ddof=options.ddof,
        scale=options.group_std,
        batch_sum=inputs.batch_sum,
    )[:, None]


@advantage("rloo", streamable=True)
def rloo_advantage(inputs: AdvantageInputs, options: AdvantageOptions) -> Tensor:
    return rloo(inputs.rewards, inputs.groups, inputs.valid)[:, None]
