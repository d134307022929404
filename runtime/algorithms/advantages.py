"""Advantages from rewards alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.algorithms.interfaces import AdvantageInputs, advantage

if TYPE_CHECKING:
    from torch import Tensor


def group_norm(
    rewards: Tensor, groups: Tensor, valid: Tensor | None = None, *, eps: float = 1e-6, ddof: int = 1, scale: str = "group"
) -> Tensor:
    """`(r - mean_g) / (std_g + eps)` per sample, [B] (GRPO, arXiv:2402.03300, section 4.1.2).

    `scale` is "group", "batch" (the standard deviation of all valid rewards) or "none" (Dr. GRPO, arXiv:2503.20783).
    Only valid samples count; the others get 0. Equal rewards give exactly 0; a group of one has mean 0 and deviation 1.
    """
    weight = rewards.new_ones(rewards.shape) if valid is None else valid.to(rewards.dtype)
    rewards = rewards.where(weight > 0, rewards.new_zeros(()))
    n_groups = int(groups.max()) + 1 if groups.numel() else 0

    def group_sum(values: Tensor) -> Tensor:
        return values.new_zeros(n_groups).index_add(0, groups, values)

    size = group_sum(weight)
    single = size <= 1
    mean = (group_sum(rewards) / size.clamp(min=1)).masked_fill(single, 0.0)
    # Rounding leaves the mean of equal rewards off by an ulp, which eps would not hide.
    deviation = ((rewards - mean[groups]) * weight).where(
        ~_equal_rewards(rewards, groups, weight, n_groups) | single[groups], 0.0
    )
    if scale == "none":
        return deviation
    if scale == "batch":
        total = weight.sum()
        centred = (rewards - rewards.sum() / total.clamp(min=1)) * weight
        return deviation / ((centred.square().sum() / (total - ddof).clamp(min=1)).sqrt() + eps)
    if scale != "group":
        raise ValueError(f"scale is 'group', 'batch' or 'none', not {scale!r}")
    std = (group_sum(deviation.square()) / (size - ddof).clamp(min=1)).sqrt().masked_fill(single, 1.0)
    return deviation / (std[groups] + eps)


def _equal_rewards(rewards: Tensor, groups: Tensor, weight: Tensor, n_groups: int) -> Tensor:
    """bool [B]: whether the valid rewards of the sample's group are all equal."""
    infinity = float("inf")
    low = rewards.new_full((n_groups,), infinity).scatter_reduce(0, groups, rewards.masked_fill(weight == 0, infinity), "amin")
    high = rewards.new_full((n_groups,), -infinity).scatter_reduce(
        0, groups, rewards.masked_fill(weight == 0, -infinity), "amax"
    )
    return (low >= high)[groups]


@advantage("group_norm", streamable=True)
def group_norm_advantage(inputs: AdvantageInputs) -> Tensor:
    return group_norm(inputs.rewards, inputs.groups, inputs.valid)[:, None]
