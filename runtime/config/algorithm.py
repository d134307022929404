"""The algorithm: what the loss is made of."""

from __future__ import annotations

from typing import Any, Literal

from runtime.config.base import Fraction, Positive, PositiveRate, Rate, Samples, Section, TokensOr0


class Algorithm(Section, frozen=True):
    """An algorithm is data: advantage, loss, correction, aggregation and KL, each by its registered name or `FILE.py:NAME`."""

    preset: str = ""
    """`grpo`, `dr_grpo`, `dapo`, `gspo`, `cispo`, `rloo`, `reinforce_plus_plus`, `ppo`, `gmpo`, `gpg`, `opo`, `clip_cov`,
    `kl_cov`, `dppo`, `vespo`, `distillation`, or a path to a YAML file: values for keys that are left out. Empty: none."""
    advantage: str = "group_norm"
    """`group_norm`: (reward − mean of the group) / (its deviation + eps); `rloo`: reward − mean of the others in the group;
    `opo`: reward − mean of the group, weighted by length; `gpg`: reward − mean of the group, scaled up for the groups whose
    rewards are all equal; `reinforce_plus_plus`: discounted return per token, whitened over the batch;
    `reinforce_plus_plus_baseline`: reward − mean of the group, whitened over the batch; `gae`: generalised advantage
    estimation, with a `critic`; `none`: 0, whatever the rewards, so that the KL term alone is learned from."""
    advantage_options: dict[str, Any] = {}
    """Options of the advantage's function: its arguments after the first two. Of `group_norm`: `ddof` (1: unbiased deviation;
    0: of the population) and `eps` (1e-6, added to the deviation); of `gae`: `whitened` (true: over the whole batch)."""
    group_std: Literal["group", "batch", "none"] = "group"
    """What `group_norm` divides by: the deviation of the `group`, of the whole `batch`, or `none`."""
    gamma: Fraction = 1.0
    """Discount per token of `reinforce_plus_plus` and `gae`."""
    turn_discount: Fraction = 1.0
    """Of a turn's reward, for each turn before it. With `reinforce_plus_plus` and `gae`, `gamma` discounts it, per token."""
    gae_lambda: Fraction = 1.0
    """λ of `gae`."""
    dynamic_sampling: bool = False
    """Drop each group whose valid rewards are all equal, as it is scored, and sample another prompt in its place (DAPO). Needs
    `sampling.group_size` of 2 or more."""
    dynamic_sampling_limit: Positive = 20
    """The run ends in order when so many times `training.groups_per_step` groups were dropped for one step, still not full."""
    overlong_buffer: Fraction = 0.0
    """Share of `sampling.max_new_tokens` over which a penalty grows from 0 to `overlong_penalty`; 0: off."""
    overlong_penalty: Rate = 1.0
    """Subtracted from the reward of the longest replies, where there is an `overlong_buffer`."""
    missing_eos_penalty: Rate = 0.0
    """Subtracted from the reward of replies cut off by length."""
    truncated: Literal["train", "mask"] = "train"
    """Replies cut off by length, and episodes whose last row was: `train` on them, or `mask`: no token of them is trained, nor
    counted in averages over tokens; their rewards still count in the group."""
    loss: str = "decoupled"
    """`decoupled`: clipped about the policy at the start of the step, weighted by proximal / behaviour probability; `ppo`:
    clipped about the policy that sampled; `gspo`: the same with one ratio a sample; `cispo`: the ratio is a clipped weight, and
    every token keeps its gradient; `sapo`: a smooth gate in place of the clip; `gmpo`: the geometric mean of a sample's clipped
    ratios; `gpg`: no ratio; `dppo_tv`, `dppo_kl`: tokens are left out by the divergence in place of the ratio; `vespo`: a
    smooth weight a sample; `up`: `gpg` where the advantage is positive, else `ppo`; `topr`: likewise, else a sample's ratio,
    up to 1, as its weight; `m2po`: no clip, without the tokens of the largest ratios; `clip_cov`: `ppo` without some tokens,
    and `kl_cov`: a KL on some, of high covariance of advantage and log-probability."""
    loss_options: dict[str, Any] = {}
    """By name, what the loss's function takes besides its two arguments. `decoupled`: `weight_cap` (2, the largest weight) and
    `weight_over` (`clamp` a larger one, or `drop` its token); `sapo`: `tau_positive` (1) and `tau_negative` (1.05), how steep
    the gate is, by the sign of the advantage; `clip_cov`, `kl_cov`: `share` (0.0002) of the step's tokens, one at least;
    `clip_cov`: `low` (1) and `high` (5), the covariances between which tokens are drawn; `kl_cov`: `kl` (1), the coefficient;
    `m2po`: `threshold` (0.04), the mean of (log ratio)² over the tokens that stay; `vespo`: `power_positive`,
    `decay_positive`, `power_negative`, `decay_negative`."""
    aggregation: str = "token_mean"
    """Over the whole step: `token_mean`, `seq_mean_token_mean`, `seq_mean_token_sum` or `dr_grpo` (sum / (episodes ·
    `aggregation_norm`)); `episode_mean_token_mean`: every episode weighs the same, however many branches it has. `gspo` and
    `gmpo` need `seq_mean_token_mean`, or `seq_mean_token_sum`, by which a sample weighs as much as it is long (LUSPO)."""
    aggregation_norm: TokensOr0 = 0
    """The constant length of `dr_grpo`. 0: `sampling.max_new_tokens`."""
    clip_low: Rate = 0.2
    """The ratio is clipped from 1 − this value on."""
    clip_high: Rate = 0.28
    """The ratio is clipped to 1 + this value at most."""
    dual_clip: Rate = 0.0
    """Above 1: bounds the loss of tokens with a negative advantage by so many times the advantage; 0: off."""
    proximal: Literal["recomputed", "interpolated"] = "recomputed"
    """The policy at the start of the step, if the loss takes it: `recomputed` by a forward pass (the loss's own, if the step
    makes one update), or `interpolated` between the policy that sampled and the trained one, by a token's age (A-3PO)."""
    correction: str = "none"
    """For the gap between sampling and training: `token_tis`, `sequence_tis`, `icepop`, `geometric_mask`; the loss is then
    clipped about the policy at the start of the step."""
    correction_cap: PositiveRate = 2.0
    """The largest weight of `token_tis` and `sequence_tis`."""
    correction_low: Rate = 0.5
    """The smallest weight that `icepop` and `geometric_mask` keep."""
    correction_high: Rate = 5.0
    """The largest weight that they keep."""
    kl: str = "k3"
    """Estimator of the KL to the reference: `k1`, `k2`, `k3` (clamped), `k3_plain`, `abs`."""
    kl_coefficient: Rate = 0.0
    """β; 0: no KL term, and no reference service. Above 0 the log-probabilities come from where `reference.source` says."""
    kl_placement: Literal["loss", "reward", "advantage"] = "loss"
    """In the `loss`, or, with the log-probabilities as sampled, subtracted from the `reward` at each token or from its
    `advantage`: a token then answers for its own part of the KL alone, as in on-policy distillation."""
    kl_importance_weighted: bool = False
    """Weigh the estimate in the loss by the policy's probability over the sampling one's: unbiased for old samples."""
    kl_target: Rate = 0.0
    """Above 0: β moves so that the KL per token approaches this; 0: β stays."""
    kl_horizon: Samples = 10_000
    """Samples over which β moves."""
    entropy_coefficient: Rate = 0.0
    """How much entropy is rewarded."""
