"""Rewards and values per token to returns and advantages. Tokens outside the mask are skipped as if they were not there.

All tensors [B, T] of one dtype; what comes out is 0 outside the mask.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def token_rewards(rewards: Tensor, mask: Tensor, penalties: Tensor | None = None) -> Tensor:
    """`1[t = last] R - penalty_t` (Ziegler et al., arXiv:1909.08593): rewards [B] -> [B, T].

    A row without a masked token has no last one: all its rewards are 0.
    """
    last = (mask.cumsum(1) == mask.sum(1, keepdim=True)) & (mask > 0)
    out = last * rewards[:, None]
    return out if penalties is None else out - penalties * mask


def returns_to_go(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """`G_t = r_t + γ G_{t+1}`, t + 1 being the next masked token."""
    order = _trained_first(mask)
    return _restore(_accumulate((rewards * mask).gather(1, order), mask, gamma), order) * mask


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns (GAE, arXiv:1506.02438, equation 16).

    `δ_t = r_t + γ V_{t+1} - V_t`, V after the last masked token being 0; `A_t = δ_t + γλ A_{t+1}`; returns `A + V`.
    """
    order = _trained_first(mask)
    reward, value = ((tensor * mask).gather(1, order) for tensor in (rewards, values))
    following = value.new_zeros(value.shape)
    following[:, :-1] = value[:, 1:]
    advantages = _restore(_accumulate(reward + gamma * following - value, mask, gamma * lam), order) * mask
    return advantages, advantages + values * mask


def _trained_first(mask: Tensor) -> Tensor:
    """int64 [B, T]: the masked tokens of each row in order, then the others."""
    return mask.argsort(dim=1, descending=True, stable=True)


def _restore(packed: Tensor, order: Tensor) -> Tensor:
    return packed.new_zeros(packed.shape).scatter(1, order, packed)


def _accumulate(packed: Tensor, mask: Tensor, decay: float) -> Tensor:
    """`y_t = x_t + decay · y_{t+1}` along rows that hold zeros after their masked tokens."""
    out = packed.clone()
    longest = int(mask.sum(1).max()) if mask.numel() else 0
    for t in range(longest - 2, -1, -1):
        out[:, t] += decay * out[:, t + 1]
    return out
