"""The answer verifiers `math`, `boxed` and `expr`: agreement with labelled cases, and each class of answers by hand."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.rewards.accuracy import boxed, expr
from runtime.rewards.accuracy import math as math_rule
from runtime.rewards.extraction import last_box
from runtime.rewards.mathematics.answers import canonical, equal
from runtime.rewards.mathematics.tree import TooCostly
from runtime.rewards.rules import RULES, RuleContext
from tests.unit.answer_pairs import DIFFERENT, EQUAL, ONE_WAY
from tests.unit.test_rewards_gsm8k import shared

CONTEXT = RuleContext()


def pairs(block: str) -> list[tuple[str, str]]:
    return [tuple(line.split(" | ", 1)) for line in block.strip("\n").split("\n")]  # type: ignore[misc]


# ------------------------------------------------------------------------------------------------ by class


@pytest.mark.parametrize("group", EQUAL)
def test_equal_answers(group: str) -> None:
    wrong = [pair for pair in pairs(EQUAL[group]) if not (equal(*pair) and equal(*reversed(pair)))]
    assert wrong == []


def test_different_answers() -> None:
    wrong = [pair for pair in pairs(DIFFERENT) if accepted(*pair) or accepted(*reversed(pair))]
    assert wrong == []


def accepted(prediction: str, truth: str) -> bool:
    try:
        return equal(prediction, truth)
    except TooCostly:  # it is masked, and earns nothing
        return False


def test_what_is_read_out_of_a_prediction_alone() -> None:
    assert [pair for pair in pairs(ONE_WAY) if not equal(*pair)] == []
    assert not equal("6", "6m")
    assert not equal("6", "6m^2")
    assert not equal("6", "6m2")
    assert not equal("7", "a+b = 7")
    assert not equal("0", "x^2 - 5x + 6 = 0")
    assert not equal("x^2 - 5x + 6 = 0", "0")


@pytest.mark.parametrize(
    "answers",
    [
        ("1/2", r"\frac{1}{2}", "0.5", r"\dfrac12", "$0.50$", r"\frac{2}{4}"),
        ("1,234", "1234", r"1{,}234", r"x = 1234", r"1234\text{ cm}"),
        ("(A)", r"\text{(A)}", "A", r"\textbf{A}"),
        ("odd", r"\text{odd}", "Odd"),
        ("(1, 2)", r"\left(1,2\right)", r"(1,\frac{4}{2})"),
        ("1, 2", "2,1", r"2\text{ and }1"),
        ("2x+y", "y + 2x", r"y+x\cdot 2"),
    ],
)
def test_obviously_equal_answers_have_one_vote(answers: tuple[str, ...]) -> None:
    assert len({canonical(answer) for answer in answers}) == 1


def test_different_answers_have_different_votes() -> None:
    answers = [
        "1",
        "2",
        "1,2",
        "(1,2)",
        "(2,1)",
        "[1,2]",
        "[1,2)",
        "x",
        "2x",
        "x^2",
        "A",
        "B",
        "odd",
        "even",
        "1/2",
        "-1/2",
        "?",
    ]
    assert len({canonical(answer) for answer in answers}) == len(answers)


@pytest.mark.parametrize(
    ("form", "value"),
    [
        (r"\sqrt{5-2\sqrt6}", math.sqrt(5 - 2 * math.sqrt(6))),
        (r"\frac{4}{3}-\frac{4\sqrt{3}\pi}{27}", 4 / 3 - 4 * math.sqrt(3) * math.pi / 27),
        (r"\arcsin{\frac{10}{13}}", math.asin(10 / 13)),
        (r"\log_3 7", math.log(7, 3)),
        (r"e^{-2\pi}", math.exp(-2 * math.pi)),
        (r"2\cos 15^{\circ}", 2 * math.cos(math.radians(15))),
        (r"\tan^{-1} 3", math.atan(3)),
        (r"\sqrt[5]{7}+1", 7**0.2 + 1),
        (r"\frac{17}{6}", 17 / 6),
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
ENDS = st.sampled_from(["()", "[]", "(]", "[)"])


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


@settings(max_examples=150)
@given(rational_expressions(), st.integers(1, 10**6))
def test_arithmetic_is_exact(expression: tuple[str, Fraction], part: int) -> None:
    text, value = expression
    assert equal(text, f"\\frac{{{value.numerator}}}{{{value.denominator}}}")
    other = value + Fraction(1, part * 10**30)
    assert not equal(text, f"\\frac{{{other.numerator}}}{{{other.denominator}}}")


@settings(max_examples=100)
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


@settings(max_examples=100)
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


@settings(max_examples=100)
@given(st.integers(2, 300), st.integers(2, 40), st.integers(2, 60))
def test_radicals_compare_exactly(radicand: int, factor: int, digits: int) -> None:
    assert equal(f"{factor}\\sqrt{{{radicand}}}", f"\\sqrt{{{radicand * factor**2}}}")
    assert not equal(f"{factor}\\sqrt{{{radicand}}}", f"{factor}\\sqrt{{{radicand}}}+10^{{-{digits}}}")


@settings(max_examples=50)
@given(st.integers(2, 9), st.integers(40, 10**6), st.integers(1, 99))
def test_what_is_too_large_to_write_down_is_the_same_text_or_refused(base: int, height: int, addend: int) -> None:
    tower = f"{base}^{{{base}^{{{height}}}}}"
    assert equal(f"{tower}+{addend}", f"{addend}+{tower}")
    for other in (f"{tower}+{addend}", f"{base}^{{{base}^{{{height + 1}}}}}", "((9!)!)!"):
        with pytest.raises(TooCostly):
            equal(tower, other)


@settings(max_examples=100)
@given(st.integers(-9, 9), st.integers(-9, 9), ENDS, ENDS)
def test_ends_of_intervals(low: int, high: int, ours: str, theirs: str) -> None:
    texts = [f"{ends[0]}{low}, {high + 10}{ends[1]} \\cup [90, 91]" for ends in (ours, theirs)]
    if low < high + 10:
        assert equal(*texts) is (ours == theirs)
    marks = {"(": "<", "[": "\\le", ")": "<", "]": "\\le"}
    chain = f"{low} {marks[ours[0]]} x {marks[ours[1]]} {high + 10}"
    assert not low < high + 10 or equal(chain, f"{theirs[0]}{low}, {high + 10}{theirs[1]}") is (ours == theirs)


# ------------------------------------------------------------------------------------------------ where the answer stands


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("\\boxed{1} then \\boxed{2}", "2"),
        ("\\boxed{1} then \\boxed{}", ""),
        ("\\boxed{1} then \\boxed{2", ""),
        ("\\boxed{1 and \\boxed{2}", "2"),
        ("\\boxed{a \\boxed{8} b}", "a \\boxed{8} b"),
        ("put it in \\boxed, as in \\boxed{5}. I used \\boxed.", "5"),
        ("{5}", None),
    ],
)
def test_the_last_box(text: str, answer: str | None) -> None:
    assert last_box(text) == answer


@pytest.mark.parametrize(
    ("reply", "label", "right", "right_without_mark"),
    [
        ("so \\boxed{\\frac{1}{2}}", "0.5", True, True),
        ("so \\boxed{1} no \\boxed{2}", "1", False, False),
        ("so \\boxed{1} and \\boxed{", "1", False, False),
        ("#### 5 cm", "$5$", True, None),
        ("<answer>x = 5</answer>", "5", True, None),
        ("The answer is $(1, 2)$.", "(1,2)", True, True),
        ("\\boxed{20\\%}", "so $x=1/5$, or $\\boxed{20}$ percent.", True, True),
        ("I think $\\frac12$", "\\frac{1}{2}", False, True),
        ("", "5", False, False),
    ],
)
def test_where_rules_look(reply: str, label: str, right: bool, right_without_mark: bool | None) -> None:
    assert math_rule(reply, label, CONTEXT) is right
    if right_without_mark is not None:
        assert boxed(reply, label, CONTEXT) is right_without_mark


# ------------------------------------------------------------------------------------------------ shared files


@pytest.mark.parametrize("kind", ["boxed", "expr"])
def test_agrees_with_every_labelled_case(kind: str) -> None:
    rule = {"boxed": boxed, "expr": expr}[kind]
    cases = [case for case in shared("cases/verifier_open.jsonl") if case["kind"] == kind]
    assert len(cases) > 500
    wrong = [case["id"] for case in cases if rule(case["prediction"], case["truth"], CONTEXT) is not case["expected"]]
    assert wrong == []


def test_a_screen_never_contradicts_its_rule() -> None:
    settled = 0
    for case in shared("cases/verifier_open.jsonl"):
        if case["kind"] in ("boxed", "expr"):
            found = RULES.find(case["kind"]).screen
            assert found is not None
            verdict = found(case["prediction"], case["truth"], CONTEXT)
            assert verdict is None or verdict is case["expected"], case["id"]
            settled += verdict is not None
    assert settled > 600


LABELS = (
    *("math/train.json", "math500/test.jsonl", "deepscaler_parts/aime_train.json", "deepscaler_parts/minerva_test.json"),
    *("deepscaler_parts/olympiad_bench_test.json", "deepscaler_parts/deepscaler_subset.json", "math_lvl3to5_8k/train.json"),
)


def labels(name: str) -> Iterator[str]:
    shared("cases/verifier_open.jsonl")  # skips where there are no shared files
    root = Path(os.environ.get("SLUICE_SHARED", Path(__file__).parents[3] / "shared")) / "data" / name
    text = root.read_text(encoding="utf-8")
    for row in json.loads(text) if name.endswith("json") else map(json.loads, text.splitlines()):
        answers = row["answer"] if isinstance(row["answer"], list) else [row["answer"]]
        yield from (str(answer) for answer in answers if answer is not None)


@pytest.mark.parametrize("name", LABELS)
def test_every_label_is_equal_to_itself(name: str) -> None:
    found = {label for label in labels(name) if label.strip()}
    assert len(found) > 100
    assert [label for label in found if not equal(f" {label} ", label)] == []
    assert [label for label in found if canonical(f"${label.strip(' $')}$") != canonical(label)] == []


def test_sympy_is_loaded_only_for_what_the_parser_cannot_read() -> None:
    code = (
        "import sys\nfrom runtime.rewards.mathematics.answers import equal\n"
        "assert equal(r'\\frac{1}{\\sqrt2}', r'\\frac{\\sqrt2}{2}') and equal('(x+1)^2', 'x^2+2x+1')\n"
        "assert 'sympy' not in sys.modules and 'torch' not in sys.modules\n"
        "assert equal(r'\\int_0^1 x dx', '0.5')\nassert 'sympy' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], timeout=60, check=True)
