"""The verifiers: which reply earns which, labelled replies, answers that are equal by class, and hostile texts and answers."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from fractions import Fraction
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from runtime.config import loading
from runtime.rewards.code import find_rule
from runtime.rewards.extraction import (
    closing_statement,
    final_answer,
    last_answer_tag,
    last_box,
    last_boxed,
    last_hashes,
    number,
)
from runtime.rewards.mathematics import answers
from runtime.rewards.mathematics.answers import canonical, equal
from runtime.rewards.mathematics.tree import TooCostly
from runtime.rewards.rules import RULES, RuleContext, RuleOutcome, attempt, boxed, expr, gsm8k, normal_form
from runtime.rewards.rules import math as math_rule
from tests.real_data import real_file
from tests.unit.answer_pairs import DIFFERENT, NOTATIONS, ONE_WAY, REPLIES, classes, pairs
from tests.unit.counted_work import is_linear, work
from tests.unit.test_rewards_scorer import request, score
from tests.unit.wrong_answers import RULES as ATTACKED
from tests.unit.wrong_answers import accepted as paid
from tests.unit.wrong_answers import wrong

ROOT = Path(__file__).parents[2]
CONTEXT = RuleContext()
RIGHT = "<think>2 + 3</think> <answer>So \\boxed{5}.</answer>"


@cache
def shared(name: str) -> list[dict[str, Any]]:
    root = Path(os.environ.get("SLUICE_SHARED", ROOT.parent / "shared"))
    if not (root / name).is_file():
        pytest.skip(f"{root / name} is absent; SLUICE_SHARED names the folder of shared data")
    with (root / name).open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def value(name: str, text: str, label: str = "5") -> float:
    """What the rule's function says; its screen, where it says anything, must say the same."""
    entry = find_rule(name)
    found = attempt(entry.evaluate, text, label, CONTEXT)  # type: ignore[arg-type]  # the built-in ones are not async
    assert not found.error
    assert entry.screen is not None
    assert attempt(entry.screen, text, label, CONTEXT) in (found, RuleOutcome())
    assert found.value is not None
    return float(found.value)


# ------------------------------------------------------------------------------------------------ form


PIECES = ("<think>", "</think>", "<answer>", "</answer>", " ", "\n", "a", "\\boxed{", "}")


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join), st.booleans())
def test_format_is_what_the_expression_matches(middle: str, whole: bool) -> None:
    text = f"<think>{middle}</answer>" if whole else middle
    expected = re.match(r"^<think>.*?</think>\s*<answer>.*?</answer>$", text, re.DOTALL) is not None
    assert value("format", text) == expected


@pytest.mark.parametrize(
    ("text", "strict", "r1_zero"),
    [
        *((RIGHT, 1, 1), ("<think>a</think><answer>\\boxed{}</answer>", 1, 1)),
        ("<think>a</think><answer>\\boxed{\\frac{1}{2}}</answer>", 1, 1),
        ("<think>a</think><answer>\\boxed{1} or \\boxed{2}</answer>", -0.5, 0),
        ("<think>\\boxed{1}</think><answer>\\boxed{1}</answer>", -0.5, 0),
        ("<think>\\boxed{1}</think><answer>1</answer>", -0.5, 0),
        *(("<think>a</think><answer>\\boxed{1</answer>", -0.5, 0), ("<think>a</think><answer>1</answer>", -0.5, 0)),
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
    ("text", "whole", "prefix"),
    [
        *(("<think>\na\n</think>\n<answer>\nb\n</answer>", 1, 1), ("<think>\n\n</think>\n<answer>\n\n</answer>", 1, 1)),
        *(("<think>\n</think>\n<answer>\n</answer>", 0, 1), ("<think>\na\n</think>\n<answer>\nb\n</answer>\n", 0, 1)),
        *(("<think>a</think>\n<answer>\nb\n</answer>", 0, 1), ("<think>\na\n</think><answer>\nb\n</answer>", 0, 1)),
        *(("<think></think>", 0, 1), ("<think>a", 0, 0), ("</think><think>", 0, 0), (" <think></think>", 0, 0), ("", 0, 0)),
        *(("<think>a<think>b</think>", 0, 0), ("<think>a</think><think>b</think>", 0, 0)),
    ],
)
def test_formats_of_scored_files(text: str, whole: float, prefix: float) -> None:
    assert value("think_answer", text) == whole
    assert value("think_prefix", text) == prefix


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *(("", 0), ("Just 5.", 0), ("First, this.", 1 / 3), ("Step 1: a\nStep 2: b", 2 / 3), ("1. a\n2. b\n3. c", 1)),
        *(("- a\n* b\nFinally, c. Next, d. Second, e", 1), ("a - b\n 1. indented, 2. inline", 0)),
    ],
)
def test_step(text: str, expected: float) -> None:
    assert value("step", text) == expected


@pytest.mark.parametrize(
    ("text", "answer", "form"),
    [("so\n#### 5", 1, 1.25), ("#### 6", -1, 1.25), ("\\boxed{5}", 1, -1), ("", -1, -1), ("#### 5\n#### 5", 1, -1)],
)
def test_gsm8k_answer_and_format(text: str, answer: float, form: float) -> None:
    assert value("gsm8k_answer", text) == answer
    assert value("gsm8k_format", text) == form


