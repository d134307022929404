"""The inputs, options and outputs of the registered functions. B rows, T response positions, float tensors of one dtype.

A row is a reply, or a branch of an episode; the branches of an episode follow one another. `mask` is 1.0 on trained response
tokens; rows may be ragged, have gaps (an environment's text), or be fully masked. Values outside are finite and meaningless."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

from runtime.errors import UserError
from runtime.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor


Positive = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]


def own_part(part: Tensor) -> Tensor:
    """Return the sum over a batch that has a single part."""
    return part


@dataclass(frozen=True)
class TurnRewards:
    """K rewards of turns, each at a trained token of a row that is valid: the last one of the turn."""

    rows: Tensor  # int64 [K]
    tokens: Tensor  # int64 [K], in the row
    values: Tensor  # [K]


@dataclass(frozen=True)
class AdvantageInputs:
    """One part of a step's batch: a whole number of groups, each with all rows of its episodes.

    `rewards` is an episode's reward less its KL penalties where `algorithm.kl_placement` is "reward", as a sum over all of its
    rows. `token_rewards` has the reward at the last trained token of each of its rows, since each branch is a trajectory of its
    own that ends with what the episode earned; penalties and rewards of turns at their own tokens. Both are 0 in rows that are
    not valid. `batch_sum` adds up a tensor over all parts of the batch. Every part must call it equally often, with equal
    shapes; only an estimator that is not streamable may call it."""

    rewards: Tensor  # [B], of the row's episode
    groups: Tensor  # int64 [B], ids from 0 to the number of groups - 1
    valid: Tensor  # bool [B]; a row that is not valid has no reward, and its advantage is 0
    mask: Tensor  # [B, T]
    token_rewards: Tensor  # [B, T], 0 outside the mask
    values: Tensor | None = None  # [B, T], the critic's, for an estimator that needs them
    batch_sum: Callable[[Tensor], Tensor] = own_part
    leads: Tensor | None = None  # bool [B], whether a row is its episode's first; None: each row is an episode
    turns: TurnRewards | None = None  # None: no turn was rewarded

    @property
    def episodes(self) -> Tensor:
        """int64 [B], from 0: of each row."""
        return (self.groups.new_ones(self.groups.shape) if self.leads is None else self.leads).cumsum(0) - 1

    def of_episodes(self, values: Tensor) -> Tensor:
        """Return one value for each episode, [episodes], from those of its rows [B]."""
        return values if self.leads is None else values[self.leads]

    def of_rows(self, values: Tensor) -> Tensor:
        """Return the value of each row's episode, [B], from [episodes]."""
        return values if self.leads is None else values[self.episodes]


@dataclass(frozen=True)
class AdvantageOptions:
    """`group_std` is `group_norm`'s; `gamma` discounts the rewards of later tokens; `gae_lambda` is `gae`'s. `turn_discount` is
    that of a turn's reward for each turn before it."""

    group_std: str = "group"
    gamma: float = 1.0
    gae_lambda: float = 1.0
    turn_discount: float = 1.0


Streamable = bool | Callable[..., bool]


@dataclass(frozen=True)
class AdvantageEstimator:
    """`compute` gives [B, T] or [B, 1]; the rest is as in `advantage`."""

    compute: Callable[[AdvantageInputs, AdvantageOptions], Tensor]
    streamable: Streamable
    needs_values: bool = False

    def streams(self, options: AdvantageOptions) -> bool:
        return self.streamable if isinstance(self.streamable, bool) else self.streamable(options)


