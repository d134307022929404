"""The verifiers with fixed values: which reply earns which, and that every one of them takes linear time."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.config import loading
from runtime.rewards.accuracy import normal_form
from runtime.rewards.catalogue import find_rule
from runtime.rewards.rules import RULES, RuleContext, RuleOutcome, attempt
from tests.unit.counted_work import is_linear
from tests.unit.test_rewards_scorer import request, score

ROOT = Path(__file__).parents[2]
CONTEXT = RuleContext()
RIGHT = "<think>2 + 3</think> <answer>So \\boxed{5}.</answer>"


def value(name: str, text: str, label: str = "5") -> float:
    """What the rule's function says; its screen, where it says anything, must say the same."""
    entry = find_rule(name)
    found = attempt(entry.evaluate, text, label, CONTEXT)  # type: ignore[arg-type]  # the built-in ones are not async
    assert not found.error
    assert entry.screen is not None
    assert attempt(entry.screen, text, label, CONTEXT) in (found, RuleOutcome())
    assert found.value is not None
    return float(found.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (RIGHT, 1),
        ("<think></think><answer></answer>", 1),
        ("<think>a\nb</think>\n\n<answer>c\nd</answer>", 1),
        ("<think>a</think><answer>b</answer>\n", 1),  # as `$` has it
        ("<think>a</think><answer>b</answer>\n\n", 0),
        ("<think>a</think> so <answer>b</answer>", 0),
        ("<think>a</think> so </think><answer>b</answer>", 1),
        (" <think>a</think><answer>b</answer>", 0),
        ("<think>a</think><answer>b</answer>.", 0),
        ("<think>a<answer>b</answer>", 0),
        ("<think>a</think><answer>", 0),
        ("<think></think><answer>", 0),
        ("<answer>b</answer><think>a</think>", 0),
        ("", 0),
    ],
)
def test_format(text: str, expected: float) -> None:
    assert value("format", text) == expected


PIECES = ("<think>", "</think>", "<answer>", "</answer>", " ", "\n", "a", "\\boxed{", "}")


@settings(max_examples=500)
@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join), st.booleans())
def test_format_is_what_the_expression_matches(middle: str, whole: bool) -> None:
    text = f"<think>{middle}</answer>" if whole else middle
    expected = re.match(r"^<think>.*?</think>\s*<answer>.*?</answer>$", text, re.DOTALL) is not None
    assert value("format", text) == expected


@pytest.mark.parametrize(
    ("text", "strict", "r1_zero"),
    [
        (RIGHT, 1, 1),
        ("<think>a</think><answer>\\boxed{}</answer>", 1, 1),
        ("<think>a</think><answer>\\boxed{\\frac{1}{2}}</answer>", 1, 1),
        ("<think>a</think><answer>\\boxed{1} or \\boxed{2}</answer>", -0.5, 0),
        ("<think>\\boxed{1}</think><answer>\\boxed{1}</answer>", -0.5, 0),
        ("<think>\\boxed{1}</think><answer>1</answer>", -0.5, 0),
        ("<think>a</think><answer>\\boxed{1</answer>", -0.5, 0),
        ("<think>a</think><answer>1</answer>", -0.5, 0),
        ("<think>a</think><answer>\\boxed{1}</answer>\n", -0.5, 1),
        ("<think>a <think>b</think><answer>\\boxed{1}</answer>", -0.5, 1),
        ("<think>a</think> <answer> x </answer> <answer>\\boxed{1}</answer>", -0.5, 1),
        ("so: <think>a</think><answer>\\boxed{1}</answer>", -0.5, 0),
    ],
)
def test_strict_format_and_r1_zero_format(text: str, strict: float, r1_zero: float) -> None:
    assert value("strict_format", text) == strict
    assert value("r1_zero_format", text) == r1_zero


