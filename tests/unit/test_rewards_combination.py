"""Rewards of several scorers as one: what is summed, what is masked, what is counted."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.errors import ServiceFault
from runtime.rewards.combination import column, combine
from runtime.rewards.rules import RuleOutcome
from runtime.types import Scores

LATE = RuleOutcome(error="remote:DEADLINE_EXCEEDED")


def test_a_column_is_weighted_and_masked() -> None:
    scores = column(7, "taste", -2.0, [RuleOutcome(0.25), LATE, RuleOutcome(True), LATE])
    assert scores.group_id == 7
    assert scores.rewards.tolist() == [-0.5, 0.0, -2.0, 0.0]
    assert scores.valid.tolist() == [1, 0, 1, 0]
    np.testing.assert_array_equal(scores.rules["taste"], np.array([0.25, np.nan, 1.0, np.nan], np.float32))
    assert scores.errors == {"remote:DEADLINE_EXCEEDED": 2}
    assert (scores.rewards.dtype, scores.valid.dtype, scores.rules["taste"].dtype) == (np.float32, np.uint8, np.float32)


def test_a_column_may_fail_instead() -> None:
    with pytest.raises(ServiceFault, match=r"reward: score by taste: remote:DEADLINE_EXCEEDED on sample 1 of group 7"):
        column(7, "taste", 1.0, [RuleOutcome(0.25), LATE], blamed="reward")


def test_parts_are_added_where_all_are_valid() -> None:
    rules = Scores(
        group_id=7,
        rewards=np.array([1.0, 0.0, 0.0, 1.0], np.float32),
        valid=np.array([1, 1, 0, 1], np.uint8),
        rules={"gsm8k": np.array([1.0, 0.0, np.nan, 1.0], np.float32)},
        errors={"timeout": 1},
    )
    model = column(7, "reward_model", 0.5, [RuleOutcome(3.0), LATE, RuleOutcome(1.0), RuleOutcome(-4.0)])
    scores = combine([rules, model])
    assert scores.rewards.tolist() == [2.5, 0.0, 0.0, -1.0]
    assert scores.valid.tolist() == [1, 0, 0, 1]
    assert list(scores.rules) == ["gsm8k", "reward_model"]
    assert scores.errors == {"timeout": 1, "remote:DEADLINE_EXCEEDED": 1}
    assert (scores.rewards.dtype, scores.valid.dtype) == (np.float32, np.uint8)
    assert combine([rules]) is rules
    assert combine([rules, rules, rules]).errors == {"timeout": 3}