@pytest.mark.parametrize(
    ("text", "right"),
    [
        *(("6*3=18\n#### 18", 1), ("#### -1,234.5\n", 1), ("#### $18", 1), ("issue #3\n#### 18", 1), ("#### 17\n#### 18", 0)),
        *(("#### 18 dollars", 0), ("##### 18", 0), ("#### 18\nthat is it", 0), ("18", 0), ("####", 0)),
    ],
)
def test_format_answer(text: str, right: float) -> None:
    assert value("format_answer", text) == right


# ------------------------------------------------------------------------------------------------ answers


@pytest.mark.parametrize(
    ("text", "acc", "base", "math_17k", "r1_zero"),
    [
        *((RIGHT, 1, 1, 1, 1), ("\\boxed{10/2}", 1, 0, 1, 1), ("\\boxed{6}", -0.5, 0, 0, -1)),
        *(("\\boxed{6}, no: \\boxed{5}", 1, 0, 1, 1), ("\\boxed{5}, no: \\boxed{6}", -0.5, 0, 0, -1)),
        *(("The answer is 5", -1, 0, 0, -1), ("\\boxed{5} or rather \\boxed{}", -1, 0, 0, -1)),
        *(("\\boxed{5} or rather \\boxed{6", -1, 0, 0, -1), ("", -1, 0, 0, -1)),
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
        *(("Answer: 5", "5", 1), ("So\nanswer :\n$5$", "5", 1), ("**Answer:** 5", "5", 1), ("The answer is 5", "5", -1)),
        *(("Answer: 6\nAnswer: 5", "5", 1), ("Answer: 5\nAnswer: 6", "5", -1), ("", "5", -1)),
        *(("Answer: $x = \\frac12$.", "\\frac{1}{2}", 1), ("Answer: 1,234 dollars", "1234", 1)),
        ("Answer: 0.5", "\\frac{1}{2}", -1),  # text, not algebra
        *(("Answer: 5\n" + "x" * 290, "5", 1), ("Answer: 5\n" + "x" * 300, "5", -1)),
    ],
)
def test_acc_for_dapo(text: str, label: str, expected: float) -> None:
    assert value("acc_for_dapo", text, label) == expected


def test_the_normal_form_of_an_answer() -> None:
    forms = r"""
90^\circ | 90 ¦ 12 \text{ cm} | 12 ¦ \sqrt3 | \sqrt{3} ¦ (1, 2) | (1,2) ¦ \$1{,}000 | 1000
$5$ square units | 5 ¦ \boxed{7} | 7
"""
    assert [(answer, normal_form(answer)) for answer, _ in pairs(forms)] == pairs(forms)


def test_one_number_with_its_unit_has_an_exact_value() -> None:
    numbers = r"""
42 | 42 ¦ -42 | -42 ¦ +42. | 42 ¦ MINUS42 | -42 ¦ $1,234.50 | 2469/2 ¦ \$1{,}234 | 1234 ¦ 1,\!234\,567 | 1234567
-$5 | -5 ¦ $-5 | -5 ¦ €5 | 5 ¦ 5.00 | 5 ¦ .5 | 1/2 ¦ 1e6 | 1000000 ¦ 1.5 \times 10^{3} | 1500 ¦ \frac{48}{3} | 16
\dfrac12 | 1/2 ¦ 66\frac{1}{2} | 133/2 ¦ 1 1/2 | 3/2 ¦ -3/4 | -3/4 ¦ 50\text{ miles} | 50 ¦ 50\text{ cm}^2 | 50
1,200cm^2 | 1200 ¦ 12,345\text{m}^2 | 12345 ¦ 1,200\text{ cm} ^ { 2 } | 1200 ¦ 1,200m² | 1200 ¦ 1,200 sq ft | 1200
1,200sq ft | 1200 ¦ 1,200cm2 | 1200 ¦ 1,200ft^{3} | 1200 ¦ 1.5 \times 10^{23} | 150000000000000000000000
\boldsymbol{72} | 72 ¦ \bm{-72} | -72 ¦ \pmb{7{,}200} | 7200 ¦ 50 % | 50 ¦ 90^\circ | 90 ¦ $5.00/hour | 5 ¦ 5kg | 5
18 dollars per day. | 18 ¦ 2 million dollars | 2000000 ¦ **72** | 72 ¦ \(72\) | 72 ¦ \text{72} | 72 ¦ $x = 72$ | 72
"""
    known = pairs(numbers.replace("MINUS", "\u2212"))
    assert [(text, number(text)) for text, _ in known] == [(text, Fraction(value)) for text, value in known]
    assert number("9" * 150) == int("9" * 150)


