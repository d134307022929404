"""The scores of one group by several scorers – rules, remote rewards, a reward model, whoever played it – as one. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
from msgspec import structs

from runtime.errors import ServiceFault
from runtime.rewards.rules import RuleOutcome
from runtime.types import ENVIRONMENT_COLUMN, Scores


def column(group_id: int, name: str, weight: float, outcomes: Sequence[RuleOutcome], blamed: str = "") -> Scores:
    """Scores by one scorer alone, whose values are in `rules` under `name`: the reward is `weight` times the value.

    A sample without a value has valid 0, reward 0 and NaN, and is counted in `errors`; or it raises ServiceFault, where the
    service to be `blamed` is named.
    """
    for index, outcome in enumerate(outcomes):
        if outcome.error and blamed:
            raise ServiceFault(blamed, f"score by {name}", f"{outcome.error} on sample {index} of group {group_id}")
    values = np.array([np.nan if outcome.value is None else float(outcome.value) for outcome in outcomes], np.float64)
    valid = np.array([not outcome.error for outcome in outcomes], np.uint8)
    return Scores(
        group_id=group_id,
        rewards=np.where(valid == 1, weight * values, 0.0).astype(np.float32),
        valid=valid,
        rules={name: values.astype(np.float32)},
        errors=dict(Counter(outcome.error for outcome in outcomes if outcome.error)),
    )


NO_REWARD = f"{ENVIRONMENT_COLUMN}:no reward"


def played(group_id: int, weight: float, rewards: Sequence[float]) -> Scores:
    """Scores by whoever played the episodes; one that it gave nothing (NaN) is masked and counted: it may have its reasons."""
    outcomes = [RuleOutcome(error=NO_REWARD) if math.isnan(reward) else RuleOutcome(reward) for reward in rewards]
    return column(group_id, ENVIRONMENT_COLUMN, weight, outcomes)


def combine(parts: Sequence[Scores]) -> Scores:
    """The sum of the rewards, valid where all are; what else a part has is the first one's."""
    if len(parts) == 1:
        return parts[0]
    valid = np.minimum.reduce([part.valid for part in parts])
    total = np.sum([part.rewards for part in parts], axis=0, dtype=np.float64)
    errors: Counter[str] = Counter()
    for part in parts:
        errors.update(part.errors)
    return structs.replace(
        parts[0],
        rewards=np.where(valid == 1, total, 0.0).astype(np.float32),
        valid=valid,
        rules={name: values for part in parts for name, values in part.rules.items()},
        errors=dict(errors),
    )
