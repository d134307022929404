r"""Rules on whether the last box of a reply is right: the values of MindSpeed-RL's verifiers and of R1-Zero's.

An empty or unclosed last box is no answer. "Equal" is what the rule `math` takes it to be.
"""

from __future__ import annotations

from collections.abc import Callable

from runtime.rewards.extraction import last_box
from runtime.rewards.format import strictly_formatted
from runtime.rewards.mathematics.answers import equal, screen
from runtime.rewards.rules import Evaluate, RuleContext, Value, rule
from runtime.rewards.votes import vote

INLINE_CHARACTERS = 32_768  # extraction takes linear time: about 1 ms at this length

Compare = Callable[[str, str], "bool | None"]  # an answer with a label; None leaves it open
Judge = Callable[[str, str, Compare], "Value | None"]


def _register(name: str, judge: Judge) -> Evaluate:
    """The rule `name`: `judge` with the whole comparison; its screen is the same with one that takes no algebra."""

    def screened(text: str, label: str, context: RuleContext) -> Value | None:
        return judge(text, label, screen) if len(text) <= INLINE_CHARACTERS else None

    def evaluate(text: str, label: str, context: RuleContext) -> Value:
        value = judge(text, label, equal)
        assert value is not None, "the whole comparison leaves nothing open"
        return value

    return rule(name, screen=screened, answer=vote(last_box))(evaluate)


def _right(text: str, label: str, compare: Compare) -> bool | None:
    """Whether the last box is equal to the label; without an answer it is not."""
    box = last_box(text)
    return compare(box, label) if box and not box.isspace() else False


def _acc(text: str, label: str, compare: Compare) -> float | None:
    """1 for the right answer, -0.5 for a wrong one, -1 without a box or with nothing in it."""
    box = last_box(text)
    if not box or box.isspace():
        return -1.0
    right = compare(box, label)
    return None if right is None else 1.0 if right else -0.5


def _base_acc(text: str, label: str, compare: Compare) -> bool | None:
    """The form that `strict_format` wants, and the right answer."""
    return strictly_formatted(text) and _right(text, label, compare)


def _r1_zero_acc(text: str, label: str, compare: Compare) -> float | None:
    """1 for the right answer, else -1."""
    right = _right(text, label, compare)
    return None if right is None else 1.0 if right else -1.0


acc = _register("acc", _acc)
base_acc = _register("base_acc", _base_acc)
math_17k_acc = _register("math_17k_acc", _right)
r1_zero_acc = _register("r1_zero_acc", _r1_zero_acc)
