"""Losses that treat some tokens apart, which are chosen once a step, among its trained tokens on all ranks: neither
micro-batches nor the number of ranks has a say. (The authors choose in each micro-batch.)

- Clip-Cov and KL-Cov (arXiv:2505.22617, section 4): a few tokens whose advantage and log-probability, as sampled, vary together
  take most of the entropy from a policy.
- M2PO (arXiv:2510.01161): a few tokens that are far from the policy that sampled them make most of the variance of old samples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from runtime.algorithms.interfaces import BatchSum, LossInputs, LossOptions, LossOutputs, StepTokens, policy_loss
from runtime.algorithms.losses import clipped_surrogate

if TYPE_CHECKING:
    from torch import Tensor

LARGEST = 2**63 - 1


def covariances(tokens: StepTokens, batch_sum: BatchSum) -> Tensor:
    """`(A - mean A) (logp - mean logp)`, [N], with means over all tokens of the step."""
    count = batch_sum(tokens.logp.new_full((), len(tokens.logp))).clamp(min=1)
    advantages, logp = (each - batch_sum(each.sum()) / count for each in (tokens.advantages, tokens.logp))
    return advantages * logp


def largest(scores: Tensor, share: float, batch_sum: BatchSum) -> Tensor:
    """bool [N]: the `max(1, ⌊share · M⌋)` largest of the M scores of all parts, and what equals the last of them.

    float64 scores. Each halving costs a sum over the parts.
    """
    wanted = max(1, int(share * float(batch_sum(scores.new_full((), len(scores))))))
    keys = _keys(scores)
    last = _last(lambda key: float(batch_sum((keys >= key).to(scores.dtype).sum())) >= wanted)
    return keys >= last


def _keys(scores: Tensor) -> Tensor:
    """int64, in the order of the float64 scores: the bits of a number are, once those of negative ones are turned round. So 64
    halvings find the last that holds (`_last`)."""
    bits = scores.view(scores.long().dtype)
    return bits.where(bits >= 0, bits ^ LARGEST)


def _last(holds: Callable[[int], bool]) -> int:
    """The largest key for which it `holds`, as it does for all below, and for the smallest whatever it says."""
    low, high = -LARGEST - 1, LARGEST
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def drawn_within(tokens: StepTokens, options: LossOptions, batch_sum: BatchSum) -> Tensor:
    """A share of all tokens, drawn among those with `low < covariance < high`."""
    covariance = covariances(tokens, batch_sum)
    within = (covariance > options.covariance_low) & (covariance < options.covariance_high)
    return within & largest(tokens.draws.where(within, -1.0), options.covariance_share, batch_sum)


def highest(tokens: StepTokens, options: LossOptions, batch_sum: BatchSum) -> Tensor:
    """The share of all tokens that has the largest covariances."""
    return largest(covariances(tokens, batch_sum), options.covariance_share, batch_sum)


@policy_loss("clip_cov", zero_without_advantage=True, chooses=drawn_within)
def clip_cov(inputs: LossInputs, options: LossOptions) -> LossOutputs:
    """The clipped surrogate, without those tokens that were drawn, which count all the same."""
    assert inputs.chosen is not None
    loss, clips = clipped_surrogate(inputs.logp, inputs.old_logp, inputs.advantages, options)
    metrics = clips | {"actor/covariance_chosen": inputs.chosen}
    return LossOutputs(loss.masked_fill(inputs.chosen > 0, 0.0), metrics)


@policy_loss("kl_cov", zero_without_advantage=False, chooses=highest)
def kl_cov(inputs: LossInputs, options: LossOptions) -> LossOutputs:
    """`-r A`, and of the tokens of the highest covariances `-r A + c |logp - old_logp|` (the estimate of the KL is
    the authors' code's)."""
    assert inputs.chosen is not None
    log_ratio = inputs.logp - inputs.old_logp
    loss = -log_ratio.exp() * inputs.advantages + options.covariance_kl * inputs.chosen * log_ratio.abs()
    return LossOutputs(loss, {"actor/covariance_chosen": inputs.chosen})


def beyond_second_moment(tokens: StepTokens, options: LossOptions, batch_sum: BatchSum) -> Tensor:
    """Those that have to go, the largest `m_t = (log r_t)^2` first, until the mean of m over the others is at most
    `m2_threshold` τ (algorithm 1). Only those go whose advantage moves them on: where `A log r > 0`.

    A token counts m - τ, and of what may go only m > τ helps: so the others' sum rises with the largest m that stays.
    """
    assert tokens.start is not None
    gap = tokens.start - tokens.logp
    moments, limit = gap.square(), options.m2_threshold
    may_go, keys = (gap * tokens.advantages > 0) & (moments > limit), _keys(moments)

    def within(key: int) -> bool:
        kept = moments[~may_go | (keys <= key)]
        return float(batch_sum((kept - limit).sum())) <= 0

    return may_go & (keys > _last(within))


@policy_loss("m2po", zero_without_advantage=True, chooses=beyond_second_moment, by_start=True)
def m2po(inputs: LossInputs, options: LossOptions) -> LossOutputs:
    """`-r A`, and 0 for the tokens of the largest `(log r)^2`, which count all the same."""
    assert inputs.chosen is not None
    loss = (-(inputs.logp - inputs.old_logp).exp() * inputs.advantages).masked_fill(inputs.chosen > 0, 0.0)
    return LossOutputs(loss, {"actor/m2po_masked": inputs.chosen})
