"""Advantages, from the rewards of samples, their groups' and a critic's values; and what is added to a reward before."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Literal

from runtime.algorithms.interfaces import AdvantageInputs, AdvantageOptions, NonNegative, advantage, own_part

if TYPE_CHECKING:
    from torch import Tensor


class GroupSums:
    """The rewards of B episodes by group. An episode that is not valid counts nowhere, whatever its reward.

    rewards [B], groups int64 [B] from 0, valid bool [B] or None for all."""

    def __init__(self, rewards: Tensor, groups: Tensor, valid: Tensor | None):
        self.weight = rewards.new_ones(rewards.shape) if valid is None else valid.to(rewards.dtype)
        self.rewards = rewards.where(self.weight > 0, rewards.new_zeros(()))
        self._groups = groups
        self._count = int(groups.max()) + 1 if groups.numel() else 0
        size = self.sums(self.weight)
        self.size = size[groups]  # [B], of each sample's group
        self.sum = self.sums(self.rewards)[groups]  # [B]

    def sums(self, values: Tensor) -> Tensor:
        """Return [number of groups], from values [B]."""
        return values.new_zeros(self._count).index_add(0, self._groups, values)

    def equal(self) -> Tensor:
        """Return whether the rewards of the sample's group are all equal, bool [B]."""
        low, high = (
            self.rewards.new_full((self._count,), sign * float("inf")).scatter_reduce(
                0, self._groups, self.rewards.masked_fill(self.weight == 0, sign * float("inf")), reduction
            )
            for sign, reduction in ((1, "amin"), (-1, "amax"))
        )
        return (low >= high)[self._groups]

    def deviation(self) -> Tensor:
        """Return `r - mean_g`, [B]: 0 in a group of equal rewards, r in a group of one, 0 where not valid."""
        single = self.size <= 1
        mean = (self.sum / self.size.clamp(min=1)).masked_fill(single, 0.0)
        # Rounding leaves the mean of equal rewards off by an ulp, which eps would not hide.
        return ((self.rewards - mean) * self.weight).where(~self.equal() | single, 0.0)


EPS = 1e-8


def whiten(values: Tensor, mask: Tensor, batch_sum: Callable[[Tensor], Tensor] = own_part) -> Tensor:
    """Return `(x - mean) / sqrt(var + 1e-8)` with moments of the masked values, variance unbiased; 0 outside the mask. [B, T].

    `batch_sum` adds up a tensor over the parts of the batch. The square of a sum would lose digits where the mean is large."""
    count = batch_sum(mask.sum())
    mean = batch_sum((values * mask).sum()) / count.clamp(min=1)
    centred = (values - mean) * mask
    variance = batch_sum(centred.square().sum()) / (count - 1).clamp(min=1)
    return centred / (variance + EPS).sqrt()


# ------------------------------------------------------------------------------------------------ rewards and values per token
# Tokens outside the mask are skipped as if they were not there. All tensors [B, T] of one dtype; what comes out is 0 outside
# the mask.


def token_rewards(rewards: Tensor, mask: Tensor, penalties: Tensor | None = None) -> Tensor:
    """Return `1[t = last] R - penalty_t` (Ziegler et al., arXiv:1909.08593): rewards [B] -> [B, T].

    A row without a masked token has no last one: all its rewards are 0."""
    last = (mask.cumsum(1) == mask.sum(1, keepdim=True)) & (mask > 0)
    out = last * rewards[:, None]
    return out if penalties is None else out - penalties * mask


