"""CISPO: the importance weight is clipped, and no token loses its gradient (MiniMax-M1, arXiv:2506.13585)."""

from __future__ import annotations

from runtime.algorithms.interfaces import LossInputs, LossOptions, LossOutputs, policy_loss
from runtime.algorithms.policy_losses import behaviour_kl


@policy_loss("cispo", zero_without_advantage=True)
def cispo(inputs: LossInputs, options: LossOptions) -> LossOutputs:
    """`-sg(clip(r, 1 - low, 1 + high)) · A · logp`, `r = exp(logp - old_logp)` (equations 4 and 5). low >= 1 sets no bound."""
    ratio = (inputs.logp - inputs.old_logp).detach().exp()
    weight = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    loss = -weight * inputs.advantages * inputs.logp
    return LossOutputs(loss, {"actor/pg_clipfrac": (weight != ratio).to(loss.dtype), "actor/ppo_kl": behaviour_kl(inputs)})