@dataclass(frozen=True)
class LossInputs:
    """All [B, T] but `advantages`, which may be [B, 1]. `mask` is 1.0 on trained tokens, 0.0 elsewhere, where values are finite
    and meaningless. Rows are whole: a row is never split over calls, but an episode's rows may be in several.

    `behaviour_logp` is the policy that sampled, as the engine that sampled computed it; `proximal_logp` the policy at the
    start of the step (detached). `old_logp` is the one that ratios are taken against: the proximal policy where
    `algorithm.correction` accounts for the gap between both, else the behaviour policy. `chosen`, 1 or 0, is what a loss that
    chooses among the tokens of the step has chosen; None for other losses."""

    logp: Tensor
    old_logp: Tensor
    proximal_logp: Tensor
    behaviour_logp: Tensor
    advantages: Tensor
    mask: Tensor
    chosen: Tensor | None = None


@dataclass(frozen=True)
class LossOptions:
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]; `dual_clip` 0 is off."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 0.0


@dataclass(frozen=True)
class LossOutputs:
    """`loss` is [B, T], one value a token. Each of `metrics`, by the name it is reported under, is [B, T] or [B, 1]; what is
    reported is its mean over the trained tokens of the step."""

    loss: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class CorrectionOptions:
    """`cap` truncates weights from above; `low` and `high` bound what a mask keeps."""

    cap: float = 2.0
    low: float = 0.5
    high: float = 5.0


@dataclass(frozen=True)
class CorrectionOutputs:
    """`weight` multiplies the policy loss; `altered` (bool) marks where it was truncated or masked. [B, T] or [B, 1]."""

    weight: Tensor
    altered: Tensor


@dataclass(frozen=True)
class AggregationOptions:
    """`norm` is the constant length that `dr_grpo` divides by, in tokens.

    `episode_tokens` and `counts` are set if an episode has several rows. Of each row, `episode_tokens` is the number of trained
    tokens of its episode; `counts` is 1 in the first row of an episode that has a trained token, else 0."""

    norm: float = 1.0
    episode_tokens: Tensor | None = None  # [B, 1]
    counts: Tensor | None = None  # [B, 1]


@dataclass(frozen=True)
class Aggregate:
    """`total / count` is the mean. Both are sums over rows, so that parts of a batch add up to the whole."""

    total: Tensor  # []
    count: Tensor  # [], detached


@dataclass(frozen=True)
class StepTokens:
    """The trained tokens of one part of a step's batch, float64 on the host."""

    advantages: Tensor  # [N]
    logp: Tensor  # [N], as the engine that sampled computed them
    draws: Tensor  # [N], uniform in [0, 1), the same however the batch is shared out
    start: Tensor | None = None  # [N], under the weights at the start of the step, for a loss that chooses by them


BatchSum = Callable[["Tensor"], "Tensor"]  # as of `AdvantageInputs`
Choice = Callable[..., "Tensor"]  # of StepTokens, BatchSum, and options by keyword: bool [N]


@dataclass(frozen=True)
class PolicyLoss:
    """A function with its properties, as in `policy_loss`."""

    compute: Callable[[LossInputs, LossOptions], LossOutputs]
    zero_without_advantage: bool
    chooses: Choice | None = None
    by_start: bool = False


CorrectionFunction = Callable[["Tensor", "Tensor", CorrectionOptions], CorrectionOutputs]  # proximal - behaviour, mask
KlEstimator = Callable[["Tensor"], "Tensor"]  # logp - ref_logp to the estimate, elementwise
Aggregation = Callable[["Tensor", "Tensor", AggregationOptions], Aggregate]  # values [B, T], mask [B, T]

ADVANTAGES: Registry[AdvantageEstimator] = Registry("algorithm.advantage")
POLICY_LOSSES: Registry[PolicyLoss] = Registry("algorithm.loss")
CORRECTIONS: Registry[CorrectionFunction] = Registry("algorithm.correction")
"""`@CORRECTIONS.register(NAME)` adds a function of (proximal less behaviour log-probabilities [B, T], mask [B, T], options)
that gives CorrectionOutputs. The options have `cap`, `low` and `high`."""
KL_ESTIMATORS: Registry[KlEstimator] = Registry("algorithm.kl")
"""`@KL_ESTIMATORS.register(NAME)` adds an elementwise function of the policy's less the reference's log-probabilities."""
AGGREGATIONS: Registry[Aggregation] = Registry("algorithm.aggregation")
"""`@AGGREGATIONS.register(NAME)` adds a function of (values [B, T], mask [B, T], options) that gives an Aggregate. The options
have `norm`, `episode_tokens` and `counts`."""


