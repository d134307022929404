"""What a reward rule is, and how one is added.

    from runtime.rewards.rules import RuleContext, rule

    @rule("polite")
    def polite(text: str, label: str, context: RuleContext) -> bool:
        return "please" in text

A rule is a pure function of the reply's text (special tokens left out), the problem's label and the context; it may be
`async`. A bool earns the configuration's `correct` or `wrong`; a float is the value itself. It runs in a worker process that is
killed at its limits, unless its `screen` settles the case in the service: only for what is short and certain to end.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from runtime.registry import Registry

Value = bool | float


class RuleContext(msgspec.Struct, frozen=True, array_like=True):
    """What a rule may want to know besides text and label."""

    source: str = ""  # the data source of the problem
    tokens: int = 0  # length of the reply, its stop token included
    finish_reason: str = "stop"  # "stop", "length" or "abort"


Evaluate = Callable[[str, str, RuleContext], Value]
EvaluateLater = Callable[[str, str, RuleContext], Awaitable[Value]]
Screen = Callable[[str, str, RuleContext], "Value | None"]
Answer = Callable[[str], "str | None"]
Function = TypeVar("Function", bound="Evaluate | EvaluateLater")


class RewardRule(msgspec.Struct, frozen=True):
    """A registered rule. `screen` answers None where the case is left to a worker.

    `answer` names a reply's final answer so that equal ones read alike ("1,000" and "1000."), None where there is none: what
    maj@k counts. It runs in the service, as a screen does: it must end in time linear in the text.
    """

    name: str
    evaluate: Evaluate | EvaluateLater
    screen: Screen | None = None
    answer: Answer | None = None


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """One evaluation: a value, or the reason why there is none: timeout, memory, crash, or exception:NAME."""

    value: bool | float | None = None
    error: str = ""

    @property
    def unresolved(self) -> bool:
        """Neither a value nor an error: a screen left the case to a worker."""
        return self.value is None and not self.error


RULES: Registry[RewardRule] = Registry("rewards.rules.name")


def rule(name: str, screen: Screen | None = None, answer: Answer | None = None) -> Callable[[Function], Function]:
    """Register the decorated function as the reward rule `name`."""

    def register(function: Function) -> Function:
        RULES.register(name)(RewardRule(name, function, screen, answer))
        return function

    return register


def up_to(characters: int, function: Evaluate) -> Screen:
    """A screen for a function that takes linear time: `function` itself on replies of at most `characters`."""

    def screen(text: str, label: str, context: RuleContext) -> Value | None:
        return function(text, label, context) if len(text) <= characters else None

    return screen


def attempt(function: Evaluate | Screen, text: str, label: str, context: RuleContext) -> Outcome:
    """Call a rule or a screen. Whatever it raises becomes the outcome's error.

    So does a value that is no number (exception:TypeError) or not finite (exception:ValueError).
    """
    try:
        value = function(text, label, context)
        return Outcome(value if value is None or isinstance(value, bool) else _finite(value))
    except MemoryError:
        return Outcome(error="memory")
    except Exception as error:  # noqa: BLE001 - a rule is the user's code: its failure is a result, counted by type
        return Outcome(error=f"exception:{type(error).__name__}")


def _finite(value: object) -> float:
    if not isinstance(value, (int, float)):
        raise TypeError(f"{type(value).__name__} is no number")
    if not math.isfinite(value):
        raise ValueError(f"{value} is not finite")
    return float(value)
