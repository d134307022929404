"""The answer verifiers `math`, `boxed` and `expr`: agreement with labelled cases, and each class of answers by hand."""

from __future__ import annotations

import pytest

from runtime.rewards.answers import boxed, expr
from runtime.rewards.rules import RULES, RuleContext
from tests.unit.test_rewards_gsm8k import shared

CONTEXT = RuleContext()


@pytest.mark.parametrize(("kind", "rule"), [("boxed", boxed), ("expr", expr)])
def test_agrees_with_every_labelled_case(kind: str, rule: object) -> None:
    cases = [case for case in shared("cases/verifier_open.jsonl") if case["kind"] == kind]
    assert len(cases) > 500
    wrong = [case["id"] for case in cases if rule(case["prediction"], case["truth"], CONTEXT) is not case["expected"]]  # type: ignore[operator]
    assert wrong == []


def test_a_screen_never_contradicts_its_rule() -> None:
    settled = 0
    for case in shared("cases/verifier_open.jsonl"):
        if case["kind"] not in ("boxed", "expr"):
            continue
        found = RULES.find(case["kind"])
        assert found.screen is not None
        verdict = found.screen(case["prediction"], case["truth"], CONTEXT)
        assert verdict is None or verdict is case["expected"], case["id"]
        settled += verdict is not None
    assert settled > 600
