"""Reward functions as their authors have them: in a file, without a decorator, in the shapes of verl and of TRL."""

from __future__ import annotations

import asyncio
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime import config
from runtime.errors import UserError
from runtime.rewards.code import find_rule
from runtime.rewards.rules import GroupContext, RuleContext, attempt
from tests.unit.test_rewards_scorer import request, score

FUNCTIONS = """
import re
from sluice import rule, group_rule

def plain(text, label, context):
    return text == label and context.source == "sums/train"

@rule
def bare(text, label, context):
    return len(text)

@group_rule
def shared(texts, label, context):
    return [texts.count(text) for text in texts]

def gsm8k(text, label, context):  # not the built-in rule of that name
    return 0.25

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    found = re.search(r"#### (-?[0-9.]+)", solution_str)
    right = found is not None and found.group(1) == ground_truth
    return {"score": 1.0 if right else 0.0, "seen": [data_source, extra_info["index"]]}

def part(solution_str, ground_truth, method="strict", format_score=0.1, score=1.0):
    return score if solution_str == ground_truth else format_score

async def later(data_source, solution_str, ground_truth, extra_info, **kwargs):
    return float(kwargs == {} and data_source == "sums/train")

def accuracy(completions, solution, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if one == other else None for one, other in zip(contents, solution)]

def lengths(prompts, completions, answer, level, **kwargs):
    assert [each[-1]["role"] for each in prompts] == ["user"] * len(completions)
    assert kwargs["ground_truth"] == answer
    return [len(each[0]["content"]) + hard for each, hard in zip(completions, level)]

def ids(completions, completion_ids):
    return [0.0]

def strange(solution_str, ground_truth, tools):
    return 0.0

def two(text, label):
    return 0.0

number = 3
"""
EXTRA = {"level": 2, "extra_info": {"index": 7}}
PROMPT = [{"role": "user", "content": "2 + 3?"}]
ONE = RuleContext("sums/train", prompt=PROMPT, extra=EXTRA)
GROUP = GroupContext("sums/train", prompt=PROMPT, extra=EXTRA)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("rules") / "people.py"
    path.write_text(FUNCTIONS)
    return str(path)


def given(entry: Any, text: str | list[str], label: str) -> Any:
    def call(*arguments: Any) -> Any:
        found = entry.evaluate(*arguments)
        return asyncio.run(found) if asyncio.iscoroutine(found) else found

    outcome = attempt(call, text, label, GROUP if entry.grouped else ONE)
    assert not outcome.error, outcome.error
    return outcome.values if entry.grouped else outcome.value


@pytest.mark.parametrize(
    ("name", "texts", "values"),
    [
        ("plain", ["5", "6"], [True, False]),
        ("bare", ["5", "six"], [1, 3]),
        ("shared", ["5", "6", "5"], [2, 1, 2]),
        ("gsm8k", ["5"], [0.25]),
        ("compute_score", ["#### 5", "5"], [1, 0]),
        ("part", ["5", "6"], [1, 0.1]),
        ("later", ["5"], [1]),
        ("accuracy", ["5", "6"], [1, 0]),  # TRL leaves a None out of the sum
        ("lengths", ["5", "six"], [3, 5]),
    ],
)
def test_functions_are_rules_by_their_names(file: str, name: str, texts: list[str], values: list[float]) -> None:
    entry = find_rule(f"{file}:{name}")
    assert entry.name == name
    assert (given(entry, texts, "5") if entry.grouped else [given(entry, text, "5") for text in texts]) == values


def test_two_files_may_have_a_function_of_one_name(file: str, tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None): return 0.5\n"
    )
    assert given(find_rule(f"{tmp_path}/other.py:compute_score"), "#### 5", "5") == 0.5
    assert given(find_rule(f"{file}:compute_score"), "#### 5", "5") == 1


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("ids", "rule 'ids' takes completion_ids, but rules get no token ids; take completions"),
        ("strange", "rule 'strange' takes tools; verl's reward functions do not get it; allowed: data_source, solution_str, "),
        ("two", r"rule 'two' takes \(text, label\); it is called with \(text, label, context\), or as verl or TRL calls it"),
        ("number", "unknown name 'number'; .*people.py neither registers nor defines it"),
        ("absent", "unknown name 'absent'; .*people.py neither registers nor defines it"),
    ],
)
def test_a_function_that_no_call_fits_is_refused_at_once(file: str, name: str, told: str) -> None:
    with pytest.raises(UserError, match=f"rewards.rules.0.name: .*{told}"):
        find_rule(f"{file}:{name}", "rewards.rules.0.name")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *((3, 3.0), (True, True), (0.5, 0.5), (Fraction(1, 4), 0.25), (Decimal("0.25"), 0.25)),
        *((np.bool_(True), True), (np.float32(0.5), 0.5), (np.int64(2), 2.0), (np.array(0.5), 0.5)),
        *((torch.tensor(0.5), 0.5), (torch.tensor(True), True)),
    ],
)
def test_any_real_number_is_a_reward(value: object, expected: float) -> None:
    outcome = attempt(lambda text, label, context: value, "", "", RuleContext())  # type: ignore[return-value, arg-type]
    assert (outcome.value, type(outcome.value), outcome.error) == (expected, type(expected), "")


@pytest.mark.parametrize(("returned", "named"), [("None", "NoneType"), ("'1'", "str"), ("[1.0]", "list"), ("1j", "complex")])
def test_another_type_stops_the_run_at_the_first_reply(tmp_path: Path, returned: str, named: str) -> None:
    (tmp_path / "wrong.py").write_text(f"def wrong(text, label, context):\n    return {returned}\n")
    with pytest.raises(UserError, match=f"rewards.rules: rule wrong gave a value of type {named}; must be a bool or a number"):
        score(config.Rewards(rules=[config.Rule(name=f"{tmp_path}/wrong.py:wrong")]), request(1, "5", "a"))
