"""Answers made to hang, to eat memory or to be run as code: decided or refused in time, and nothing carried out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from runtime.rewards.accuracy import boxed
from runtime.rewards.accuracy import math as math_rule
from runtime.rewards.mathematics import answers
from runtime.rewards.mathematics.answers import canonical, equal
from runtime.rewards.mathematics.tree import TooCostly
from runtime.rewards.rules import RULES, RuleContext
from tests.unit.counted_work import is_linear, work

CONTEXT = RuleContext()
CODE = "__import__('pathlib').Path('touched').touch()"

HOSTILE = [
    *(r"9^{9^{9^{9^{9}}}}", "9^9^9^9^9", r"2^{2^{2^{2^{2^{2^{2}}}}}}", r"1/3^{10^9}", r"10^{-10^{10}}", r"(-1)^{10^{100}}"),
    *("9" * 100_000 + "!", "10000000!", r"(10^{10})!", r"((100!)!)!", "3!!!!!!!!!!", r"\frac{1}{(10^9)!}"),
    *(r"\binom{10^9}{5\cdot 10^8}", r"\binom{1000000}{500000}", r"\binom{n}{10^{12}}"),
    *("{" * 100_000, "(" * 5000 + "5" + ")" * 5000, "(" * 100 + "5" + ")" * 100, r"\frac{" * 1000, r"\sqrt" * 3000 + "2"),
    *(r"\frac{1}{" * 200 + "2" + "}" * 200, r"3\frac{" * 40 + "2" + "}{3}" * 40, r"\sqrt{" * 300 + "2" + "}" * 300),
    *(r"\left(" * 500, r"\begin{pmatrix}" * 500, r"\begin{pmatrix}" + "1&" * 900 + r"1\end{pmatrix}", "|x" * 300, "|" * 1000),
    *("x" * 2_000_000, "1" * 2_000_000, "1+" * 1_000_000 + "1", "-" * 1_000_000 + "5", "1," * 1_000_000, "1 " * 1_000_000),
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
    *(
        r"\boldsymbol{" * 250,
        r"\bm{" * 900 + "5" + "}" * 900,
        r"\bm" * 1300 + "5",
        "^\\bm{5}" * 500,
        r"{\bf " * 700,
        "x!=" * 1300,
    ),
    *("p=5,q=2;" * 140, ";".join(f"p={n},q={n + 1}" for n in range(140)), "(p,q)=" * 300, "(1,2)," * 190, "p,q=1;" * 190),
    *("1,200m^2 " * 400, "1 200" * 700, "cm^2" * 900, "m ^ { 2 " * 400),
    *(CODE, f"\\text{{{CODE}}}", f"${CODE}$", f"\\int {CODE}", f"\\operatorname{{{CODE}}}(1)", "lambda: 0", "().__class__"),
]


LABELS = ["5", r"\sqrt{2}", "x^2+1", r"2^{2^{100}}", "1,2"]
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


@pytest.mark.parametrize("answer", HOSTILE, ids=named)
@pytest.mark.parametrize("label", LABELS)
def test_decided_or_refused(answer: str, label: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_algebra: None) -> None:
    """And not carried out: computed as they stand, most of these would outlast the suite's deadline."""
    monkeypatch.chdir(tmp_path)
    for attempt in attempts(label):
        with suppress(TooCostly):
            assert attempt(answer) in (True, False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("answer", HOSTILE, ids=named)
def test_the_lines_that_run_for_an_answer_are_bounded(answer: str, no_algebra: None) -> None:
    for attempt in attempts(r"\sqrt{2}"):

        def decided(text: str, attempt: Callable[[str], object] = attempt) -> None:
            with suppress(TooCostly):
                attempt(text)

        assert work(decided, answer) < LINES + 2 * len(answer)


PIECES = [
    *(
        r"\frac",
        "{",
        "}",
        "(",
        ")",
        "[",
        "]",
        "^",
        "_",
        "!",
        "%",
        "1",
        "34",
        "0.5",
        "2e04",
        "x",
        "n",
        "i",
        "e",
        "f(",
        "+",
        "-",
        "*",
    ),
    *("/", "=", "<", r"\le", r"\in", r"\cup", r"\pm", ",", ";", r"\{", r"\}", "|", r"\sqrt", r"\sin", r"\log", r"\text{ cm}"),
    *(
        "and",
        "feet",
        r"\begin{pmatrix}",
        r"\end{pmatrix}",
        "&",
        r"\\",
        r"\infty",
        r"\pi",
        r"^\circ",
        "$",
        r"\(",
        r"\)",
        " ",
        ".",
    ),
    *(r"\boxed{", r"\lfloor", r"\rfloor", r"\sum", r"\binom", r"\left", r"\right", ":", "'", r"\ldots", r"\mathbb{R}", "is"),
    *(r"\prime", r"\overline{", r"\mid", r"\cdot", "10^", "1,000", r"\!", r"\,", r"\setminus", r"\emptyset", "max", "gcd("),
]
ANSWERS = st.lists(st.sampled_from(PIECES), max_size=14).map("".join)


@settings(max_examples=1500)
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
    [
        *(
            "x" * 401,
            "{" * 13 + "}" * 13,
            "9" * 30,
            "2^{1000}",
            "2^{2^{2}}",
            "x^y^z",
            "5!!",
            "(n)!",
            "9999!",
            r"\binom{1000}{2}",
        ),
    ],
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
    for text in HOSTILE:
        if len(text) > 32_000:
            assert is_linear(lambda text: screen(text, "5", CONTEXT), lambda size, text=text: text[:size], 16_000), text[:24]
            assert is_linear(
                lambda text: screen(text, "5", CONTEXT), lambda size, text=text: f"\\boxed{{{text[:size]}}}", 16_000
            ), text[:24]
