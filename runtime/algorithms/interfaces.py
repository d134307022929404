"""What the registered functions take and give. B rows (samples), T response positions, float tensors of one dtype.

`mask` is 1.0 on trained response tokens; rows may be ragged, have gaps, or be fully masked. Values outside the mask are
finite and meaningless.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from runtime.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class AdvantageInputs:
    rewards: Tensor  # [B]
    groups: Tensor  # int64 [B], ids from 0 to the number of groups - 1
    valid: Tensor  # bool [B]; a row that is not valid has no reward, and its advantage is 0
    mask: Tensor  # [B, T]


@dataclass(frozen=True)
class AdvantageEstimator:
    """`compute` gives [B, T], or [B, 1] where all tokens of a row share one advantage.

    `streamable`: the advantages of a group need nothing but that group, so that a step may accumulate group by group.
    """

    compute: Callable[[AdvantageInputs], Tensor]
    streamable: bool


@dataclass(frozen=True)
class LossInputs:
    """All [B, T] but `advantages`, which may be [B, 1].

    `proximal_logp` is the policy at the start of the step (detached), `behaviour_logp` the one that sampled.
    """

    logp: Tensor
    proximal_logp: Tensor
    behaviour_logp: Tensor
    advantages: Tensor
    mask: Tensor


@dataclass(frozen=True)
class LossOptions:
    """`dual_clip` 0 is off; the ratio is clipped to [1 - clip_low, 1 + clip_high]."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 0.0
    behaviour_weight_cap: float = 2.0


@dataclass(frozen=True)
class LossOutputs:
    """`loss` and each of `metrics` (by the name it is reported under) are [B, T], one value a token; metrics are detached."""

    loss: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Aggregate:
    """`total / count` is the mean. Both are sums over rows, so that parts of a batch add up to the whole."""

    total: Tensor  # []
    count: Tensor  # [], detached


@dataclass(frozen=True)
class PolicyLoss:
    """`zero_without_advantage`: where a row's advantages are all 0, so is its loss; such rows need no backward pass."""

    compute: Callable[[LossInputs, LossOptions], LossOutputs]
    zero_without_advantage: bool


KlEstimator = Callable[["Tensor"], "Tensor"]  # logp - ref_logp to the estimate, elementwise
Aggregation = Callable[["Tensor", "Tensor"], Aggregate]  # values [B, T], mask [B, T]

ADVANTAGES: Registry[AdvantageEstimator] = Registry("algorithm.advantage")
POLICY_LOSSES: Registry[PolicyLoss] = Registry("algorithm.loss")
KL_ESTIMATORS: Registry[KlEstimator] = Registry("algorithm.kl")
AGGREGATIONS: Registry[Aggregation] = Registry("algorithm.aggregation")


AdvantageFunction = Callable[[AdvantageInputs], "Tensor"]
LossFunction = Callable[[LossInputs, LossOptions], LossOutputs]


def advantage(name: str, *, streamable: bool) -> Callable[[AdvantageFunction], AdvantageFunction]:
    """Decorator that registers an advantage function and returns it as it is."""

    def add(compute: AdvantageFunction) -> AdvantageFunction:
        ADVANTAGES.register(name)(AdvantageEstimator(compute, streamable))
        return compute

    return add


def policy_loss(name: str, *, zero_without_advantage: bool) -> Callable[[LossFunction], LossFunction]:
    """Decorator that registers a policy loss and returns it as it is."""

    def add(compute: LossFunction) -> LossFunction:
        POLICY_LOSSES.register(name)(PolicyLoss(compute, zero_without_advantage))
        return compute

    return add
