"""The verifiers with fixed values, and GSM8K's: which reply earns which, agreement with labelled replies, and linear time."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from fractions import Fraction
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.config import loading
from runtime.rewards.accuracy import gsm8k, normal_form
from runtime.rewards.catalogue import find_rule
from runtime.rewards.extraction import closing_statement, final_answer, last_answer_tag, last_boxed, last_hashes
from runtime.rewards.numeric import number
from runtime.rewards.rules import RuleContext, RuleOutcome, attempt
from tests.unit.answer_pairs import pairs
from tests.unit.counted_work import is_linear
from tests.unit.test_rewards_scorer import request, score

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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (RIGHT, 1),
        *(("<think></think><answer></answer>", 1), ("<think>a\nb</think>\n\n<answer>c\nd</answer>", 1)),
        ("<think>a</think><answer>b</answer>\n", 1),  # as `$` has it
        *(("<think>a</think><answer>b</answer>\n\n", 0), ("<think>a</think> so <answer>b</answer>", 0)),
        *(("<think>a</think> so </think><answer>b</answer>", 1), (" <think>a</think><answer>b</answer>", 0)),
        *(("<think>a</think><answer>b</answer>.", 0), ("<think>a<answer>b</answer>", 0), ("<think>a</think><answer>", 0)),
        *(("<think></think><answer>", 0), ("<answer>b</answer><think>a</think>", 0), ("", 0)),
    ],
)
def test_format(text: str, expected: float) -> None:
    assert value("format", text) == expected


PIECES = ("<think>", "</think>", "<answer>", "</answer>", " ", "\n", "a", "\\boxed{", "}")


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
    ("text", "whole", "prefix"),
    [
        ("<think>\na\n</think>\n<answer>\nb\n</answer>", 1, 1),
        ("<think>\n\n</think>\n<answer>\n\n</answer>", 1, 1),
        ("<think>\n</think>\n<answer>\n</answer>", 0, 1),
        ("<think>\na\n</think>\n<answer>\nb\n</answer>\n", 0, 1),
        ("<think>a</think>\n<answer>\nb\n</answer>", 0, 1),
        ("<think>\na\n</think><answer>\nb\n</answer>", 0, 1),
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
90^\circ | 90  ¦  12 \text{ cm} | 12  ¦  \sqrt3 | \sqrt{3}  ¦  (1, 2) | (1,2)  ¦  \$1{,}000 | 1000
$5$ square units | 5  ¦  \boxed{7} | 7
"""
    assert [(answer, normal_form(answer)) for answer, _ in pairs(forms)] == pairs(forms)


def test_one_number_with_its_unit_has_an_exact_value() -> None:
    numbers = r"""
42 | 42  ¦  -42 | -42  ¦  +42. | 42  ¦  MINUS42 | -42  ¦  $1,234.50 | 2469/2  ¦  \$1{,}234 | 1234  ¦  1,\!234\,567 | 1234567
-$5 | -5  ¦  $-5 | -5  ¦  €5 | 5  ¦  5.00 | 5  ¦  .5 | 1/2  ¦  1e6 | 1000000  ¦  1.5 \times 10^{3} | 1500  ¦  \frac{48}{3} | 16
\dfrac12 | 1/2  ¦  66\frac{1}{2} | 133/2  ¦  1 1/2 | 3/2  ¦  -3/4 | -3/4  ¦  50\text{ miles} | 50  ¦  50\text{ cm}^2 | 50
1,200cm^2 | 1200  ¦  12,345\text{m}^2 | 12345  ¦  1,200\text{ cm} ^ { 2 } | 1200  ¦  1,200m² | 1200  ¦  1,200 sq ft | 1200
1,200sq ft | 1200  ¦  1,200cm2 | 1200  ¦  1,200ft^{3} | 1200  ¦  1.5 \times 10^{23} | 150000000000000000000000
\boldsymbol{72} | 72  ¦  \bm{-72} | -72  ¦  \pmb{7{,}200} | 7200  ¦  50 % | 50  ¦  90^\circ | 90  ¦  $5.00/hour | 5  ¦  5kg | 5
18 dollars per day. | 18  ¦  2 million dollars | 2000000  ¦  **72** | 72  ¦  \(72\) | 72  ¦  \text{72} | 72  ¦  $x = 72$ | 72
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
        (last_boxed, "\\boxed{\\{1\\}} done }", "\\{1\\}"),
        (last_boxed, "\\boxed{7} and \\boxed{8", "7"),
        (last_boxed, "\\boxed{7 and \\boxed{8}", "8"),
        (last_boxed, "\\boxed{a \\boxed{8} b}", "a \\boxed{8} b"),
        *((last_boxed, "\\boxed{}", ""), (last_boxed, "boxed{7} {7}", None)),
        (last_hashes, "#### 1\n#### 2 dollars\nbye", "2 dollars"),
        *((last_hashes, "#### 3\n####\n", "3"), (last_hashes, "### 1\n##### 2", None)),
        (last_answer_tag, "<answer>1</answer><answer> 2\n</answer><answer>3", " 2\n"),
        (last_answer_tag, "</answer><answer>", None),
        (closing_statement, "The answer is 5. No: the answer is 6.5 miles. Bye.", "6.5 miles"),
        (closing_statement, "**Final Answer:** **72**\n", "72**"),
        (closing_statement, "Answer:\n\n$12$\nbye", "$12$"),
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
RULES_OF_ANSWERS = ("acc", "base_acc", "math_17k_acc", "r1_zero_acc", "acc_for_dapo", "gsm8k_answer", "gsm8k_format", "gsm8k")


@pytest.mark.parametrize("made", HOSTILE.values(), ids=HOSTILE)
def test_every_rule_takes_linear_time(made: Callable[[int], str]) -> None:
    names = (*RULES_OF_FORM, *RULES_OF_ANSWERS)
    whole = made(300_000)  # many minutes, for an expression that takes quadratic time
    for name in names:
        value(name, whole)
    assert [name for name in names if not is_linear(partial(value, name), made, 4_000)] == []


# ------------------------------------------------------------------------------------------------ shared files


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