@pytest.mark.parametrize(
    ("text", "acc", "base", "math_17k", "r1_zero"),
    [
        (RIGHT, 1, 1, 1, 1),
        ("\\boxed{10/2}", 1, 0, 1, 1),
        ("\\boxed{6}", -0.5, 0, 0, -1),
        ("\\boxed{6}, no: \\boxed{5}", 1, 0, 1, 1),
        ("\\boxed{5}, no: \\boxed{6}", -0.5, 0, 0, -1),
        ("The answer is 5", -1, 0, 0, -1),
        ("\\boxed{5} or rather \\boxed{}", -1, 0, 0, -1),
        ("\\boxed{5} or rather \\boxed{6", -1, 0, 0, -1),
        ("", -1, 0, 0, -1),
        ("<think>a</think><answer>\\boxed{6}</answer>", -0.5, 0, 0, -1),
        ("<think>a</think><answer>5</answer>", -1, 0, 0, -1),
        ("<think>a</think><answer>\\boxed{\\sqrt{25}}</answer>", 1, 1, 1, 1),
    ],
)
def test_rules_on_the_box(text: str, acc: float, base: float, math_17k: float, r1_zero: float) -> None:
    names = ("acc", "base_acc", "math_17k_acc", "r1_zero_acc")
    assert [value(name, text) for name in names] == [acc, base, math_17k, r1_zero]


@pytest.mark.parametrize(
    ("text", "label", "expected"),
    [
        ("Answer: 5", "5", 1),
        ("So\nanswer :\n$5$", "5", 1),
        ("Answer: 6\nAnswer: 5", "5", 1),
        ("Answer: 5\nAnswer: 6", "5", -1),
        ("**Answer:** 5", "5", 1),
        ("Answer: $x = \\frac12$.", "\\frac{1}{2}", 1),
        ("Answer: 1,234 dollars", "1234", 1),
        ("Answer: 0.5", "\\frac{1}{2}", -1),  # text, not algebra
        ("The answer is 5", "5", -1),
        ("Answer: 5\n" + "x" * 290, "5", 1),
        ("Answer: 5\n" + "x" * 300, "5", -1),
        ("", "5", -1),
    ],
)
def test_acc_for_dapo(text: str, label: str, expected: float) -> None:
    assert value("acc_for_dapo", text, label) == expected


@pytest.mark.parametrize(
    ("answer", "form"),
    [
        ("90^\\circ", "90"),
        ("12 \\text{ cm}", "12"),
        ("\\sqrt3", "\\sqrt{3}"),
        ("(1, 2)", "(1,2)"),
        ("\\$1{,}000", "1000"),
        ("$5$ square units", "5"),
        ("\\boxed{7}", "7"),
    ],
)
def test_the_normal_form_of_an_answer(answer: str, form: str) -> None:
    assert normal_form(answer) == form


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 0),
        ("Just 5.", 0),
        ("First, this.", 1 / 3),
        ("Step 1: a\nStep 2: b", 2 / 3),
        ("1. a\n2. b\n3. c", 1),
        ("- a\n* b\nFinally, c. Next, d. Second, e", 1),
        ("a - b\n 1. indented, 2. inline", 0),
    ],
)
def test_step(text: str, expected: float) -> None:
    assert value("step", text) == expected


@pytest.mark.parametrize(
    ("text", "answer", "form"),
    [("so\n#### 5", 1, 1.25), ("#### 6", -1, 1.25), ("\\boxed{5}", 1, -1), ("", -1, -1), ("#### 5\n#### 5", 1, -1)],
)
def test_gsm8k(text: str, answer: float, form: float) -> None:
    assert value("gsm8k_answer", text) == answer
    assert value("gsm8k_format", text) == form


@pytest.mark.parametrize(
    ("text", "whole", "prefix"),
    [
        ("<think>\na\n</think>\n<answer>\nb\n</answer>", 1, 1),
        ("<think>\n\n</think>\n<answer>\n\n</answer>", 1, 1),
        ("<think>\n</think>\n<answer>\n</answer>", 0, 1),
        ("<think>\na\n</think>\n<answer>\nb\n</answer>\n", 0, 1),
        ("<think>a</think>\n<answer>\nb\n</answer>", 0, 1),
        ("<think>\na\n</think><answer>\nb\n</answer>", 0, 1),
        ("<think></think>", 0, 1),
        ("<think>a", 0, 0),
        ("</think><think>", 0, 0),
        (" <think></think>", 0, 0),
        ("<think>a<think>b</think>", 0, 0),
        ("<think>a</think><think>b</think>", 0, 0),
        ("", 0, 0),
    ],
)
def test_formats_of_scored_files(text: str, whole: float, prefix: float) -> None:
    assert value("think_answer", text) == whole
    assert value("think_prefix", text) == prefix


