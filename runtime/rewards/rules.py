"""What a reward rule is, and how one is added.

    from sluice import RuleContext, rule

    @rule("polite")
    def polite(text: str, label: str, context: RuleContext) -> bool:
        return "please" in text

A rule is a pure function of the reply's text (special tokens left out; of an episode of several turns the last one's), the
problem's label and the context; it may be `async`. A bool earns the configuration's `correct` or `wrong`; a float is the value
itself. It runs in a worker process that is killed at its limits, unless its `screen` settles the case in the service: only for
what is short and certain to end.

A rule over a whole group sees all replies to a prompt at once, and gives a value for each, in their order:

    @group_rule("rare")
    def rare(texts: list[str], label: str, context: GroupContext) -> list[float]:
        return [1 / texts.count(text) for text in texts]
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec

from runtime.registry import Registry

Value = bool | float


class RuleContext(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What a rule may want to know besides text and label."""

    source: str = ""  # the data source of the problem
    tokens: int = 0  # length of the reply, its stop token included; of an episode, of its last branch
    finish_reason: str = "stop"  # "stop", "length" or "abort"
    prompt: list[dict[str, str]] = []  # the messages before the reply, each with "role" and "content"
    extra: dict[str, Any] = {}  # other columns of the row, by the names in data.additional_keys: JSON values
    conversation: str = ""  # of an episode: all of its last branch, by the model and its environment. "": the text is all


class GroupContext(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The same for a rule over a group: what a reply has of its own is a list, in the order of the texts."""

    source: str = ""
    tokens: list[int] = []
    finish_reasons: list[str] = []
    prompt: list[dict[str, str]] = []
    extra: dict[str, Any] = {}
    conversations: list[str] = []  # none where all are ""


Context = RuleContext | GroupContext
Evaluate = Callable[..., "Value | list[Value]"]  # (text, label, RuleContext), or (texts, label, GroupContext)
EvaluateLater = Callable[..., Awaitable["Value | list[Value]"]]
Screen = Callable[[str, str, RuleContext], "Value | None"]
Answer = Callable[[str], "str | None"]
Function = TypeVar("Function", bound="Evaluate | EvaluateLater")


class RewardRule(msgspec.Struct, frozen=True):
    """A registered rule. `screen` answers None where the case is left to a worker. `grouped`: it is one over whole groups.

    `answer` names a reply's final answer so that equal ones read alike ("1,000" and "1000."), None where there is none: what
    maj@k counts. It runs in the service, as a screen does: it must end in time linear in the text. `sandboxed`: it runs
    programs in the sandbox of `rewards.sandbox`, which is tried before the first.
    """

    name: str
    evaluate: Evaluate | EvaluateLater
    screen: Screen | None = None
    answer: Answer | None = None
    grouped: bool = False
    sandboxed: bool = False


class RuleOutcome(msgspec.Struct, frozen=True, array_like=True):
    """One evaluation: a value, or the reason why there is none: timeout, memory, crash, or exception:NAME. Of a rule over a
    group: `values`, one for each reply."""

    value: bool | float | None = None
    error: str = ""
    values: list[bool | float] | None = None

    @property
    def unresolved(self) -> bool:
        """Neither a value nor an error: a screen left the case to a worker."""
        return self.value is None and self.values is None and not self.error


RULES: Registry[RewardRule] = Registry("rewards.rules.name")


def rule(name: str, screen: Screen | None = None, answer: Answer | None = None) -> Callable[[Function], Function]:
    """Register the decorated function, of (text, label, RuleContext), as the reward rule `name`; it may be `async`.

    It gives a bool, which earns the configuration's `correct` or `wrong`, or a number, the value itself. What it raises masks
    the sample out. `screen`: tried first, within the service, with the same arguments; None leaves the case to a worker.
    `answer`: from a reply's text to its final answer, None where it has none: what maj@k counts.
    """

    def register(function: Function) -> Function:
        _check(function, name, "(text, label, context)")
        RULES.register(name)(RewardRule(name, function, screen, answer))
        return function

    return register


def group_rule(name: str) -> Callable[[Function], Function]:
    """Register the decorated function, of (texts, label, GroupContext), as the rule `name` over whole groups.

    It gives one value for each text, in their order, as a rule does; it may be `async`. It always runs in a worker. Where it
    fails, all replies of the group are masked out.
    """

    def register(function: Function) -> Function:
        _check(function, name, "(texts, label, context)")
        RULES.register(name)(RewardRule(name, function, grouped=True))
        return function

    return register


def _check(function: Callable[..., object], name: str, arguments: str) -> None:
    """Raises TypeError for a function that cannot be called with the three `arguments`: it would fail on every reply."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some of C's have none
        return
    try:
        signature.bind("", "", None)
    except TypeError:
        raise TypeError(f"rule {name!r} takes {signature}; it is called with {arguments}") from None


def up_to(characters: int, function: Evaluate) -> Screen:
    """A screen for a function that takes linear time: `function` itself on replies of at most `characters`."""

    def screen(text: str, label: str, context: RuleContext) -> Value | None:
        if len(text) > characters:
            return None
        value: Value = function(text, label, context)  # type: ignore[assignment]  # it is one of single replies
        return value

    return screen


def attempt(
    function: Evaluate | Screen,
    text: str | list[str],
    label: str,
    context: Context,
    told: Callable[[Exception], None] = lambda error: None,
) -> RuleOutcome:
    """Call a rule or a screen; with the texts of a group, a rule over groups. Whatever it raises becomes the outcome's error,
    after `told` has seen it.

    So does a value that is no number (exception:TypeError) or not finite (exception:ValueError), and of a group another number
    of values than it has texts (exception:ValueError).
    """
    try:
        value: Any = function(text, label, context)  # type: ignore[arg-type]  # a screen is called with one text
        if isinstance(text, str):
            return RuleOutcome(value if value is None else _number(value))
        values = [_number(each) for each in value]
        if len(values) != len(text):
            raise ValueError(f"{len(values)} values for {len(text)} texts")
        return RuleOutcome(values=values)
    except MemoryError:
        return RuleOutcome(error="memory")
    except Exception as error:  # noqa: BLE001 - a rule is the user's code: its failure is a result, counted by type
        told(error)
        return RuleOutcome(error=f"exception:{type(error).__name__}")


def _number(value: object) -> Value:
    if isinstance(value, bool):
        return value
    if not isinstance(value, (int, float)):
        raise TypeError(f"{type(value).__name__} is no number")
    if not math.isfinite(value):
        raise ValueError(f"{value} is not finite")
    return float(value)