def test_anything_else_has_none() -> None:
    texts = "|-|x|7x|7 x|7 x^2|7x^2|7x2|7 x2|7n²|33, 34|12,34|40^2|5!|5\\pi|2\\sqrt{3}|3+4|9+John's age|1/0|3:30"
    more = "5 hours 30 minutes|18 and a half|x=5 or y=6|\\pm 3|0.5.3|1.000,00|--5|1e9999|nan|inf"
    long = ("\u0664\u0662", "9" * 10_000, "1" + " " * 150 + "!", "1 " + "a " * 95 + "2")
    assert [text for text in (*texts.split("|"), *more.split("|"), *long) if number(text) is not None] == []


@pytest.mark.parametrize(
    ("extract", "text", "answer"),
    [
        (last_boxed, "\\boxed{1} then \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        *((last_boxed, "\\boxed{\\{1\\}} done }", "\\{1\\}"), (last_boxed, "\\boxed{7} and \\boxed{8", "7")),
        *((last_boxed, "\\boxed{7 and \\boxed{8}", "8"), (last_boxed, "\\boxed{a \\boxed{8} b}", "a {8} b")),
        *((last_boxed, "\\boxed{}", ""), (last_boxed, "boxed{7} {7}", None)),
        (last_hashes, "#### 1\n#### 2 dollars\nbye", "2 dollars"),
        *((last_hashes, "#### 3\n####\n", "3"), (last_hashes, "### 1\n##### 2", None)),
        (last_answer_tag, "<answer>1</answer><answer> 2\n</answer><answer>3", " 2\n"),
        (last_answer_tag, "</answer><answer>", None),
        (closing_statement, "The answer is 5. No: the answer is 6.5 miles. Bye.", "6.5 miles"),
        *((closing_statement, "**Final Answer:** **72**\n", "72**"), (closing_statement, "Answer:\n\n$12$\nbye", "$12$")),
        (closing_statement, "The answer is 5.\nI hope the answer is clear.", "5"),
        *((closing_statement, "The answer is unknown", "unknown"), (closing_statement, "no answers here: 5", None)),
    ],
)
def test_extraction(extract: Any, text: str, answer: str | None) -> None:
    assert extract(text) == answer


def test_marks_are_preferred_in_order() -> None:
    reply = "The answer is 4. <answer>3</answer>\n#### 2\n\\boxed{1}"
    for mark, answer in (("\\boxed{1}", "1"), ("#### 2", "2"), ("<answer>3</answer>", "3"), ("The answer is 4.", "4")):
        assert final_answer(reply) == answer
        reply = reply.replace(mark, "")
    assert final_answer(reply) is None
    assert final_answer("<answer>The final answer is 7 eggs.</answer>") == "7 eggs"


@pytest.mark.parametrize(
    ("reply", "label", "right"),
    [
        *(("so\n#### 1,200", "1200", True), ("so\n#### 1200.0 dollars", "1,200", True), ("\\boxed{3.5}", "7/2", True)),
        *(("\\boxed{1} no \\boxed{2}", "1", False), ("\\boxed{}\n#### 5", "5", False), ("I think 5", "5", False)),
        ("", "5", False),
    ],
)
def test_gsm8k_rule(reply: str, label: str, right: bool) -> None:
    assert gsm8k(reply, label, CONTEXT) is right


def test_a_label_that_is_no_number_is_an_error_not_a_wrong_answer() -> None:
    with pytest.raises(ValueError, match="'many' is not a number"):
        gsm8k("#### 5", "many", CONTEXT)


def test_r1_zeros_reward_is_half_form_and_half_answer() -> None:
    settings = loading.load(ROOT / "configs" / "r1_zero_qwen25_7b.yaml", ()).rewards
    replies = (RIGHT, "\\boxed{5}", RIGHT.replace("{5}", "{6}"), "5")
    scores = score(settings, request(1, "5", *replies))
    assert scores.rewards.tolist() == [1.0, 0.5, 0.0, -0.5]
    assert scores.rules["r1_zero_acc"].tolist() == [1.0, 1.0, -1.0, -1.0]
    assert scores.rules["r1_zero_format"].tolist() == [1.0, 0.0, 1.0, 0.0]


# ------------------------------------------------------------------------------------------------ time

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
    "hashes": lambda size: "#" * size,
    "hashes and spaces": lambda size: "#### " * (size // 5),
    "hashes and lines": lambda size: "#### \n" * (size // 6),
    "hashes and numbers": lambda size: "#### 1 " * (size // 7),
    "spaces behind hashes": lambda size: "#### " + " " * size + "x",
    "answers": lambda size: "answer is " * (size // 10),
    "answer colons": lambda size: "Answer" + ":" * size,
    "answer tags": lambda size: "<answer>" * (size // 8),
    "ends of answers": lambda size: "</answer>" * (size // 9),
    "the answer": lambda size: "the answer " * (size // 11),
    "an answer and stars": lambda size: "answer" + " *" * (size // 2),
    "an answer and points": lambda size: "answer is " + "1." * (size // 2),
    "an answer and lines": lambda size: "answer is:" + "\n" * size,
    "braces": lambda size: "{" * size,
    "open braces in a box": lambda size: "\\boxed{" + "{" * size,
    "braces in a box": lambda size: "\\boxed{" + "{" * (size // 2) + "}" * (size // 2 + 1),
    "digits in a box": lambda size: "\\boxed{" + "9" * size + "}",
    "NUL": lambda size: "\0" * size,
}
RULES_OF_FORM = ("format", "strict_format", "r1_zero_format", "think_answer", "think_prefix", "step", "format_answer")
RULES_OF_ANSWERS = (
    "acc",
    "base_acc",
    "math_17k_acc",
    "r1_zero_acc",
    "acc_for_dapo",
    "gsm8k_answer",
    "gsm8k_format",
    "gsm8k",
    "last_number",
)


@pytest.mark.parametrize("made", HOSTILE.values(), ids=HOSTILE)
def test_every_rule_takes_linear_time(made: Callable[[int], str]) -> None:
    names = (*RULES_OF_FORM, *RULES_OF_ANSWERS)
    whole = made(300_000)  # many minutes, for an expression that takes quadratic time
    for name in names:
        value(name, whole)
    assert [name for name in names if not is_linear(partial(value, name), made, 4_000)] == []


def test_the_last_number_is_the_answer_and_a_sum_that_is_only_repeated_is_none() -> None:
    right = ("14", "5 + 9 = 14", "The answer is 14.", "14.0,", "so\n\n1,014 no: 14 apples.", "=-14 or 14")
    wrong = ("", "fourteen", "5 + 9", "14 or 15", "-14", "1.14", "114", "14 = 5 + 9", "There are 14 - 0")
    assert [value("last_number", text, "14") for text in right] == [1.0] * len(right)
    assert [value("last_number", text, "14") for text in wrong] == [0.0] * len(wrong)
    assert value("last_number", "from 20 to -3", "-3") == 1.0 and value("last_number", "10-3", "3") == 1.0


# ------------------------------------------------------------------------------------------------ shared files


def test_the_cases_of_public_reports_agree() -> None:
    cases = shared("cases/reports/verifier.jsonl")
    assert len(cases) > 30
    assert [case["id"] for case in cases if value(case["kind"], case["prediction"], case["truth"]) != case["expected"]] == []


def test_the_open_cases_of_form_and_of_gsm8k_agree() -> None:
    found = shared("cases/verifier_open.jsonl")
    forms, answers = ([case for case in found if case["kind"] == kind] for kind in ("format", "gsm8k"))
    assert len(forms) > 50 and len(answers) > 2000
    wrong = [case["id"] for case in forms if value(case["truth"], case["prediction"], case["truth"]) != case["expected"]]
    wrong += [case["id"] for case in answers if gsm8k(case["prediction"], case["truth"], CONTEXT) is not case["expected"]]
    assert wrong == []


def test_agrees_with_the_labels_of_all_published_model_solutions() -> None:
    """Those models were trained to end with "A: 18"; the mark is written as #### here, as in the labelled cases."""
    rows = shared("data/gsm8k/example_model_solutions.jsonl")
    wrong = []
    for row in rows:
        label = row["ground_truth"].rpartition("A: ")[2]
        for model in ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification"):
            reply = "#### ".join(row[model]["solution"].rsplit("A: ", 1))
            if gsm8k(reply, label, CONTEXT) is not row[model]["is_correct"]:
                wrong.append((row["question"][:40], model))
    assert len(rows) == 1319
    assert wrong == []


# ------------------------------------------------------------------------------------------------ math, boxed and expr

# ------------------------------------------------------------------------------------------------ by class


@pytest.mark.parametrize("group", classes().values(), ids=classes())
def test_equal_answers(group: list[tuple[str, str]]) -> None:
    wrong = [pair for pair in group if not (equal(*pair) and equal(*reversed(pair)))]
    assert wrong == []


def test_different_answers() -> None:
    wrong = [pair for pair in pairs(DIFFERENT) if accepted(*pair) or accepted(*reversed(pair))]
    assert wrong == []


WRONG_ANSWERS = 2000 if os.environ.get("SLUICE_EXAMPLES") == "long" else 100  # of each rule


def test_no_rule_pays_for_a_wrong_answer() -> None:
    """Near misses, lists of everything, denials, multiples, compound quantities, and the label wherever else it may stand."""
    for name in ATTACKED:
        assert [case for case in wrong(name, WRONG_ANSWERS) if paid(name, *case)] == [], name


def accepted(prediction: str, truth: str) -> bool:
    try:
        return equal(prediction, truth)
    except TooCostly:  # it is masked, and earns nothing
        return False


def test_what_is_read_out_of_a_prediction_alone() -> None:
    assert [pair for pair in (*pairs(ONE_WAY), *pairs(NOTATIONS)) if not equal(*pair)] == []
    replies = [one.split(" | ") for line in REPLIES.strip().split("\n") for one in line.split(" ¦ ")]
    assert [case for case in replies if not value(*case)] == []
    labels = [("6", "6m"), ("6", "6m^2"), ("6", "6m2"), ("7", "a+b = 7"), ("0", "x^2 - 5x + 6 = 0"), ("x^2 - 5x + 6 = 0", "0")]
    assert [pair for pair in labels if equal(*pair)] == []


@pytest.mark.parametrize(
    "answers",
    [
        ("1/2", r"\frac{1}{2}", "0.5", r"\dfrac12", "$0.50$", r"\frac{2}{4}"),
        *(("1,234", "1234", r"1{,}234", r"x = 1234", r"1234\text{ cm}"), ("(A)", r"\text{(A)}", "A", r"\textbf{A}")),
        *(("odd", r"\text{odd}", "Odd"), ("(1, 2)", r"\left(1,2\right)", r"(1,\frac{4}{2})")),
        *(("1, 2", "2,1", r"2\text{ and }1"), ("2x+y", "y + 2x", r"y+x\cdot 2")),
    ],
)
def test_obviously_equal_answers_have_one_vote(answers: tuple[str, ...]) -> None:
    assert len({canonical(answer) for answer in answers}) == 1


def test_different_answers_have_different_votes() -> None:
    answers = ["1", "2", "1,2", "(1,2)", "(2,1)", "[1,2]", "[1,2)", "x", "2x", "x^2", "A", "B", "odd", "even", "1/2", "-1/2"]
    assert len({canonical(answer) for answer in (*answers, "?")}) == len(answers) + 1


@pytest.mark.parametrize(
    ("form", "value"),
    [
        (r"\sqrt{5-2\sqrt6}", math.sqrt(5 - 2 * math.sqrt(6))),
        (r"\frac{4}{3}-\frac{4\sqrt{3}\pi}{27}", 4 / 3 - 4 * math.sqrt(3) * math.pi / 27),
        *((r"\arcsin{\frac{10}{13}}", math.asin(10 / 13)), (r"\log_3 7", math.log(7, 3))),
        *((r"e^{-2\pi}", math.exp(-2 * math.pi)), (r"2\cos 15^{\circ}", 2 * math.cos(math.radians(15)))),
        *((r"\tan^{-1} 3", math.atan(3)), (r"\sqrt[5]{7}+1", 7**0.2 + 1), (r"\frac{17}{6}", 17 / 6)),
        (r"\cosh 2", math.cosh(2)),
    ],
)
def test_a_decimal_is_an_exact_form_to_six_digits(form: str, value: float) -> None:
    assert equal(f"{value:.6g}", form)
    assert equal(f"{value:.12g}", form)
    assert not equal(f"{value:.4g}", form) or f"{value:.4g}" == f"{value:.6g}".rstrip("0")
    assert not equal(f"{value * (1 + 1e-5):.10g}", form)


# ------------------------------------------------------------------------------------------------ by property

INTEGERS = st.integers(-50, 50)


def rational_expressions() -> st.SearchStrategy[tuple[str, Fraction]]:
    """LaTeX of an arithmetic expression, and its value."""
    leaves = st.integers(0, 99).map(lambda value: (str(value), Fraction(value)))

    def extend(inner: st.SearchStrategy[tuple[str, Fraction]]) -> st.SearchStrategy[tuple[str, Fraction]]:
        two = st.tuples(inner, inner)
        return st.one_of(
            two.map(lambda p: (f"\\left({p[0][0]}+{p[1][0]}\\right)", p[0][1] + p[1][1])),
            two.map(lambda p: (f"({p[0][0]} - {p[1][0]})", p[0][1] - p[1][1])),
            two.map(lambda p: (f"{p[0][0]} \\cdot {p[1][0]}", p[0][1] * p[1][1])),
            two.filter(lambda p: p[1][1] != 0).map(lambda p: (f"\\frac{{{p[0][0]}}}{{{p[1][0]}}}", p[0][1] / p[1][1])),
            inner.map(lambda p: (f"({p[0]})^{{2}}", p[1] ** 2)),
            inner.map(lambda p: (f"\\sqrt{{({p[0]})^2}}", abs(p[1]))),
        )

    return st.recursive(leaves, extend, max_leaves=8)


@given(rational_expressions(), st.integers(1, 10**6))
def test_arithmetic_is_exact(expression: tuple[str, Fraction], part: int) -> None:
    text, value = expression
    assert equal(text, f"\\frac{{{value.numerator}}}{{{value.denominator}}}")
    other = value + Fraction(1, part * 10**30)
    assert not equal(text, f"\\frac{{{other.numerator}}}{{{other.denominator}}}")


@given(st.lists(INTEGERS, min_size=1, max_size=4), st.integers(1, 9))
def test_a_polynomial_is_the_same_expanded_and_factored(roots: list[int], leading: int) -> None:
    coefficients = [leading]
    for root in roots:
        coefficients = [a - root * b for a, b in zip([*coefficients, 0], [0, *coefficients], strict=True)]
    degree = len(roots)
    expanded = "+".join(f"({value})x^{{{degree - power}}}" for power, value in enumerate(coefficients))
    factored = f"{leading}" + "".join(f"\\left(x-({root})\\right)" for root in roots)
    assert equal(expanded, factored)
    assert not equal(f"{expanded}+1", factored)
    assert equal(f"{expanded}=0", f"0 = 7 \\cdot {factored}")


@given(st.lists(INTEGERS, min_size=2, max_size=6, unique=True), st.randoms())
def test_sets_have_no_order_and_tuples_have(values: list[int], random: Any) -> None:
    shuffled = random.sample(values, len(values))
    join = ", ".join
    first, second = join(map(str, values)), join(f"\\frac{{{2 * value}}}{{2}}" for value in shuffled)
    assert equal(first, second)
    assert equal(f"\\{{{first}\\}}", second)
    assert equal(f"({first})", f"({second})") is (values == shuffled)
    assert not equal(first, join(map(str, values[1:])))
    assert not equal(first, join(map(str, [*values[1:], 51])))


@given(st.integers(2, 300), st.integers(2, 40), st.integers(2, 60))
def test_radicals_compare_exactly(radicand: int, factor: int, digits: int) -> None:
    assert equal(f"{factor}\\sqrt{{{radicand}}}", f"\\sqrt{{{radicand * factor**2}}}")
    assert not equal(f"{factor}\\sqrt{{{radicand}}}", f"{factor}\\sqrt{{{radicand}}}+10^{{-{digits}}}")


@given(st.integers(2, 9), st.integers(40, 10**6), st.integers(1, 99))
def test_what_is_too_large_to_write_down_is_the_same_text_or_refused(base: int, height: int, addend: int) -> None:
    tower = f"{base}^{{{base}^{{{height}}}}}"
    assert equal(f"{tower}+{addend}", f"{addend}+{tower}")
    for other in (f"{tower}+{addend}", f"{base}^{{{base}^{{{height + 1}}}}}", "((9!)!)!"):
        with pytest.raises(TooCostly):
            equal(tower, other)


def test_ends_of_intervals() -> None:
    marks = {"(": "<", "[": "\\le", ")": "<", "]": "\\le"}
    for index, (ours, theirs) in enumerate(itertools.product(("()", "[]", "(]", "[)"), repeat=2)):
        low, high = index - 8, 2 * index + 3
        one, other = (f"{ends[0]}{low}, {high}{ends[1]}" for ends in (ours, theirs))
        assert equal(f"{one} \\cup [90, 91]", f"{other} \\cup [90, 91]") is (ours == theirs)
        if ours == theirs or index % 4 == 3:
            assert equal(f"{low} {marks[ours[0]]} x {marks[ours[1]]} {high}", other) is (ours == theirs)


# ------------------------------------------------------------------------------------------------ where the answer stands


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        *(("\\boxed{1} then \\boxed{2}", "2"), ("\\boxed{1} then \\boxed{}", ""), ("\\boxed{1} then \\boxed{2", "")),
        *(("\\boxed{1 and \\boxed{2}", "2"), ("\\boxed{a \\boxed{8} b}", "a {8} b")),
        *(("put it in \\boxed, as in \\boxed{5}. I used \\boxed.", "5"), ("{5}", None)),
    ],
)
def test_the_last_box(text: str, answer: str | None) -> None:
    assert last_box(text) == answer


@pytest.mark.parametrize(
    ("reply", "label", "right", "right_without_mark"),
    [
        *(("so \\boxed{\\frac{1}{2}}", "0.5", True, True), ("so \\boxed{1} no \\boxed{2}", "1", False, False)),
        *(("so \\boxed{1} and \\boxed{", "1", False, False), ("#### 5 cm", "$5$", True, None)),
        *(("<answer>x = 5</answer>", "5", True, None), ("The answer is $(1, 2)$.", "(1,2)", True, True)),
        ("\\boxed{20\\%}", "so $x=1/5$, or $\\boxed{20}$ percent.", True, True),
        *(("I think $\\frac12$", "\\frac{1}{2}", False, True), ("", "5", False, False)),
    ],
)
def test_where_rules_look(reply: str, label: str, right: bool, right_without_mark: bool | None) -> None:
    assert math_rule(reply, label, CONTEXT) is right
    if right_without_mark is not None:
        assert boxed(reply, label, CONTEXT) is right_without_mark


# ------------------------------------------------------------------------------------------------ shared files


@pytest.mark.parametrize("kind", ["boxed", "expr"])
def test_agrees_with_every_labelled_case(kind: str) -> None:
    """And the screen never contradicts its rule."""
    rule, screen = {"boxed": boxed, "expr": expr}[kind], RULES.find(kind).screen
    assert screen is not None
    cases = [case for case in shared("cases/verifier_open.jsonl") if case["kind"] == kind]
    assert len(cases) > 500
    wrong = [case["id"] for case in cases if rule(case["prediction"], case["truth"], CONTEXT) is not case["expected"]]
    assert wrong == []
    verdicts = {case["id"]: (screen(case["prediction"], case["truth"], CONTEXT), case["expected"]) for case in cases}
    settled = {case: verdict for case, verdict in verdicts.items() if verdict[0] is not None}
    assert len(settled) > 200
    assert [case for case, (verdict, expected) in settled.items() if verdict is not expected] == []


LABELS = (
    *("math/train.json", "math500/test.jsonl", "deepscaler_parts/aime_train.json", "deepscaler_parts/minerva_test.json"),
    *("deepscaler_parts/olympiad_bench_test.json", "deepscaler_parts/deepscaler_subset.json", "math_lvl3to5_8k/train.json"),
)


def labels(name: str) -> Iterator[str]:
    text = real_file(name).read_text(encoding="utf-8")
    for row in json.loads(text) if name.endswith("json") else map(json.loads, text.splitlines()):
        given = row["answer"] if isinstance(row["answer"], list) else [row["answer"]]
        yield from (str(answer) for answer in given if answer is not None)


@pytest.mark.parametrize("name", LABELS)
def test_every_label_is_equal_to_itself(name: str) -> None:
    found = {label for label in labels(name) if label.strip()}
    assert len(found) > 100
    assert [label for label in found if not equal(f" {label} ", label)] == []
    assert [label for label in found if canonical(f"${label.strip(' $')}$") != canonical(label)] == []


def test_what_rewards_data_and_warm_ups_import() -> None:
    """In one process, the lightest first: workers of rules, what the parser reads, the services, and what needs sympy."""
    code = """
import sys
def heavy(*names): assert not {*names} & {*sys.modules}, {*names} & {*sys.modules}
import runtime.rewards.worker, runtime.rewards.code
heavy("torch", "transformers", "numpy", "tokenizers", "jinja2")
from runtime.rewards.mathematics.answers import equal
assert equal(r"\\frac{1}{\\sqrt2}", r"\\frac{\\sqrt2}{2}") and equal("(x+1)^2", "x^2+2x+1")
heavy("sympy", "torch")
import runtime.data.prompts, runtime.rewards.scorer, runtime.sft.warmup
heavy("torch", "transformers")
assert equal(r"\\int_0^1 x dx", "0.5") and "sympy" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=True)
    bare = """
from runtime.rewards.code import find_rule
from runtime.rewards.rules import RuleContext
raise SystemExit(find_rule("math_17k_acc").evaluate(r"so \\boxed{10/2}", "5", RuleContext()) is not True)
"""
    subprocess.run([sys.executable, "-OO", "-c", bare], cwd=ROOT, timeout=60, check=True)


# ------------------------------------------------------------------------------------------------ hostile answers

CODE = "__import__('pathlib').Path('touched').touch()"

HOSTILE_ANSWERS = [
    *(r"9^{9^{9^{9^{9}}}}", "9^9^9^9^9", r"2^{2^{2^{2^{2^{2^{2}}}}}}", r"1/3^{10^9}", r"10^{-10^{10}}", r"(-1)^{10^{100}}"),
    *("9" * 100_000 + "!", "10000000!", r"(10^{10})!", r"((100!)!)!", "3!!!!!!!!!!", r"\frac{1}{(10^9)!}"),
    *(r"\binom{10^9}{5\cdot 10^8}", r"\binom{1000000}{500000}", r"\binom{n}{10^{12}}"),
    *("{" * 100_000, "(" * 5000 + "5" + ")" * 5000, "(" * 100 + "5" + ")" * 100, r"\frac{" * 1000, r"\sqrt" * 3000 + "2"),
    *(r"\frac{1}{" * 200 + "2" + "}" * 200, r"3\frac{" * 40 + "2" + "}{3}" * 40, r"\sqrt{" * 300 + "2" + "}" * 300),
    *(r"\left(" * 500, r"\begin{pmatrix}" * 500, r"\begin{pmatrix}" + "1&" * 900 + r"1\end{pmatrix}", "|x" * 300, "|" * 1000),
    *("x" * 200_000, "1" * 200_000, "1+" * 100_000 + "1", "-" * 100_000 + "5", "1," * 100_000, "1 " * 100_000),
    *("(x+1)^{1000000}", "(x+y+z)^{100000}", r"x^{10^{10}}", r"x^{2^{2^{2^{100}}}}", r"x^{10^{-10}}"),
    *(r"\sin(10^{10^{10}})", r"e^{e^{e^{e^{10}}}}", r"\exp(10^{100})", r"\log_{1.0000001}{10^{1000}}", r"\sqrt[10^9]{5}"),
    *(r"2^{60000}\sqrt{2}", r"\sqrt[64]{2^{19999}+1}", r"\lfloor 10^{100000}/7 \rfloor", r"\gcd(2^{100000},3)"),
    *(r"\sum_{k=1}^{10^{10}} k", r"\sum_{k=1}^{1000} k!", r"\prod_{k=1}^{1000} k^k", r"\sum_{k=1}^{1000}\frac{1}{k^{9999}}"),
    r"\sum_{i=1}^{1000}\sum_{j=1}^{1000}\sum_{k=1}^{1000} i",
    *("+".join(rf"\sqrt{{{n}}}" for n in range(2, 300)), "+".join(f"1/{n}^{{20000}}" for n in range(2, 150))),
    *(",".join(map(str, range(590))), ",".join(f"x{n}" for n in range(590)), r"\pm " * 1000 + "3", "1" + r"\pm 1" * 300),
    r"\cup".join(f"({2 * n},{2 * n + 1})" for n in range(250)),
    *("\x00" * 1000, "5\x00", "\ud800", "\udcff5", "0." + "3" * 3000, r"0.\overline{" + "3" * 40 + "}", "1e999", "1.5e99999"),
    *(r"\text{" * 1000, "$" * 100_000, r"\(" * 100_000, "a^" * 1000 + "a", "a_" * 1000 + "a", "x " * 1999, "the " * 900 + "5"),
    *("answer is " * 390, "is 5 " * 790, "is $5$ " * 560, ", " * 100_000, r"\text{ }" * 500, r"\\" * 1900),
    *(r"\boldsymbol{" * 250, r"\bm{" * 900 + "5" + "}" * 900, r"\bm" * 1300 + "5", "^\\bm{5}" * 500, r"{\bf " * 700),
    "x!=" * 1300,
    *("p=5,q=2;" * 140, ";".join(f"p={n},q={n + 1}" for n in range(140)), "(p,q)=" * 300, "(1,2)," * 190, "p,q=1;" * 190),
    *("1,200m^2 " * 400, "1 200" * 700, "cm^2" * 900, "m ^ { 2 " * 400),
    *(CODE, f"\\text{{{CODE}}}", f"${CODE}$", f"\\int {CODE}", f"\\operatorname{{{CODE}}}(1)", "lambda: 0", "().__class__"),
]


COUNTED = r"\sqrt{2}"
OTHERS = ["5", "x^2+1", r"2^{2^{100}}", "1,2"]
LINES = 2_500_000  # that may run for an answer, besides what its length takes: `LIMIT` of counted work is about 1,800,000


def attempts(label: str) -> list[Callable[[str], object]]:
    """Everything that is done with an answer."""
    return [
        lambda answer: equal(answer, label),
        lambda answer: equal(label, answer),
        lambda answer: math_rule(f"\\boxed{{{answer}}}", label, CONTEXT),
        lambda answer: boxed(answer, label, CONTEXT),
        lambda answer: bool(canonical(answer)),
    ]


def named(answer: str) -> str:
    return f"{answer[:24]!a}*{len(answer)}"


@pytest.fixture
def no_algebra(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a test of its own."""
    monkeypatch.setattr(answers, "algebraically_equal", lambda prediction, truth: False)


@pytest.mark.parametrize(("answer", "label"), list(zip(HOSTILE_ANSWERS, itertools.cycle(OTHERS))), ids=named)
def test_decided_or_refused(answer: str, label: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_algebra: None) -> None:
    """And not carried out: computed as they stand, most would outlast the deadline. For one label, lines are counted."""

    def decided(ask: Callable[[str], object], text: str) -> None:
        with suppress(TooCostly):
            assert ask(text) in (True, False)

    monkeypatch.chdir(tmp_path)
    for ask in attempts(COUNTED):
        assert work(partial(decided, ask), answer) < LINES + 2 * len(answer)
    for ask in attempts(label):
        decided(ask, answer)
    assert list(tmp_path.iterdir()) == []


ANSWER_PIECES = r"""
\frac { } ( ) [ ] ^ _ ! % 1 34 0.5 2e04 x n i e f( + - * / = < \le \in \cup \pm , ; \{ \} | \sqrt \sin \log and feet
\begin{pmatrix} \end{pmatrix} & \\ \infty \pi ^\circ $ \( \) . \boxed{ \lfloor \rfloor \sum \binom \left \right : ' \ldots
\mathbb{R} is \prime \overline{ \mid \cdot 10^ 1,000 \! \, \setminus \emptyset max gcd(
"""
ANSWERS = st.lists(st.sampled_from([*ANSWER_PIECES.split(), " ", r"\text{ cm}"]), max_size=14).map("".join)


@given(ANSWERS, ANSWERS)
@example("1", r"max\{\}")  # of nothing
def test_any_text_is_decided_or_refused(prediction: str, truth: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answers, "algebraically_equal", lambda prediction, truth: False)
        with suppress(TooCostly):
            equal(prediction, truth)
        with suppress(TooCostly):
            boxed(f"so {prediction}", truth, CONTEXT)
        canonical(prediction)


@pytest.mark.parametrize(
    "text",
    [*("x" * 401, "{" * 13 + "}" * 13, "9" * 30, "2^{1000}", "2^{2^{2}}", "x^y^z", "5!!", "(n)!", "9999!"), r"\binom{1000}{2}"],
)
def test_algebra_is_not_given_what_it_could_hang_on(text: str) -> None:
    assert not answers.affordable(text)
    with pytest.raises(TooCostly):
        answers.algebraically_equal(text, "5")


def test_algebra_evaluates_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for text in (CODE, f"\\text{{{CODE}}}", f"\\int {CODE}", f"{CODE} = 5", f"\\boxed{{{CODE}}}", f"x_{{{CODE}}}"):
        assert answers.algebraically_equal(text, "5") is False
    assert answers.algebraically_equal(r"\int_0^1 x dx", r"\frac{1}{2}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["math", "boxed", "expr"])
def test_screens_take_linear_time(name: str) -> None:
    screen = RULES.find(name).screen
    assert screen is not None
    for text in HOSTILE_ANSWERS:
        if len(text) > 32_000:
            for form in ("{}", "\\boxed{{{}}}"):
                made = lambda size, text=text, form=form: form.format(text[:size])  # noqa: E731
                assert is_linear(lambda text: screen(text, "5", CONTEXT), made, 16_000), text[:24]