AdvantageFunction = Callable[[AdvantageInputs, AdvantageOptions], "Tensor"]
LossFunction = Callable[[LossInputs, LossOptions], LossOutputs]


def advantage(
    name: str, *, streamable: Streamable, needs_values: bool = False
) -> Callable[[AdvantageFunction], AdvantageFunction]:
    """Decorator that registers an advantage function, of (AdvantageInputs, AdvantageOptions), and returns it as it is. It gives
    [B, T], or [B, 1] where all tokens of a row share one advantage.

    `streamable`: the advantages of a group need nothing but that group, so that a step may accumulate group by group; True,
    False, or a function of the options, which takes those of `algorithm.advantage_options` by keyword.
    `needs_values`: it takes a critic's values, so that the run has to have one."""
    return ADVANTAGES.register_made(name, lambda compute: AdvantageEstimator(compute, streamable, needs_values))


def policy_loss(
    name: str, *, zero_without_advantage: bool, chooses: Choice | None = None, by_start: bool = False
) -> Callable[[LossFunction], LossFunction]:
    """Decorator that registers a policy loss, a function of (LossInputs, LossOptions) to LossOutputs, and returns it as it is.

    `zero_without_advantage`: where a row's advantages are all 0, so is its loss; such rows need no backward pass. `chooses`: a
    function of (StepTokens, BatchSum), and of `algorithm.loss_options` by keyword, that says for the whole step which tokens
    are trained, as `LossInputs.chosen`; the step then waits for its whole batch. `by_start`: that needs
    `StepTokens.start` too, which takes a forward pass of its own."""
    return POLICY_LOSSES.register_made(name, lambda compute: PolicyLoss(compute, zero_without_advantage, chooses, by_start))


TAKEN = frozenset(  # metrics of every loss and of its update
    f"actor/{name}" for name in ("pg_loss", "entropy", "kl", "kl_loss", "kl_coefficient", "ppo_kl", "lr", "grad_norm")
) | {"correction/weight", "correction/altered"}


def require_loss(outputs: Any, inputs: LossInputs, name: str) -> LossOutputs:
    """Return the `outputs` of the policy loss `name`. Raises UserError if they are not valid outputs of a policy loss."""
    if not isinstance(outputs, LossOutputs):
        raise UserError(f"algorithm.loss: {name} gives {type(outputs).__name__}; allowed: LossOutputs")
    rows, length = inputs.mask.shape
    require_shape(outputs.loss, [(rows, length)], f"algorithm.loss: {name}: its loss", "[B, T]")
    for key, value in outputs.metrics.items():
        metric = f"algorithm.loss: {name}: its metric {key!r}"
        if key in TAKEN:
            raise UserError(f"{metric} is reported of every loss; allowed: another name")
        require_shape(value, [(rows, length), (rows, 1)], metric, "[B, T] or [B, 1]")
    if inputs.logp.requires_grad and not outputs.loss.requires_grad:
        raise UserError(f"algorithm.loss: {name}: its loss has no gradient: it does not depend on inputs.logp, or is detached")
    return outputs


def require_shape(value: Any, allowed: Sequence[Sequence[int]], what: str, meaning: str) -> None:
    """Check that `value` is a tensor of an `allowed` shape: another would be broadcast unnoticed. Raises UserError."""
    shape = getattr(value, "shape", None)
    if shape is None or tuple(shape) not in map(tuple, allowed):
        is_now = type(value).__name__ if shape is None else f"of shape {list(shape)}"
        raise UserError(f"{what} is {is_now}; allowed: {' or '.join(str(list(each)) for each in allowed)}, {meaning}")
