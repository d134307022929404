"""Clip-Cov and KL-Cov (arXiv:2505.22617, section 4): a few tokens whose advantage and log-probability vary together take most
of the entropy from a policy, so these are treated apart.

They are chosen once a step, among its trained tokens on all ranks and by their log-probabilities as sampled: neither
micro-batches nor the number of ranks has a say. (The authors choose in each micro-batch.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.algorithms.interfaces import BatchSum, LossInputs, LossOptions, LossOutputs, StepTokens, policy_loss
from runtime.algorithms.losses import behaviour_kl, surrogate

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

    float64 scores, of which the bits of a number are in its order, once those of negative ones are turned round: so 64 halvings
    find the last one, and each costs a sum over the parts.
    """
    wanted = max(1, int(share * float(batch_sum(scores.new_full((), len(scores))))))
    bits = scores.view(scores.long().dtype)
    keys = bits.where(bits >= 0, bits ^ LARGEST)
    low, high = -LARGEST - 1, LARGEST
    while low < high:
        middle = (low + high + 1) // 2
        if float(batch_sum((keys >= middle).to(scores.dtype).sum())) >= wanted:
            low = middle
        else:
            high = middle - 1
    return keys >= low


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
    loss, clips = surrogate(inputs, options)
    metrics = {"actor/ppo_kl": behaviour_kl(inputs), "actor/covariance_chosen": inputs.chosen}
    return LossOutputs(loss.masked_fill(inputs.chosen > 0, 0.0), clips | metrics)


@policy_loss("kl_cov", zero_without_advantage=False, chooses=highest)
def kl_cov(inputs: LossInputs, options: LossOptions) -> LossOutputs:
    """`-r A`, and of the tokens of the highest covariances `-r A + c |logp - old_logp|` (the estimate of the KL is
    the authors' code's)."""
    assert inputs.chosen is not None
    log_ratio = inputs.logp - inputs.old_logp
    loss = -log_ratio.exp() * inputs.advantages + options.covariance_kl * inputs.chosen * log_ratio.abs()
    return LossOutputs(loss, {"actor/ppo_kl": behaviour_kl(inputs), "actor/covariance_chosen": inputs.chosen})
