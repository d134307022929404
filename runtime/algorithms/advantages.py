"""Advantages, from the rewards of samples, their groups' and a critic's values; and what is added to a reward before."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from runtime.algorithms.interfaces import AdvantageInputs, AdvantageOptions, advantage, own_part
from runtime.algorithms.sums import GroupSums, whiten
from runtime.algorithms.token_returns import gae as estimate
from runtime.algorithms.token_returns import returns_to_go

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


@advantage("reinforce_plus_plus", streamable=False)
def reinforce_plus_plus(inputs: AdvantageInputs, options: AdvantageOptions) -> Tensor:
    """Discounted returns to go of `1[t = last] R - β KL_t`, whitened over all trained tokens, [B, T] (section 3)."""
    returns = returns_to_go(inputs.token_rewards, inputs.mask, options.gamma)
    return whiten(returns, inputs.mask, inputs.batch_sum)


@advantage("reinforce_plus_plus_baseline", streamable=False)
def reinforce_plus_plus_baseline(inputs: AdvantageInputs, options: AdvantageOptions) -> Tensor:
    """`r_i - mean_g`, whitened over the batch, every sample weighing as many times as it has trained tokens. [B, T]."""
    deviation = GroupSums(inputs.rewards, inputs.groups, inputs.valid).deviation()
    return whiten(deviation[:, None].expand_as(inputs.mask), inputs.mask, inputs.batch_sum)


@advantage("gae", streamable=lambda options: not options.gae_whitened, needs_values=True)
def gae(inputs: AdvantageInputs, options: AdvantageOptions) -> Tensor:
    """[B, T], whitened over all trained tokens of the batch where `gae_whitened` says so (PPO's advantage normalisation,
    arXiv:1707.06347)."""
    advantages, _ = _estimate(inputs, options)
    return whiten(advantages, inputs.mask, inputs.batch_sum) if options.gae_whitened else advantages


def value_targets(inputs: AdvantageInputs, options: AdvantageOptions) -> Tensor:
    """The returns `A + V` of the same estimate, before any whitening: what the critic is trained towards. [B, T]."""
    return _estimate(inputs, options)[1]


def _estimate(inputs: AdvantageInputs, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    assert inputs.values is not None  # `needs_values`
    return estimate(inputs.token_rewards, inputs.values, inputs.mask, gamma=options.gamma, lam=options.gae_lambda)


def has_signal(rewards: Iterable[float], valid: Iterable[bool]) -> bool:
    """Whether the valid rewards of a group are not all equal (dynamic sampling; DAPO, arXiv:2503.14476, section 3.2)."""
    return len({reward for reward, counts in zip(rewards, valid, strict=True) if counts}) > 1


def soft_overlong_penalty(lengths: Tensor, max_length: int, buffer: int) -> Tensor:
    """0 up to `max_length - buffer` tokens, falling to -1 at `max_length` and -1 beyond (DAPO, equation 13).

    lengths float [B] -> [B]; `buffer` is at least 1.
    """
    return ((max_length - buffer - lengths) / buffer).clamp(-1.0, 0.0)


def missing_eos_penalty(truncated: Tensor, penalty: float) -> Tensor:
    """`-penalty` where generation stopped by length, else 0. truncated [B], 1.0 or 0.0 -> [B]."""
    return -penalty * truncated
