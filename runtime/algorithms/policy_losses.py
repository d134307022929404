"""Clipped policy-gradient losses, one value a token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.algorithms.interfaces import LossInputs, LossOptions, LossOutputs, policy_loss

if TYPE_CHECKING:
    from torch import Tensor


def clipped_surrogate(
    logp: Tensor, old_logp: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float = 0.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """`max(-rA, -clip(r, 1 - low, 1 + high) A)` with `r = exp(logp - old_logp)` (PPO, arXiv:1707.06347, equation 7).

    With `dual_clip` c, `min(L, -cA)` where A < 0 (arXiv:1912.09729, equation 5). Returns the loss and two metrics, 1 on a token
    or 0, as verl has them: `pg_clipfrac` where the clip of the ratio decided L, `pg_clipfrac_lower` where -cA is below L.
    """
    ratio = (logp - old_logp).exp()
    plain, clipped = -ratio * advantages, -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    loss = plain.maximum(clipped)
    beyond = (advantages < 0) & (loss > -dual_clip * advantages) if dual_clip else loss.new_zeros(()).bool()
    metrics = {
        "actor/pg_clipfrac": (clipped > plain).to(loss.dtype),
        "actor/pg_clipfrac_lower": beyond.to(loss.dtype).expand_as(loss),
    }
    return loss.where(~beyond, -dual_clip * advantages), metrics


@policy_loss("ppo", zero_without_advantage=True)
def ppo(inputs: LossInputs, options: LossOptions) -> LossOutputs:
    """The clipped surrogate against `old_logp`: the policy that sampled, unless a correction accounts for it."""
    loss, clips = clipped_surrogate(
        inputs.logp,
        inputs.old_logp,
        inputs.advantages,
        clip_low=options.clip_low,
        clip_high=options.clip_high,
        dual_clip=options.dual_clip,
    )
    return LossOutputs(loss, clips | {"actor/ppo_kl": behaviour_kl(inputs)})


@policy_loss("decoupled", zero_without_advantage=True)
def decoupled(inputs: LossInputs, options: LossOptions) -> LossOutputs:
    """`w · ppo`, clipped about the proximal policy, `w = exp(prox - behaviour)` without gradient.

    AReaL, arXiv:2505.24298, equation 5. w is clamped to `behaviour_weight_cap`, or dropped (0) beyond it; either way the
    token still counts as one.
    """
    weight = (inputs.proximal_logp - inputs.behaviour_logp).detach().exp()
    loss, clips = clipped_surrogate(
        inputs.logp,
        inputs.proximal_logp,
        inputs.advantages,
        clip_low=options.clip_low,
        clip_high=options.clip_high,
        dual_clip=options.dual_clip,
    )
    beyond = weight > options.behaviour_weight_cap
    capped = weight.masked_fill(beyond, 0.0 if options.behaviour_weight_over == "drop" else options.behaviour_weight_cap)
    metrics = {"actor/ppo_kl": behaviour_kl(inputs), "actor/behaviour_capfrac": beyond.to(loss.dtype)}
    return LossOutputs(capped * loss, clips | metrics)


def behaviour_kl(inputs: LossInputs) -> Tensor:
    """k1 of KL(behaviour || policy): its tokens were drawn from the behaviour policy."""
    return (inputs.behaviour_logp - inputs.logp).detach()
