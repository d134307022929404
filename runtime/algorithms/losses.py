"""Losses, aggregations, KL estimators and corrections, from log-probabilities per token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from runtime.algorithms.interfaces import (
    AGGREGATIONS,
    CORRECTIONS,
    KL_ESTIMATORS,
    Aggregate,
    AggregationOptions,
    BatchSum,
    CorrectionOptions,
    CorrectionOutputs,
    LossInputs,
    LossOptions,
    LossOutputs,
    NonNegative,
    Positive,
    Share,
    StepTokens,
    policy_loss,
)

if TYPE_CHECKING:
    from torch import Tensor


# ---- Covariance
# Losses that treat some tokens differently. The tokens are chosen once a step, among the trained tokens of all ranks, so that
# neither micro-batches nor the number of ranks matters. (The authors choose in each micro-batch.)
#
# - Clip-Cov and KL-Cov (arXiv:2505.22617, section 4): a few tokens whose advantage and log-probability, as sampled,
#   vary together take most of the entropy from a policy.
# - M2PO (arXiv:2510.01161): a few tokens far from the sampling policy cause most of the variance of old samples.

LARGEST = 2**63 - 1


def covariances(tokens: StepTokens, batch_sum: BatchSum) -> Tensor:
    """Return `(A - mean A) (logp - mean logp)`, [N], with means over all tokens of the step."""
    count = batch_sum(tokens.logp.new_full((), len(tokens.logp))).clamp(min=1)
    advantages, logp = (each - batch_sum(each.sum()) / count for each in (tokens.advantages, tokens.logp))
    return advantages * logp


def largest(scores: Tensor, share: float, batch_sum: BatchSum) -> Tensor:
    """Return a mask, bool [N], of the `max(1, ⌊share · M⌋)` largest of the M scores of all parts; ties with the last included.

    float64 scores. Each halving costs a sum over the parts."""
    wanted = max(1, int(share * float(batch_sum(scores.new_full((), len(scores))))))
    keys = _keys(scores)
    last = _last(lambda key: float(batch_sum((keys >= key).to(scores.dtype).sum())) >= wanted)
    return keys >= last


def _keys(scores: Tensor) -> Tensor:
    """Return int64 keys in the order of the float64 scores: their bits, with those of negative scores inverted. So 64 halvings
    find the last key for which a condition holds (`_last`)."""
    bits = scores.view(scores.long().dtype)
    return bits.where(bits >= 0, bits ^ LARGEST)


def _last(holds: Callable[[int], bool]) -> int:
    """Return the largest key for which the condition `holds`. It holds for all smaller keys; the smallest is not asked for."""
    low, high = -LARGEST - 1, LARGEST
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def drawn_within(
    tokens: StepTokens, batch_sum: BatchSum, *, share: Share = 0.0002, low: NonNegative = 1.0, high: NonNegative = 5.0
) -> Tensor:
    """Return a share of all tokens, drawn among those with `low < covariance < high`."""
    covariance = covariances(tokens, batch_sum)
    within = (covariance > low) & (covariance < high)
    return within & largest(tokens.draws.where(within, -1.0), share, batch_sum)


def highest(tokens: StepTokens, batch_sum: BatchSum, *, share: Share = 0.0002) -> Tensor:
    """Return the share of all tokens that has the largest covariances."""
    return largest(covariances(tokens, batch_sum), share, batch_sum)


@policy_loss("clip_cov", zero_without_advantage=True, chooses=drawn_within)
def clip_cov(inputs: LossInputs, options: LossOptions) -> LossOutputs:
    """Return the clipped surrogate, 0 for the drawn tokens, which still count in the mean."""
    assert inputs.chosen is not None
    loss, clips = clipped_surrogate(inputs.logp, inputs.old_logp, inputs.advantages, options)
    metrics = clips | {"actor/covariance_chosen": inputs.chosen}
    return LossOutputs(loss.masked_fill(inputs.chosen > 0, 0.0), metrics)


@policy_loss("kl_cov", zero_without_advantage=False, chooses=highest)
def kl_cov(inputs: LossInputs, options: LossOptions, *, kl: NonNegative = 1.0) -> LossOutputs:
    """Return `-r A`, and `-r A + kl |logp - old_logp|` (as in the authors' code) for the tokens of the highest covariances."""
    assert inputs.chosen is not None
    log_ratio = inputs.logp - inputs.old_logp
    loss = -log_ratio.exp() * inputs.advantages + kl * inputs.chosen * log_ratio.abs()
    return LossOutputs(loss, {"actor/covariance_chosen": inputs.chosen})


def beyond_second_moment(tokens: StepTokens, batch_sum: BatchSum, *, threshold: NonNegative = 0.04) -> Tensor:
    """Return the tokens to leave out, the largest `m_t = (log r_t)^2` first, until the mean of m over the others is at most
    `threshold` τ (algorithm 1). Only tokens with `A log r > 0` are left out: their advantage moves them further away.

    A token adds m - τ to the sum, so leaving it out helps only if m > τ: the sum rises with the largest m that stays."""
    assert tokens.start is not None
    gap = tokens.start - tokens.logp
    moments = gap.square()
    may_go, keys = (gap * tokens.advantages > 0) & (moments > threshold), _keys(moments)

    def within(key: int) -> bool:
        kept = moments[~may_go | (keys <= key)]
        return float(batch_sum((kept - threshold).sum())) <= 0

    return may_go & (keys > _last(within))


@policy_loss("m2po", zero_without_advantage=True, chooses=beyond_second_moment, by_start=True)
def m2po(inputs: LossInputs, options: LossOptions) -> LossOutputs:
    """Return `-r A`, and 0 for the tokens of the largest `(log r)^2`, which still count in the mean."""
    assert inputs.chosen is not None
    loss = (-(inputs.logp - inputs.old_logp).exp() * inputs.advantages).masked_fill(inputs.chosen > 0, 0.0)
    return LossOutputs(loss, {"actor/m2po_masked": inputs.chosen})


# ---- Variants
# Policy losses of other papers, by what replaces PPO's clip.

SMALLEST = 1e-8  # of the probability of all other tokens, whose logarithm is taken


@policy_loss("gmpo", zero_without_advantage=True)
def gmpo(inputs: LossInputs, options: LossOptions) -> LossOutputs:
    """Return `-A exp(mean_t l_t)`: the geometric mean of a row's ratios, each clipped (GMPO, arXiv:2507.20673, section 3).

    `l_t = min(log r_t, high)` where A > 0, `max(log r_t, -low)` where A < 0: the clip is of the logarithm, to [e^-low, e^high].
    Every token of a row carries the row's loss, as in `gspo`."""
    log_ratio, sign = inputs.logp - inputs.old_logp, inputs.advantages.sign()
    near = log_ratio.clamp(-options.clip_low, options.clip_high)
    kept = sign * (sign * log_ratio).minimum(sign * near)
    loss = -inputs.advantages * row_mean(kept, inputs.mask).exp()
    clipped = (sign * (log_ratio - near) > 0).to(log_ratio.dtype)
    return LossOutputs(loss.expand_as(inputs.mask), {"actor/pg_clipfrac": clipped})


@policy_loss("gpg", zero_without_advantage=True)
def gpg(inputs: LossInputs, options: LossOptions) -> LossOutputs:
    """Return `-A logp`: the policy gradient itself, without ratio and clip (GPG, arXiv:2504.02546, section 2)."""
    return LossOutputs(-inputs.advantages * inputs.logp)


@policy_loss("topr", zero_without_advantage=True)
def topr(inputs: LossInputs, options: LossOptions) -> LossOutputs:
    """Return `-A logp` where A > 0, else `-sg(min(Π_t r_t, 1)) A logp`, the product over the row (TOPR, arXiv:2503.14286)."""
    weight = row_sum(inputs.logp - inputs.old_logp, inputs.mask).detach().clamp(max=0.0).exp()
    weight = weight.where(inputs.advantages < 0, 1.0)
    metrics = {"actor/topr_weight": weight.expand_as(inputs.mask)}
    return LossOutputs(-weight * inputs.advantages * inputs.logp, metrics)


@policy_loss("up", zero_without_advantage=True)
def unbounded_positive(inputs: LossInputs, options: LossOptions) -> LossOutputs:
    """Return `-A logp` where A > 0, else the clipped surrogate (UP, arXiv:2607.06987, equation 15). `dual_clip` as in `ppo`."""
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
    """Return `-sg(φ(W)) A logp`, `φ(W) = W^k exp(λ (1 - W))`, `W = Π_t r_t` over the row (VESPO, arXiv:2602.10693).

    φ(1) = 1; samples far from the policy weigh little on either side. k and λ are the powers and decays, by the sign of A."""
    log_weight: Tensor = row_sum(inputs.logp - inputs.old_logp, inputs.mask).detach()
    negative = inputs.advantages < 0
    power = log_weight.new_full((), power_negative).where(negative, power_positive)
    decay = log_weight.new_full((), decay_negative).where(negative, decay_positive)
    weight = (power * log_weight + decay * (1 - log_weight.exp())).exp()
    metrics = {"actor/vespo_weight": weight.expand_as(inputs.mask)}
    return LossOutputs(-weight * inputs.advantages * inputs.logp, metrics)


@policy_loss("dppo_tv", zero_without_advantage=True)
def dppo_tv(inputs: LossInputs, options: LossOptions) -> LossOutputs:
    """Return `-M r A` with the divergence `|π - μ|` of the sampled token (DPPO-Binary-TV, arXiv:2602.04879): `_within`."""
    return _within((inputs.logp.exp() - inputs.old_logp.exp()).detach().abs(), inputs, options)


@policy_loss("dppo_kl", zero_without_advantage=True)
def dppo_kl(inputs: LossInputs, options: LossOptions) -> LossOutputs:
    """Return `-M r A` with `KL(μ || π)` of the sampled token against all others,
    `μ log(μ / π) + (1 - μ) log((1 - μ) / (1 - π))` (DPPO-Binary-KL, arXiv:2602.04879): `_within`."""
    logp, old = inputs.logp.detach(), inputs.old_logp
    others, old_others = ((-each.expm1()).clamp(min=SMALLEST) for each in (logp, old))
    return _within(old.exp() * (old - logp) + old_others * (old_others / others).log(), inputs, options)


def _within(divergence: Tensor, inputs: LossInputs, options: LossOptions) -> LossOutputs:
    """Return `-M r A`; π is the policy, μ the old one. M is 0 where the divergence [B, T] is above `clip_high` and A > 0 would
    raise a risen probability further, or above `clip_low` and A < 0 would lower a fallen one further; else 1."""
    log_ratio, positive = inputs.logp - inputs.old_logp, inputs.advantages > 0
    bound = divergence.new_full((), options.clip_high).where(positive, options.clip_low)
    outside = (divergence > bound) & (log_ratio * inputs.advantages > 0)
    loss = (-log_ratio.exp() * inputs.advantages).masked_fill(outside, 0.0)
    return LossOutputs(loss, {"actor/pg_clipfrac": outside.to(loss.dtype)})


def row_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of each row, [B, 1], over its masked tokens [B, T]."""
    return (values * mask).sum(-1, keepdim=True)


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of each row, [B, 1], over its masked tokens [B, T]; 0 in a row without any."""
    return row_sum(values, mask) / mask.sum(-1, keepdim=True).clamp(min=1)


def clipped_surrogate(
    logp: Tensor, old_logp: Tensor, advantages: Tensor, options: LossOptions
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return `max(-rA, -clip(r, 1 - low, 1 + high) A)` with `r = exp(logp - old_logp)` (PPO, arXiv:1707.06347, equation 7).

    With `dual_clip` c, `min(L, -cA)` where A < 0 (arXiv:1912.09729, equation 5). Returns the loss and two metrics, 1 on a token
    or 0, as verl has them: `pg_clipfrac` where the clip of the ratio decided L, `pg_clipfrac_lower` where -cA is below L."""
    ratio, dual_clip = (logp - old_logp).exp(), options.dual_clip
    plain, clipped = -ratio * advantages, -ratio.clamp(1 - options.clip_low, 1 + options.clip_high) * advantages
    loss = plain.maximum(clipped)
    beyond = (advantages < 0) & (loss > -dual_clip * advantages) if dual_clip else loss.new_zeros(()).bool()
    metrics = {
        "actor/pg_clipfrac": (clipped > plain).to(loss.dtype),
        "actor/pg_clipfrac_lower": beyond.to(loss.dtype).expand_as(loss),
    }
    return loss.where(~beyond, -dual_clip * advantages), metrics


@policy_loss("ppo", zero_without_advantage=True)
def ppo(inputs: LossInputs, options: LossOptions) -> LossOutputs:
    """Return the clipped surrogate against `old_logp`: the policy that sampled, unless a correction accounts for it."""
    return LossOutputs(*clipped_surrogate(inputs.logp, inputs.old_logp, inputs.advantages, options))


@policy_loss("decoupled", zero_without_advantage=True)
def decoupled(
    inputs: LossInputs, options: LossOptions, *, weight_cap: Positive = 2.0, weight_over: Literal["clamp", "drop"] = "clamp"
) -> LossOutputs:
    """Return `w · ppo`, clipped about the proximal policy, `w = exp(prox - behaviour)` without gradient.

    AReaL, arXiv:2505.24298, equation 5. w is clamped to `weight_cap`, or 0 beyond it, where the token still counts as one."""
    weight = (inputs.proximal_logp - inputs.behaviour_logp).detach().exp()
    loss, clips = clipped_surrogate(inputs.logp, inputs.proximal_logp, inputs.advantages, options)
    beyond = weight > weight_cap
    capped = weight.masked_fill(beyond, 0.0 if weight_over == "drop" else weight_cap)
    return LossOutputs(capped * loss, clips | {"actor/behaviour_capfrac": beyond.to(loss.dtype)})


@policy_loss("cispo", zero_without_advantage=True)
def cispo(inputs: LossInputs, options: LossOptions) -> LossOutputs:
    """Return `-sg(clip(r, 1 - low, 1 + high)) · A · logp`, `r = exp(logp - old_logp)` (equations 4 and 5). No lower bound if
    low >= 1."""
    ratio = (inputs.logp - inputs.old_logp).detach().exp()
    weight = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    loss = -weight * inputs.advantages * inputs.logp
    return LossOutputs(loss, {"actor/pg_clipfrac": (weight != ratio).to(loss.dtype)})


@policy_loss("gspo", zero_without_advantage=True)
def gspo(inputs: LossInputs, options: LossOptions) -> LossOutputs:
    """Return the clipped surrogate with `s_i = exp(mean_t(logp - old_logp))` in place of the token's ratio (equations 5 and 7).

    Every token of a row carries the row's loss: `seq_mean_token_mean` makes the mean over rows of it."""
    log_ratio: Tensor = row_mean(inputs.logp - inputs.old_logp, inputs.mask)
    loss, clips = clipped_surrogate(log_ratio, log_ratio.new_zeros(()), inputs.advantages, options)
    return LossOutputs(loss.expand_as(inputs.mask), clips)


@policy_loss("sapo", zero_without_advantage=True)
def sapo(
    inputs: LossInputs, options: LossOptions, *, tau_positive: Positive = 1.0, tau_negative: Positive = 1.05
) -> LossOutputs:
    """Return `-(4 / τ) sigmoid(τ (r - 1)) A`, `r = exp(logp - old_logp)`. τ is `tau_positive` where A > 0, else `tau_negative`.
    At r = 1 the gradient is that of `-r A`."""
    ratio, advantages = (inputs.logp - inputs.old_logp).exp(), inputs.advantages
    tau = advantages.new_full((), tau_positive).where(advantages > 0, tau_negative)
    return LossOutputs(-4 / tau * (tau * (ratio - 1)).sigmoid() * advantages)


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Return `0.5 max((V - R)², (clip(V, V_old ± c) - R)²)` per token (Schulman et al. 2017; Engstrom et al.,
    arXiv:2005.12729), and a mask of the tokens that the clip decided. All [B, T]."""
    near = values.clamp(old_values - clip, old_values + clip)
    plain, clipped = (values - returns).square(), (near - returns).square()
    return 0.5 * plain.maximum(clipped), clipped > plain


def token_logprobs(
    logits: Tensor, tokens: Tensor, temperature: float = 1.0, *, entropy_gradient: bool = True
) -> tuple[Tensor, Tensor]:
    """Return `log_softmax(logits / T)[token]` and `H = -Σ p log p`.

    logits [N, V], tokens int64 [N] -> log-probabilities [N], entropies [N]; half precision is computed in float32. Without
    `entropy_gradient` the entropies are detached, which saves two [N, V] buffers."""
    scaled = logits if logits.dtype.itemsize >= 4 else logits.float()
    if temperature != 1.0:
        scaled = scaled / temperature
    logp = scaled.log_softmax(-1)
    spread = logp if entropy_gradient else logp.detach()
    return logp.gather(-1, tokens[:, None])[:, 0], -(spread.exp() * spread).sum(-1)


# -------------------------------------------------------------------------------- aggregation: from token values to one number
# Each gives a sum and a count that add up over micro-batches and ranks; the step divides once, at its end. A row without a
# trained token adds nothing here, as such rows fill up batches. An *episode* without a trained token adds `masked_sample`.


@AGGREGATIONS.register("token_mean")
def token_mean(values: Tensor, mask: Tensor, options: AggregationOptions) -> Aggregate:
    """Weigh all trained tokens equally (DAPO, arXiv:2503.14476, equation 12). A masked row has none, and counts 0."""
    return Aggregate((values * mask).sum(), mask.sum())


@AGGREGATIONS.register("seq_mean_token_mean")
def seq_mean_token_mean(values: Tensor, mask: Tensor, options: AggregationOptions) -> Aggregate:
    """Weigh all rows equally, whatever their length (GRPO, arXiv:2402.03300, equation 3). A masked row does not count, as in
    verl's `seq-mean-token-mean`: the mean is over the trained rows."""
    tokens = mask.sum(-1)
    return Aggregate(((values * mask).sum(-1) / tokens.clamp(min=1)).sum(), _trained_rows(tokens))


@AGGREGATIONS.register("episode_mean_token_mean")
def episode_mean_token_mean(values: Tensor, mask: Tensor, options: AggregationOptions) -> Aggregate:
    """Weigh all episodes equally, whatever their size: the mean over an episode's trained tokens, then over episodes. A
    masked episode does not count. Equals `seq_mean_token_mean` if each episode has one row."""
    tokens = mask.sum(-1) if options.episode_tokens is None else options.episode_tokens.sum(-1)
    return Aggregate(((values * mask).sum(-1) / tokens.clamp(min=1)).sum(), _trained_episodes(mask, options))


@AGGREGATIONS.register("seq_mean_token_sum")
def seq_mean_token_sum(values: Tensor, mask: Tensor, options: AggregationOptions) -> Aggregate:
    """Return the mean over rows of their tokens' sum. A masked row does not count, as in verl's `seq-mean-token-sum`."""
    return Aggregate((values * mask).sum(), _trained_rows(mask.sum(-1)))


@AGGREGATIONS.register("dr_grpo")
def dr_grpo(values: Tensor, mask: Tensor, options: AggregationOptions) -> Aggregate:
    """Return `sum / (episodes · norm)`: no length of any sample enters (Dr. GRPO, arXiv:2503.20783, section 3.2).

    A sample of the paper is an episode, with all its rows. A masked episode counts, with a loss of 0 (`masked_sample`), as in
    the authors' code and in TRL: the constant does not depend on the mask, nor do the gradients of other episodes."""
    return Aggregate((values * mask).sum(), _trained_episodes(mask, options) * options.norm)


def masked_sample(name: str, options: AggregationOptions) -> float:
    """Return what an episode without a trained token adds to the count of the aggregation `name`."""
    return options.norm if name == "dr_grpo" else 0.0


def _trained_rows(tokens: Tensor) -> Tensor:
    """Return how many rows have a trained token, from the number of each [B]."""
    return (tokens > 0).to(tokens.dtype).sum()


def _trained_episodes(mask: Tensor, options: AggregationOptions) -> Tensor:
    return _trained_rows(mask.sum(-1)) if options.counts is None else options.counts.sum()


# ------------------------------------------------------------------------------------------- KL(policy || reference) per token
# From x = logp - ref_logp (http://joschu.net/blog/kl-approx.html).


@KL_ESTIMATORS.register("k1")
def k1(x: Tensor) -> Tensor:
    """Return x. Unbiased, of high variance, may be negative."""
    return x


@KL_ESTIMATORS.register("k2")
def k2(x: Tensor) -> Tensor:
    """Return x² / 2. Biased; its gradient is that of the KL."""
    return x.square() / 2


@KL_ESTIMATORS.register("k3_plain")
def k3(x: Tensor) -> Tensor:
    """Return exp(-x) - 1 + x. Unbiased, never negative."""
    return (-x).expm1() + x


@KL_ESTIMATORS.register("k3")
def k3_clamped(x: Tensor) -> Tensor:
    """Return k3, at most 10, so that one far token does not overflow the step. Beyond 10 there is no gradient."""
    return k3(x.clamp(min=-20.0)).clamp(max=10.0)  # an exponential that overflows would make the gradient NaN instead


@KL_ESTIMATORS.register("abs")
def absolute(x: Tensor) -> Tensor:
    """Return |x|."""
    return x.abs()


def importance_weighted(estimate: Tensor, logp: Tensor, behaviour_logp: Tensor) -> Tensor:
    """Return `exp(logp - behaviour_logp) · estimate`: unbiased, gradient included, for tokens that another policy sampled.

    Of k3 as in DeepSeek-V3.2, arXiv:2512.02556. The exponent is held within ±20."""
    return (logp - behaviour_logp).clamp(-20.0, 20.0).exp() * estimate


LARGEST_ERROR = 0.2


@dataclass(frozen=True)
class KlControl:
    """β, which stays, or with a `target` adapts: `β ← β (1 + clip(kl / target - 1, ±0.2) · n / horizon)` (Ziegler et al.,
    arXiv:1909.08593, section 2.2). `horizon`: in samples."""

    coefficient: float
    target: float = 0.0
    horizon: float = 1.0

    def after(self, kl: float, samples: float) -> KlControl:
        """Return the control after a step of `samples` samples. `kl` is the step's mean estimate per token."""
        if not self.target:
            return self
        error = min(max(kl / self.target - 1, -LARGEST_ERROR), LARGEST_ERROR)
        return replace(self, coefficient=self.coefficient * (1 + error * samples / self.horizon))


# ------------------------------------------------- weights for the gap between the engine that sampled and the one that trains
# Each correction takes `log_weight` = proximal - behaviour log-probabilities [B, T], and gives weights without gradient. The
# policy loss is multiplied by them; its average stays over the original mask.


@CORRECTIONS.register("token_tis")
def token_tis(log_weight: Tensor, mask: Tensor, options: CorrectionOptions) -> CorrectionOutputs:
    """Return `min(w_t, C)`, [B, T]: truncated importance sampling (Ionides 2008; per token as in Yao et al. 2025, "Your
    efficient RL framework secretly brings you off-policy RL training")."""
    weight = log_weight.detach().exp()
    return CorrectionOutputs(weight.clamp(max=options.cap), weight > options.cap)


@CORRECTIONS.register("sequence_tis")
def sequence_tis(log_weight: Tensor, mask: Tensor, options: CorrectionOptions) -> CorrectionOutputs:
    """Return `min(Π_t w_t, C)`, [B, 1]: the weight of the whole sample, truncated."""
    weight = row_sum(log_weight.detach(), mask).exp()
    return CorrectionOutputs(weight.clamp(max=options.cap), weight > options.cap)


@CORRECTIONS.register("icepop")
def icepop(log_weight: Tensor, mask: Tensor, options: CorrectionOptions) -> CorrectionOutputs:
    """Return `w_t` where `low <= w_t <= high`, else 0, [B, T] (IcePop, arXiv:2510.18855)."""
    weight = log_weight.detach().exp()
    outside = (weight < options.low) | (weight > options.high)
    return CorrectionOutputs(weight.masked_fill(outside, 0.0), outside)


@CORRECTIONS.register("geometric_mask")
def geometric_mask(log_weight: Tensor, mask: Tensor, options: CorrectionOptions) -> CorrectionOutputs:
    """Return 1 for rows with `low <= exp(mean_t log w_t) <= high`, else 0, [B, 1]. Length does not shift this mean."""
    weight = row_mean(log_weight.detach(), mask).exp()
    outside = (weight < options.low) | (weight > options.high)
    return CorrectionOutputs((~outside).to(weight.dtype), outside)


def interpolated_proximal(logp: Tensor, behaviour_logp: Tensor, staleness: Tensor) -> Tensor:
    """Return `α behaviour + (1 - α) logp`, `α = 1 / d` where a token is d >= 1 versions old and 0 where it is fresh
    (A-3PO, arXiv:2512.06547): the policy one version before `logp`, were versions steps on a straight line.

    All [B, T], `staleness` the integer d of each token by the version that sampled it. Without gradient."""
    share = staleness.clamp(min=1).to(logp.dtype).reciprocal().masked_fill(staleness < 1, 0.0)
    return logp.detach() + share * (behaviour_logp - logp.detach())
