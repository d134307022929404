"""Losses of policy and critic, one value a token, and the log-probabilities that they are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.algorithms.interfaces import LossInputs, LossOptions, LossOutputs, policy_loss
from runtime.algorithms.sums import row_mean

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


@policy_loss("cispo", zero_without_advantage=True)
def cispo(inputs: LossInputs, options: LossOptions) -> LossOutputs:
    """`-sg(clip(r, 1 - low, 1 + high)) · A · logp`, `r = exp(logp - old_logp)` (equations 4 and 5). low >= 1 sets no bound."""
    ratio = (inputs.logp - inputs.old_logp).detach().exp()
    weight = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    loss = -weight * inputs.advantages * inputs.logp
    return LossOutputs(loss, {"actor/pg_clipfrac": (weight != ratio).to(loss.dtype), "actor/ppo_kl": behaviour_kl(inputs)})


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


@policy_loss("sapo", zero_without_advantage=True)
def sapo(inputs: LossInputs, options: LossOptions) -> LossOutputs:
    """`-(4 / τ) sigmoid(τ (r - 1)) A`, `r = exp(logp - old_logp)`; τ is `tau_positive` where A > 0, else `tau_negative`.

    At r = 1 the gradient is that of `-r A`.
    """
    ratio, advantages = (inputs.logp - inputs.old_logp).exp(), inputs.advantages
    tau = advantages.new_full((), options.tau_positive).where(advantages > 0, options.tau_negative)
    loss = -4 / tau * (tau * (ratio - 1)).sigmoid() * advantages
    return LossOutputs(loss, {"actor/ppo_kl": behaviour_kl(inputs)})


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """`0.5 max((V - R)², (clip(V, V_old ± c) - R)²)` per token (Schulman et al. 2017; Engstrom et al., arXiv:2005.12729).

    All [B, T]. Returns the loss and a bool tensor that tells which tokens the clip decided.
    """
    near = values.clamp(old_values - clip, old_values + clip)
    plain, clipped = (values - returns).square(), (near - returns).square()
    return 0.5 * plain.maximum(clipped), clipped > plain


def token_logprobs(
    logits: Tensor, tokens: Tensor, temperature: float = 1.0, *, entropy_gradient: bool = True
) -> tuple[Tensor, Tensor]:
    """`log_softmax(logits / T)[token]` and `H = -Σ p log p`.

    logits [N, V], tokens int64 [N] -> log-probabilities [N], entropies [N]; half precision is computed in float32. Without
    `entropy_gradient` the entropies are detached, which saves two [N, V] buffers.
    """
    scaled = logits if logits.dtype.itemsize >= 4 else logits.float()
    if temperature != 1.0:
        scaled = scaled / temperature
    logp = scaled.log_softmax(-1)
    spread = logp if entropy_gradient else logp.detach()
    return logp.gather(-1, tokens[:, None])[:, 0], -(spread.exp() * spread).sum(-1)