def test_the_open_cases_of_form_agree() -> None:
    shared = Path(os.environ.get("SLUICE_SHARED", Path(__file__).parents[3] / "shared"))
    path = shared / "cases" / "verifier_open.jsonl"
    if not path.is_file():
        pytest.skip(f"{path} is absent; SLUICE_SHARED names the folder of shared data")
    cases = [case for case in map(json.loads, path.read_text().splitlines()) if case["kind"] == "format"]
    assert len(cases) > 50
    wrong = [case["id"] for case in cases if value(case["truth"], case["prediction"], case["truth"]) != case["expected"]]
    assert wrong == []


# Of about so many characters.
HOSTILE: dict[str, Callable[[int], str]] = {
    "thoughts": lambda size: "<think>" + "</think><answer>" * (size // 16),
    "open thoughts": lambda size: "<think>" * (size // 7),
    "spaces after a thought": lambda size: "<think></think>" + " " * size + "</answer>",
    "many spaces after many": lambda size: "<think>" + ("</think>" + " " * (size // 32)) * 32 + "</answer>",
    "digits": lambda size: "Step " + "1" * size,
    "lines of digits": lambda size: "\n" + "1" * size,
    "boxes": lambda size: "\\boxed{" * (size // 7),
    "empty boxes": lambda size: "\\boxed{}" * (size // 8),
    "boxes and space": lambda size: ("\\boxed" + " " * 9) * (size // 15),
    "hashes": lambda size: "#### " * (size // 5),
    "answers": lambda size: "answer is " * (size // 10),
    "answer colons": lambda size: "Answer" + ":" * size,
    "braces": lambda size: "\\boxed{" + "{" * size,
    "NUL": lambda size: "\0" * size,
}
RULES_OF_FORM = ("format", "strict_format", "r1_zero_format", "think_answer", "think_prefix", "step", "format_answer")
RULES_OF_ANSWERS = ("acc", "base_acc", "math_17k_acc", "r1_zero_acc", "acc_for_dapo", "gsm8k_answer", "gsm8k_format")


@pytest.mark.parametrize("made", HOSTILE.values(), ids=HOSTILE)
def test_every_rule_takes_linear_time(made: Callable[[int], str]) -> None:
    names = (*RULES_OF_FORM, *RULES_OF_ANSWERS)
    whole = made(1_000_000)  # hours, for an expression that takes quadratic time
    for name in names:
        value(name, whole)
    assert [name for name in names if not is_linear(partial(value, name), made, 10_000)] == []


def test_r1_zeros_reward_is_half_form_and_half_answer() -> None:
    settings = loading.load(ROOT / "configs" / "r1_zero_qwen25_7b.yaml", ()).rewards
    replies = (RIGHT, "\\boxed{5}", RIGHT.replace("{5}", "{6}"), "5")
    scores = score(settings, request(1, "5", *replies))
    assert scores.rewards.tolist() == [1.0, 0.5, 0.0, -0.5]
    assert scores.rules["r1_zero_acc"].tolist() == [1.0, 1.0, -1.0, -1.0]
    assert scores.rules["r1_zero_format"].tolist() == [1.0, 0.0, 1.0, 0.0]


def test_every_verifier_is_known_by_its_name() -> None:
    table = (
        "format strict_format acc base_acc math_17k_acc acc_for_dapo step gsm8k_answer gsm8k_format r1_zero_format r1_zero_acc"
    )
    for name in (*table.split(), "math", "boxed", "expr", "gsm8k", "format_answer", "think_answer", "think_prefix"):
        assert name in RULES