def returns_to_go(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Return `G_t = r_t + γ G_{t+1}`, t + 1 being the next masked token."""
    order = _trained_first(mask)
    return _restore(_accumulate((rewards * mask).gather(1, order), mask, gamma), order) * mask


def token_gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Return advantages and returns (GAE, arXiv:1506.02438, equation 16).

    `δ_t = r_t + γ V_{t+1} - V_t`, V after the last masked token being 0; `A_t = δ_t + γλ A_{t+1}`; returns `A + V`; t + 1 is
    the next masked token. The actions are the policy's own tokens. What an environment wrote between two of them belongs to the
    transition from one state to the next: it has no δ, and neither γ nor λ discounts for it. (Search-R1, arXiv:2503.09516,
    section 3.1, leaves such tokens out of PPO's loss likewise; verl's `compute_gae_advantage_return` steps over them.)"""
    order = _trained_first(mask)
    reward, value = ((tensor * mask).gather(1, order) for tensor in (rewards, values))
    following = value.new_zeros(value.shape)
    following[:, :-1] = value[:, 1:]
    advantages = _restore(_accumulate(reward + gamma * following - value, mask, gamma * lam), order) * mask
    return advantages, advantages + values * mask


def _trained_first(mask: Tensor) -> Tensor:
    """Return int64 [B, T]: the masked tokens of each row in order, then the others."""
    return mask.argsort(dim=1, descending=True, stable=True)


def _restore(packed: Tensor, order: Tensor) -> Tensor:
    return packed.new_zeros(packed.shape).scatter(1, order, packed)


def _accumulate(packed: Tensor, mask: Tensor, decay: float) -> Tensor:
    """Return `y_t = x_t + decay · y_{t+1}` along rows that hold zeros after their masked tokens."""
    out = packed.clone()
    longest = int(mask.sum(1).max()) if mask.numel() else 0
    for t in range(longest - 2, -1, -1):
        out[:, t] += decay * out[:, t + 1]
    return out


def group_norm(
    rewards: Tensor,
    groups: Tensor,
    valid: Tensor | None = None,
    *,
    eps: float = 1e-6,
    ddof: int = 1,
    scale: str = "group",
    batch_sum: Callable[[Tensor], Tensor] = own_part,
) -> Tensor:
    """Return `(r - mean_g) / (std_g + eps)` per sample, [B] (GRPO, arXiv:2402.03300, section 4.1.2).

    `scale` is "group", "batch" (the standard deviation of all valid rewards) or "none" (Dr. GRPO, arXiv:2503.20783, section
    3.2). Only valid samples count; others get 0. Equal rewards give exactly 0; a group of one: mean 0, deviation 1."""
    within = GroupSums(rewards, groups, valid)
    deviation = within.deviation()
    if scale == "none":
        return deviation
    if scale == "batch":
        total = batch_sum(within.weight.sum())
        mean = batch_sum(within.rewards.sum()) / total.clamp(min=1)
        squares = batch_sum(((within.rewards - mean) * within.weight).square().sum())
        return deviation / ((squares / (total - ddof).clamp(min=1)).sqrt() + eps)
    squares = within.sums(deviation.square())[groups]
    std = (squares / (within.size - ddof).clamp(min=1)).sqrt().masked_fill(within.size <= 1, 1.0)
    return deviation / (std + eps)


def rloo(rewards: Tensor, groups: Tensor, valid: Tensor | None = None) -> Tensor:
    """Return `r_i - mean of the others in the group`, [B] (RLOO, arXiv:2402.14740, section 3).

    Only valid samples count; the others get 0. A group of one keeps its reward."""
    within = GroupSums(rewards, groups, valid)
    # r - (S - r) / (n - 1) = n / (n - 1) · (r - S / n)
    return within.deviation() * (within.size / (within.size - 1).clamp(min=1)).clamp(min=1)


def opo(rewards: Tensor, groups: Tensor, lengths: Tensor, valid: Tensor | None = None) -> Tensor:
    """Return `r_i - Σ_j l_j r_j / Σ_j l_j` over the group, [B] (OPO, arXiv:2505.23585, section 3). The baseline has the least
    variance if the squared gradient of a sample is proportional to the length of the sample.

    lengths [B], in trained tokens. Only valid samples count; the others get 0. A group of one keeps its reward."""
    within = GroupSums(rewards, groups, valid)
    weight = lengths * within.weight
    baseline = (within.sums(weight * within.rewards) / within.sums(weight).clamp(min=1))[groups]
    single = within.size <= 1
    deviation = (within.rewards - baseline.masked_fill(single, 0.0)) * within.weight
    return deviation.where(~within.equal() | single, 0.0)


# Rewards of turns, for estimators with one advantage for a whole episode: process supervision of GRPO (DeepSeekMath,
# arXiv:2402.03300, section 4.1.3). The rewarded turns of a group are normalised together, as its episodes are. A token's
# advantage is the advantage of its episode plus those of its own turn and of the later turns of its row.


def rloo_turns(values: Tensor, groups: Tensor, episodes: Tensor) -> Tensor:
    """Return `r - mean of the rewards of turns of the group's other episodes`, [K]; r where the others have no such reward.
    `groups` and `episodes`: int64 [K], from 0."""
    deviation = GroupSums(values, groups, None).deviation()  # exactly 0 where all are equal
    of_group, own = GroupSums(deviation, groups, None), GroupSums(deviation, episodes, None)
    others = of_group.size - own.size
    return (deviation - (of_group.sum - own.sum) / others.clamp(min=1)).where(others > 0, values)


def centred(rewards: Tensor, groups: Tensor, valid: Tensor | None = None) -> Tensor:
    """Return `GroupSums.deviation`, [B]."""
    return GroupSums(rewards, groups, valid).deviation()


def with_turns(
    inputs: AdvantageInputs,
    options: AdvantageOptions,
    of_episodes: Callable[..., Tensor],
    of_turns: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda values, groups, episodes: centred(values, groups),
) -> Tensor:
    """Return `A_t + Σ_{u >= turn of t} d^(u - turn of t) r_u`, [B, T]; [B, 1] if no turn was rewarded. A turn is a run of
    trained tokens along a row; r_u is the sum of the rewards at the tokens of turn u; d is `turn_discount`.

    `of_episodes` gives A of (rewards, groups, valid) of the episodes; `of_turns` gives the rewards of turns, [K], normalised,
    of their (values, groups, episodes)."""
    episodes = of_episodes(*map(inputs.of_episodes, (inputs.rewards, inputs.groups, inputs.valid)))
    advantages, turns = inputs.of_rows(episodes), inputs.turns
    at = inputs.groups.new_zeros(0) if turns is None else turns.rows
    values = inputs.rewards[:0] if turns is None else turns.values
    normalised = of_turns(values, inputs.groups[at], inputs.episodes[at])  # also without turns: it may sum over the batch
    if turns is None or not len(at):
        return advantages[:, None]
    trained = inputs.mask > 0
    begins = trained.clone()
    begins[:, 1:] &= ~trained[:, :-1]
    turn = begins.cumsum(1) - 1  # of each trained token
    earned = advantages.new_zeros(len(turn), int(turn.max()) + 1)
    earned = earned.index_put((at, turn[at, turns.tokens]), normalised, accumulate=True)
    to_go = _accumulate(earned, earned.new_ones(earned.shape), options.turn_discount)
    return (advantages[:, None] + to_go.gather(1, turn.clamp(min=0))) * inputs.mask


@advantage("group_norm", streamable=lambda options: options.group_std != "batch")
def group_norm_advantage(
    inputs: AdvantageInputs, options: AdvantageOptions, *, ddof: Literal[0, 1] = 1, eps: NonNegative = 1e-6
) -> Tensor:
    """Return `group_norm`; rewards of turns are normalised likewise, over all rewards of turns of the group or batch."""
    norm = partial(group_norm, eps=eps, ddof=ddof, scale=options.group_std, batch_sum=inputs.batch_sum)
    return with_turns(inputs, options, norm, lambda values, groups, episodes: norm(values, groups))


@advantage("rloo", streamable=True)
def rloo_advantage(inputs: AdvantageInputs, options: AdvantageOptions) -> Tensor:
    """Return `rloo`, with `rloo_turns` for rewards of turns."""
    return with_turns(inputs, options, rloo, rloo_turns)


@advantage("opo", streamable=True)
def opo_advantage(inputs: AdvantageInputs, options: AdvantageOptions) -> Tensor:
    """Return `opo`; rewards of turns are `r - mean` over all rewards of turns of the group."""
    tokens = inputs.mask.sum(1)
    lengths = tokens.new_zeros(len(inputs.of_episodes(tokens))).index_add(0, inputs.episodes, tokens)
    return with_turns(inputs, options, lambda rewards, groups, valid: opo(rewards, groups, lengths, valid))


@advantage("gpg", streamable=False)
def gpg_advantage(inputs: AdvantageInputs, options: AdvantageOptions) -> Tensor:
    """Return `α (r_i - mean_g)` (GPG, arXiv:2504.02546, section 2; F_norm is 1). α is the number of the batch's samples over
    the number of samples whose group has unequal rewards: the other samples are averaged over, but have no gradient. Rewards of
    turns are `α (r - mean)` over all rewards of turns of the group."""
    within = GroupSums(*map(inputs.of_episodes, (inputs.rewards, inputs.groups, inputs.valid)))
    counted, unequal = (inputs.batch_sum(each.sum()) for each in (within.weight, within.weight * ~within.equal()))
    return counted / unequal.clamp(min=1) * with_turns(inputs, options, centred)


@advantage("reinforce_plus_plus", streamable=False)
def reinforce_plus_plus(inputs: AdvantageInputs, options: AdvantageOptions) -> Tensor:
    """Return the discounted returns to go of `1[t = last] R - β KL_t` and the turns' rewards, [B, T], whitened (section 3)."""
    returns = returns_to_go(inputs.token_rewards, inputs.mask, options.gamma)
    return whiten(returns, inputs.mask, inputs.batch_sum)


@advantage("reinforce_plus_plus_baseline", streamable=False)
def reinforce_plus_plus_baseline(inputs: AdvantageInputs, options: AdvantageOptions) -> Tensor:
    """Return `r_i - mean_g`, [B, T], whitened over the batch: an episode counts once for each trained token. Rewards of turns
    are `r - mean` over all rewards of turns of the group, before the whitening."""
    advantages = with_turns(inputs, options, centred)
    return whiten(advantages.expand_as(inputs.mask), inputs.mask, inputs.batch_sum)


@advantage("gae", streamable=lambda options, *, whitened=True: not whitened, needs_values=True)
def gae(inputs: AdvantageInputs, options: AdvantageOptions, *, whitened: bool = True) -> Tensor:
    """Return the advantages [B, T], `whitened` over all trained tokens of the batch (PPO, arXiv:1707.06347)."""
    advantages, _ = _estimate(inputs, options)
    return whiten(advantages, inputs.mask, inputs.batch_sum) if whitened else advantages


def value_targets(inputs: AdvantageInputs, options: AdvantageOptions) -> Tensor:
    """Return the returns `A + V` [B, T] of the same estimate, before any whitening. They are the critic's targets."""
    return _estimate(inputs, options)[1]


def _estimate(inputs: AdvantageInputs, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    assert inputs.values is not None  # `needs_values`
    return token_gae(inputs.token_rewards, inputs.values, inputs.mask, gamma=options.gamma, lam=options.gae_lambda)


@advantage("none", streamable=True)
def no_advantage(inputs: AdvantageInputs, options: AdvantageOptions) -> Tensor:
    """Return 0 [B, 1], whatever the rewards: only the KL term is learned from."""
    return inputs.rewards.new_zeros(len(inputs.rewards), 1)


def less_divergence(advantages: Tensor, divergence: Tensor, mask: Tensor, coefficient: float) -> Tensor:
    """Return `A_t - β D_t` at the trained tokens, [B, T]. `advantages` is [B, T] or [B, 1]; D is `divergence`, an estimate of
    the KL at each token.

    On-policy distillation: with k1, `D_t = log π(y_t) - log π_teacher(y_t)` of tokens that π sampled. The policy gradient
    `E_π[Σ_t D_t ∇ log π(y_t)]` is the gradient of the reverse KL, `Σ_t KL(π || teacher)` at the states that π reaches. No
    token answers for later tokens: the discount is 0. Thinking Machines Lab, "On-Policy Distillation" (2025), where A = 0 and
    β = 1; Qwen3 (arXiv:2505.09388, section 4.5); GKD (arXiv:2306.13649, section 3), which takes D over the whole
    vocabulary, and mixes it with a reward in the same way (section 3.1)."""
    return (advantages - coefficient * divergence) * mask


def has_signal(rewards: Iterable[float], valid: Iterable[bool]) -> bool:
    """Return whether the valid rewards of a group are not all equal (dynamic sampling; DAPO, arXiv:2503.14476, section 3.2)."""
    return len({reward for reward, counts in zip(rewards, valid, strict=True) if counts}) > 1


def soft_overlong_penalty(lengths: Tensor, max_length: int, buffer: int) -> Tensor:
    """Return 0 up to `max_length - buffer` tokens, falling to -1 at `max_length`, and -1 beyond (DAPO, equation 13).

    lengths float [B] -> [B]; `buffer` is at least 1."""
    return ((max_length - buffer - lengths) / buffer).clamp(-1.0, 0.0)


def missing_eos_penalty(truncated: Tensor, penalty: float) -> Tensor:
    """Return `-penalty` where generation stopped by length, else 0, [B]. `truncated` is 1.0 or 0.0, [B]."""
    return -penalty * truncated
