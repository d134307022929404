"""REINFORCE++: no value model, advantages normalised over the whole batch (arXiv:2501.03262)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.algorithms.groups import GroupSums
from runtime.algorithms.interfaces import AdvantageInputs, AdvantageOptions, advantage
from runtime.algorithms.token_returns import returns_to_go
from runtime.algorithms.whitening import whiten

if TYPE_CHECKING:
    from torch import Tensor


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
