"""Weights for the gap between the engine that sampled and the one that trains, and the proximal policy between both.

Each correction takes `log_weight` = proximal - behaviour log-probabilities [B, T], and gives weights without gradient. The
policy loss is multiplied by them; its average stays over the original mask.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.algorithms.interfaces import CORRECTIONS, CorrectionOptions, CorrectionOutputs
from runtime.algorithms.sums import row_mean, row_sum

if TYPE_CHECKING:
    from torch import Tensor


@CORRECTIONS.register("token_tis")
def token_tis(log_weight: Tensor, mask: Tensor, options: CorrectionOptions) -> CorrectionOutputs:
    """`min(w_t, C)`, [B, T]: truncated importance sampling (Ionides 2008; per token as in Yao et al. 2025, "Your efficient
    RL framework secretly brings you off-policy RL training")."""
    weight = log_weight.detach().exp()
    return CorrectionOutputs(weight.clamp(max=options.cap), weight > options.cap)


@CORRECTIONS.register("sequence_tis")
def sequence_tis(log_weight: Tensor, mask: Tensor, options: CorrectionOptions) -> CorrectionOutputs:
    """`min(Π_t w_t, C)`, [B, 1]: the weight of the whole sample, truncated."""
    weight = row_sum(log_weight.detach(), mask).exp()
    return CorrectionOutputs(weight.clamp(max=options.cap), weight > options.cap)


@CORRECTIONS.register("icepop")
def icepop(log_weight: Tensor, mask: Tensor, options: CorrectionOptions) -> CorrectionOutputs:
    """`w_t` where `low <= w_t <= high`, else 0, [B, T] (IcePop, arXiv:2510.18855)."""
    weight = log_weight.detach().exp()
    outside = (weight < options.low) | (weight > options.high)
    return CorrectionOutputs(weight.masked_fill(outside, 0.0), outside)


@CORRECTIONS.register("geometric_mask")
def geometric_mask(log_weight: Tensor, mask: Tensor, options: CorrectionOptions) -> CorrectionOutputs:
    """1 for rows with `low <= exp(mean_t log w_t) <= high`, else 0, [B, 1]: the geometric mean does not drift with length."""
    weight = row_mean(log_weight.detach(), mask).exp()
    outside = (weight < options.low) | (weight > options.high)
    return CorrectionOutputs((~outside).to(weight.dtype), outside)


def interpolated_proximal(logp: Tensor, behaviour_logp: Tensor, staleness: Tensor) -> Tensor:
    """`α behaviour + (1 - α) logp`, `α = 1 / d` where a token is d >= 1 versions old and 0 where it is fresh
    (A-3PO, arXiv:2512.06547): the policy one version before `logp`, were versions steps on a straight line.

    All [B, T], `staleness` the integer d of each token by the version that sampled it. Without gradient.
    """
    share = staleness.clamp(min=1).to(logp.dtype).reciprocal().masked_fill(staleness < 1, 0.0)
    return logp.detach() + share * (behaviour_logp - logp.detach())
