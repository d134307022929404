"""The GSM8K rule: where the answer stands, when two numbers are equal, and agreement with labelled real replies."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from runtime.rewards.accuracy import gsm8k
from runtime.rewards.extraction import closing_statement, final_answer, last_answer_tag, last_boxed, last_hashes
from runtime.rewards.format import format_answer
from runtime.rewards.numeric import number
from runtime.rewards.rules import RuleContext
from tests.unit.counted_work import is_linear

CONTEXT = RuleContext()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", 42),
        ("-42", -42),
        ("+42.", 42),
        ("\u221242", -42),
        ("$1,234.50", Fraction(2469, 2)),
        ("\\$1{,}234", 1234),
        ("1,\\!234\\,567", 1234567),
        ("-$5", -5),
        ("$-5", -5),
        ("€5", 5),
        ("5.00", 5),
        (".5", Fraction(1, 2)),
        ("1e6", 1000000),
        ("1.5 \\times 10^{3}", 1500),
        ("\\frac{48}{3}", 16),
        ("\\dfrac12", Fraction(1, 2)),
        ("66\\frac{1}{2}", Fraction(133, 2)),
        ("1 1/2", Fraction(3, 2)),
        ("-3/4", Fraction(-3, 4)),
        ("50\\text{ miles}", 50),
        ("50\\text{ cm}^2", 50),
        ("1,200cm^2", 1200),
        ("12,345\\text{m}^2", 12345),
        ("1,200\\text{ cm} ^ { 2 }", 1200),
        ("1,200m²", 1200),
        ("1,200 sq ft", 1200),
        ("1,200sq ft", 1200),
        ("1,200cm2", 1200),
        ("1,200ft^{3}", 1200),
        ("1.5 \\times 10^{23}", 15 * 10**22),
        ("\\boldsymbol{72}", 72),
        ("\\bm{-72}", -72),
        ("\\pmb{7{,}200}", 7200),
        ("50 %", 50),
        ("90^\\circ", 90),
        ("$5.00/hour", 5),
        ("5kg", 5),
        ("18 dollars per day.", 18),
        ("2 million dollars", 2000000),
        ("**72**", 72),
        ("\\(72\\)", 72),
        ("\\text{72}", 72),
        ("$x = 72$", 72),
        ("9" * 150, int("9" * 150)),
    ],
)
def test_one_number_with_its_unit_has_an_exact_value(text: str, value: Fraction | int) -> None:
    assert number(text) == value


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "-",
            "x",
            "7x",
            "7 x",
            "7 x^2",
            "7x^2",
            "7x2",
            "7 x2",
            "7n²",
            "33, 34",
            "12,34",
            "40^2",
            "5!",
            "5\\pi",
            "2\\sqrt{3}",
            "3+4",
            "9+John's age",
            "1/0",
            "3:30",
        ),
        *("5 hours 30 minutes", "18 and a half", "x=5 or y=6", "\\pm 3", "0.5.3", "1.000,00", "--5", "1e9999", "nan", "inf"),
        *("\u0664\u0662", "9" * 10_000, "1" + " " * 150 + "!", "1 " + "a " * 95 + "2"),
    ],
)
def test_anything_else_has_none(text: str) -> None:
    assert number(text) is None


@pytest.mark.parametrize(
    ("extract", "text", "answer"),
    [
        (last_boxed, "\\boxed{1} then \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        (last_boxed, "\\boxed{\\{1\\}} done }", "\\{1\\}"),
        (last_boxed, "\\boxed{7} and \\boxed{8", "7"),
        (last_boxed, "\\boxed{7 and \\boxed{8}", "8"),
        (last_boxed, "\\boxed{a \\boxed{8} b}", "a \\boxed{8} b"),
        (last_boxed, "\\boxed{}", ""),
        (last_boxed, "boxed{7} {7}", None),
        (last_hashes, "#### 1\n#### 2 dollars\nbye", "2 dollars"),
        (last_hashes, "#### 3\n####\n", "3"),
        (last_hashes, "### 1\n##### 2", None),
        (last_answer_tag, "<answer>1</answer><answer> 2\n</answer><answer>3", " 2\n"),
        (last_answer_tag, "</answer><answer>", None),
        (closing_statement, "The answer is 5. No: the answer is 6.5 miles. Bye.", "6.5 miles"),
        (closing_statement, "**Final Answer:** **72**\n", "72**"),
        (closing_statement, "Answer:\n\n$12$\nbye", "$12$"),
        (closing_statement, "The answer is 5.\nI hope the answer is clear.", "5"),
        (closing_statement, "The answer is unknown", "unknown"),
        (closing_statement, "no answers here: 5", None),
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
        ("so\n#### 1,200", "1200", True),
        ("so\n#### 1200.0 dollars", "1,200", True),
        ("\\boxed{1} no \\boxed{2}", "1", False),
        ("\\boxed{}\n#### 5", "5", False),
        ("\\boxed{3.5}", "7/2", True),
        ("I think 5", "5", False),
        ("", "5", False),
    ],
)
def test_gsm8k_rule(reply: str, label: str, right: bool) -> None:
    assert gsm8k(reply, label, CONTEXT) is right


def test_a_label_that_is_no_number_is_an_error_not_a_wrong_answer() -> None:
    with pytest.raises(ValueError, match="'many' is not a number"):
        gsm8k("#### 5", "many", CONTEXT)


@pytest.mark.parametrize(
    ("reply", "right"),
    [
        ("6*3=18\n#### 18", True),
        ("#### -1,234.5\n", True),
        ("#### $18", True),
        ("issue #3\n#### 18", True),
        ("#### 17\n#### 18", False),
        ("#### 18 dollars", False),
        ("##### 18", False),
        ("#### 18\nthat is it", False),
        ("18", False),
        ("####", False),
    ],
)
def test_format_answer_rule(reply: str, right: bool) -> None:
    assert format_answer(reply, "5", CONTEXT) is right


# Of about so many characters.
BOMBS: dict[str, Callable[[int], str]] = {
    "boxes": lambda size: "\\boxed{" * (size // 7),
    "braces": lambda size: "{" * size,
    "braces in a box": lambda size: "\\boxed{" + "{" * (size // 2) + "}" * (size // 2 + 1),
    "hashes": lambda size: "#" * size,
    "hashes and lines": lambda size: "#### \n" * (size // 6),
    "hashes and numbers": lambda size: "#### 1 " * (size // 7),
    "answer tags": lambda size: "<answer>" * (size // 8),
    "ends of answers": lambda size: "</answer>" * (size // 9),
    "the answer": lambda size: "the answer " * (size // 11),
    "answer is": lambda size: "answer is " * (size // 10),
    "an answer and stars": lambda size: "answer" + " *" * (size // 2),
    "an answer and points": lambda size: "answer is " + "1." * (size // 2),
    "an answer and lines": lambda size: "answer is:" + "\n" * size,
    "digits in a box": lambda size: "\\boxed{" + "9" * size + "}",
    "spaces behind hashes": lambda size: "#### " + " " * size + "x",
}


@pytest.mark.parametrize("made", BOMBS.values(), ids=BOMBS)
def test_two_megabytes_of_anything_take_linear_time(made: Callable[[int], str]) -> None:
    whole = made(2_000_000)  # hours, for an expression that takes quadratic time
    for rule in (gsm8k, format_answer):
        assert rule(whole, "5", CONTEXT) is False
        assert is_linear(lambda text, rule=rule: rule(text, "5", CONTEXT), made, 10_000)


def shared(name: str) -> list[dict[str, Any]]:
    root = Path(os.environ.get("SLUICE_SHARED", Path(__file__).parents[3] / "shared"))
    if not (root / name).is_file():
        pytest.skip(f"{root / name} is absent; SLUICE_SHARED names the folder of shared data")
    with (root / name).open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def test_agrees_with_every_labelled_case() -> None:
    cases = [case for case in shared("cases/verifier_open.jsonl") if case["kind"] == "gsm8k"]
    assert len(cases) > 2000
    wrong = [case["id"] for case in cases if gsm8k(case["prediction"], case["truth"], CONTEXT) is not case["expected"]]
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
