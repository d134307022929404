"""SAPO: a smooth gate in place of the clip (arXiv:2511.20347)."""

from __future__ import annotations

from runtime.algorithms.interfaces import LossInputs, LossOptions, LossOutputs, policy_loss
from runtime.algorithms.policy_losses import behaviour_kl


@policy_loss("sapo", zero_without_advantage=True)
def sapo(inputs: LossInputs, options: LossOptions) -> LossOutputs:
    """`-(4 / τ) sigmoid(τ (r - 1)) A`, `r = exp(logp - old_logp)`; τ is `tau_positive` where A > 0, else `tau_negative`.

    At r = 1 the gradient is that of `-r A`.
    """
    ratio, advantages = (inputs.logp - inputs.old_logp).exp(), inputs.advantages
    tau = advantages.new_full((), options.tau_positive).where(advantages > 0, options.tau_negative)
    loss = -4 / tau * (tau * (ratio - 1)).sigmoid() * advantages
    return LossOutputs(loss, {"actor/ppo_kl": behaviour_kl(inputs)})
