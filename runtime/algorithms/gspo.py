"""GSPO: importance ratios of whole samples (arXiv:2507.18071)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.algorithms.interfaces import LossInputs, LossOptions, LossOutputs, policy_loss
from runtime.algorithms.policy_losses import behaviour_kl, clipped_surrogate
from runtime.algorithms.rows import row_mean

if TYPE_CHECKING:
    from torch import Tensor


@policy_loss("gspo", zero_without_advantage=True)
def gspo(inputs: LossInputs, options: LossOptions) -> LossOutputs:
    """The clipped surrogate with `s_i = exp(mean_t(logp - old_logp))` in place of the token's ratio (equations 5 and 7).

    Every token of a row carries the row's loss: `seq_mean_token_mean` makes the mean over rows of it.
    """
    log_ratio: Tensor = row_mean(inputs.logp - inputs.old_logp, inputs.mask)
    loss, clips = clipped_surrogate(
        log_ratio,
        log_ratio.new_zeros(()),
        inputs.advantages,
        clip_low=options.clip_low,
        clip_high=options.clip_high,
        dual_clip=options.dual_clip,
    )
    return LossOutputs(loss.expand_as(inputs.mask), clips | {"actor/ppo_kl": behaviour_kl(inputs)})
