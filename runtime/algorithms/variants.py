"""Policy losses of other papers, beside those of `losses.py`: what they put in the place of PPO's clip."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.algorithms.interfaces import LossInputs, LossOptions, LossOutputs, policy_loss
from runtime.algorithms.losses import clipped_surrogate, row_mean, row_sum

if TYPE_CHECKING:
    from torch import Tensor

SMALLEST = 1e-8  # of the probability of all other tokens, whose logarithm is taken


@policy_loss("gmpo", zero_without_advantage=True)
def gmpo(inputs: LossInputs, options: LossOptions) -> LossOutputs:
    """`-A exp(mean_t l_t)`: the geometric mean of a row's ratios, each clipped (GMPO, arXiv:2507.20673, section 3).

    `l_t = min(log r_t, high)` where A > 0, `max(log r_t, -low)` where A < 0: the clip is of the logarithm, to [e^-low, e^high].
    Every token of a row carries the row's loss, as in `gspo`.
    """
    log_ratio, sign = inputs.logp - inputs.old_logp, inputs.advantages.sign()
    near = log_ratio.clamp(-options.clip_low, options.clip_high)
    kept = sign * (sign * log_ratio).minimum(sign * near)
    loss = -inputs.advantages * row_mean(kept, inputs.mask).exp()
    clipped = (sign * (log_ratio - near) > 0).to(log_ratio.dtype)
    return LossOutputs(loss.expand_as(inputs.mask), {"actor/pg_clipfrac": clipped})


@policy_loss("gpg", zero_without_advantage=True)
def gpg(inputs: LossInputs, options: LossOptions) -> LossOutputs:
    """`-A logp`: the policy gradient itself, without ratio and clip (GPG, arXiv:2504.02546, section 2)."""
    return LossOutputs(-inputs.advantages * inputs.logp)


@policy_loss("topr", zero_without_advantage=True)
def topr(inputs: LossInputs, options: LossOptions) -> LossOutputs:
    """`-A logp` where A > 0, else `-sg(min(Π_t r_t, 1)) A logp`, the product over the row (TOPR, arXiv:2503.14286)."""
    weight = row_sum(inputs.logp - inputs.old_logp, inputs.mask).detach().clamp(max=0.0).exp()
    weight = weight.where(inputs.advantages < 0, 1.0)
    metrics = {"actor/topr_weight": weight.expand_as(inputs.mask)}
    return LossOutputs(-weight * inputs.advantages * inputs.logp, metrics)


@policy_loss("up", zero_without_advantage=True)
def unbounded_positive(inputs: LossInputs, options: LossOptions) -> LossOutputs:
    """`-A logp` where A > 0, else the clipped surrogate (UP, arXiv:2607.06987, equation 15). `dual_clip` as in `ppo`."""
    loss, clips = clipped_surrogate(inputs.logp, inputs.old_logp, inputs.advantages, options)
    positive = (inputs.advantages > 0).expand_as(loss)
    clips["actor/pg_clipfrac"] = clips["actor/pg_clipfrac"].masked_fill(positive, 0.0)
    return LossOutputs((-inputs.advantages * inputs.logp).where(positive, loss), clips)


@policy_loss("vespo", zero_without_advantage=True)
def vespo(
    inputs: LossInputs,
    options: LossOptions,
    *,
    power_positive: float = 2.0,
    decay_positive: float = 3.0,
    power_negative: float = 3.0,
    decay_negative: float = 2.0,
) -> LossOutputs:
    """`-sg(φ(W)) A logp`, `φ(W) = W^k exp(λ (1 - W))`, `W = Π_t r_t` over the row (VESPO, arXiv:2602.10693).

    φ(1) = 1; samples far from the policy weigh little on either side. k and λ are the powers and decays, by the sign of A.
    """
    log_weight: Tensor = row_sum(inputs.logp - inputs.old_logp, inputs.mask).detach()
    negative = inputs.advantages < 0
    power = log_weight.new_full((), power_negative).where(negative, power_positive)
    decay = log_weight.new_full((), decay_negative).where(negative, decay_positive)
    weight = (power * log_weight + decay * (1 - log_weight.exp())).exp()
    metrics = {"actor/vespo_weight": weight.expand_as(inputs.mask)}
    return LossOutputs(-weight * inputs.advantages * inputs.logp, metrics)


@policy_loss("dppo_tv", zero_without_advantage=True)
def dppo_tv(inputs: LossInputs, options: LossOptions) -> LossOutputs:
    """`-M r A` with the divergence `|π - μ|` of the sampled token (DPPO-Binary-TV, arXiv:2602.04879): `_within`."""
    return _within((inputs.logp.exp() - inputs.old_logp.exp()).detach().abs(), inputs, options)


@policy_loss("dppo_kl", zero_without_advantage=True)
def dppo_kl(inputs: LossInputs, options: LossOptions) -> LossOutputs:
    """`-M r A` with `KL(μ || π)` of the sampled token against all others, `μ log(μ / π) + (1 - μ) log((1 - μ) / (1 - π))`
    (DPPO-Binary-KL, arXiv:2602.04879): `_within`."""
    logp, old = inputs.logp.detach(), inputs.old_logp
    others, old_others = ((-each.expm1()).clamp(min=SMALLEST) for each in (logp, old))
    return _within(old.exp() * (old - logp) + old_others * (old_others / others).log(), inputs, options)


def _within(divergence: Tensor, inputs: LossInputs, options: LossOptions) -> LossOutputs:
    """M is 0 where the divergence [B, T] is above `clip_high` and A > 0 would raise a probability that has risen, or above
    `clip_low` and A < 0 would lower one that has fallen; else 1. π is the policy, μ the old one."""
    log_ratio, positive = inputs.logp - inputs.old_logp, inputs.advantages > 0
    bound = divergence.new_full((), options.clip_high).where(positive, options.clip_low)
    outside = (divergence > bound) & (log_ratio * inputs.advantages > 0)
    loss = (-log_ratio.exp() * inputs.advantages).masked_fill(outside, 0.0)
    return LossOutputs(loss, {"actor/pg_clipfrac": outside.to(loss.dtype)})
