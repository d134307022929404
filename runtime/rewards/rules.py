"""Reward rules, and how to add one.

    from sluice import RuleContext

    def polite(text: str, label: str, context: RuleContext) -> bool:
        return "please" in text

`FILE.py:polite` names the rule in the configuration. The decorator `rule` adds a screen, an answer or another name.

A rule is a pure function of the reply's text, the problem's label and the context; it may be `async`. It runs in a worker
process that is killed at its limits, unless its `screen` decides the case in the service. See docs/guides/rewards.md."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping
from decimal import Decimal
from numbers import Real
from typing import Any, TypeVar, overload

import msgspec

from runtime.registry import Registry

# ---- Signatures
# Reward functions in the forms of other trainers, recognized by a parameter: verl's by `solution_str`, TRL's by `completions`.
# TRL's arguments are lists over the group, and so is the result. Any other function is called with (text, label, context).

VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
LABEL_COLUMNS = ("label", "ground_truth", "answer", "solution", "target")
"""Names under which a function of TRL's form finds the label, unless the row has a column with the name."""

Ours = Callable[..., Any]


def _called(function: Callable[..., Any], arguments: Callable[..., dict[str, Any]], result: Callable[[Any], Any]) -> Ours:
    if inspect.iscoroutinefunction(function):

        async def later(text: Any, label: str, context: Any) -> Any:
            return result(await function(**arguments(text, label, context)))

        return later
    return lambda text, label, context: result(function(**arguments(text, label, context)))


def _required(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [name for name, each in parameters.items() if each.default is each.empty and each.kind not in variable]


def _chosen(parameters: Mapping[str, inspect.Parameter], given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments for which the function has a parameter. A function with **kwargs takes all."""
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return given
    return {name: value for name, value in given.items() if name in parameters}


def _verl_arguments(text: str, label: str, context: RuleContext) -> dict[str, Any]:
    """Return verl's arguments. `data_source` and `extra_info`: the columns, else the file and `data.additional_keys`."""
    extra = context.extra.get("extra_info", context.extra)
    source = context.extra.get("data_source", context.source)
    return dict(zip(VERL, (source, text, label, extra), strict=True))


def _verl_score(found: Any) -> Any:
    return found["score"] if isinstance(found, Mapping) else found


def _trl_arguments(
    parameters: Mapping[str, inspect.Parameter], texts: list[str], label: str, context: GroupContext
) -> dict[str, Any]:
    """Return TRL's arguments. A completion is a list of one message, since the prompts are conversations."""
    columns: dict[str, Any] = dict.fromkeys(LABEL_COLUMNS, label) | context.extra
    given = {name: [value] * len(texts) for name, value in columns.items()}
    given["prompts"] = [context.prompt] * len(texts)
    given["completions"] = [[{"role": "assistant", "content": text}] for text in texts]
    if absent := [name for name in _required(parameters) if name not in given]:
        raise KeyError(f"the row has no column {', '.join(absent)}; data.additional_keys names the columns that rules get")
    return _chosen(parameters, given)


def _trl_scores(found: Any) -> list[Any]:
    """Return the scores with 0 for None: TRL leaves a None out of a reply's sum of rewards."""
    return [0.0 if each is None else each for each in found]


Value = bool | float


class RuleContext(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The information that a rule gets besides text and label."""

    source: str = ""  # the data source of the problem
    tokens: int = 0  # length of the reply, stop token included; for an episode, of its last branch
    finish_reason: str = "stop"  # "stop", "length" or "abort"
    prompt: list[dict[str, str]] = []  # the messages before the reply, each with "role" and "content"
    extra: dict[str, Any] = {}  # other columns of the row, by the names in data.additional_keys: JSON values
    conversation: str = ""  # the last branch of an episode, by the model and its environment; "": only the text


class GroupContext(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The same for a rule over a group. Properties of single replies are lists, in the order of the texts."""

    source: str = ""
    tokens: list[int] = []
    finish_reasons: list[str] = []
    prompt: list[dict[str, str]] = []
    extra: dict[str, Any] = {}
    conversations: list[str] = []  # empty if all are ""


Context = RuleContext | GroupContext
Evaluate = Callable[..., "Value | list[Value]"]  # (text, label, RuleContext), or (texts, label, GroupContext)
EvaluateLater = Callable[..., Awaitable["Value | list[Value]"]]
Screen = Callable[[str, str, RuleContext], "Value | None"]
Answer = Callable[[str], "str | None"]
Function = TypeVar("Function", bound="Evaluate | EvaluateLater")


class RewardRule(msgspec.Struct, frozen=True):
    """A registered rule; `screen` and `answer` are as in `rule`, and take linear time in the service. `grouped`: it judges
    whole groups. `sandboxed`: it runs programs in the sandbox of `rewards.sandbox`, which is tested at the start."""

    name: str
    evaluate: Evaluate | EvaluateLater
    screen: Screen | None = None
    answer: Answer | None = None
    grouped: bool = False
    sandboxed: bool = False


NO_NUMBER = "no number: "
"""Prefix of an outcome's error if the rule returned a value of another type; the type follows. It is a mistake of the user."""


class RuleOutcome(msgspec.Struct, frozen=True, array_like=True):
    """One evaluation: a value, or the reason why there is none: timeout, memory, crash, exception:NAME, or NO_NUMBER. A rule
    over a group has `values`, one for each reply."""

    value: bool | float | None = None
    error: str = ""
    values: list[bool | float] | None = None

    @property
    def unresolved(self) -> bool:
        """True if there is neither a value nor an error: a screen left the case to a worker."""
        return self.value is None and self.values is None and not self.error


def _rule_of(
    name: str, function: Any, screen: Screen | None = None, answer: Answer | None = None, grouped: bool = False
) -> RewardRule:
    """Make a rule of a function. Raises TypeError if its parameters would make it fail on every reply."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some C functions have no signature
        return RewardRule(name, function, screen, answer, grouped)
    parameters, evaluate, fault = signature.parameters, function, ""
    if "solution_str" in parameters:
        if others := [each for each in _required(parameters) if each not in VERL]:
            fault = f"{', '.join(others)}; verl's reward functions do not get it; allowed: {', '.join(VERL)}"
        evaluate = _called(function, lambda *given: _chosen(parameters, _verl_arguments(*given)), _verl_score)
    elif "completions" in parameters:
        if "completion_ids" in _required(parameters):
            fault = "completion_ids, but rules get no token ids; take completions"
        evaluate, grouped = _called(function, lambda *given: _trl_arguments(parameters, *given), _trl_scores), True
    else:
        try:
            signature.bind("", "", None)
        except TypeError:
            called = f"({'texts' if grouped else 'text'}, label, context), or as verl or TRL calls it"
            fault = f"{signature}; it is called with {called}"
    if fault:
        raise TypeError(f"rule {name!r} takes {fault}")
    return RewardRule(name, evaluate, screen, answer, grouped)


class RuleRegistry(Registry[RewardRule]):
    """The registry of rules. A plain function of a user's file is a rule too."""

    absent = "{path} neither registers nor defines it"

    def undecorated(self, name: str, value: object) -> RewardRule | None:
        return _rule_of(name, value) if callable(value) else None


RULES = RuleRegistry("rewards.rules.name")


@overload
def rule(name: Function) -> Function: ...
@overload
def rule(name: str, screen: Screen | None = None, answer: Answer | None = None) -> Callable[[Function], Function]: ...
def rule(name: Any, screen: Screen | None = None, answer: Answer | None = None) -> Any:
    """Register the decorated function, of (text, label, RuleContext), as the reward rule `name`; it may be `async`. A bare
    `@rule` uses the function's own name. A function without a screen and an answer needs no decorator.

    The function returns a bool, which earns the configuration's `correct` or `wrong`, or a number, which is the value. If it
    raises, the sample is masked out. `screen`: tried first, in the service, with the same arguments; None leaves the case to a
    worker. `answer`: returns the final answer in a reply's text for maj@k, or None; equal answers should give equal text."""
    return _registered(name, screen, answer)


@overload
def group_rule(name: Function) -> Function: ...
@overload
def group_rule(name: str) -> Callable[[Function], Function]: ...
def group_rule(name: Any) -> Any:
    """Register the decorated function, of (texts, label, GroupContext), as a rule over whole groups, like `rule`. It returns
    one value for each text, in their order. If it fails, all replies of the group are masked out."""
    return _registered(name, grouped=True)


def _registered(name: Any, *options: Any, **more: Any) -> Any:
    """Register the function `name` under its own name, or return a decorator that registers a function as `name`."""
    if callable(name):
        return _registered(name.__name__, *options, **more)(name)

    def register(function: Function) -> Function:
        RULES.register(name)(_rule_of(name, function, *options, **more))
        return function

    return register


def up_to(characters: int, function: Evaluate) -> Screen:
    """Return a screen for a function in linear time: `function` itself, on replies of at most `characters`."""

    def screen(text: str, label: str, context: RuleContext) -> Value | None:
        if len(text) > characters:
            return None
        value: Value = function(text, label, context)  # type: ignore[assignment]  # a rule over single replies
        return value

    return screen


def attempt(
    function: Evaluate | Screen,
    text: str | list[str],
    label: str,
    context: Context,
    on_error: Callable[[Exception], None] = lambda error: None,
) -> RuleOutcome:
    """Call a rule or a screen with a text, or a rule over groups with the texts of a group. An exception becomes the outcome's
    error; `on_error` receives it first. A value that is not finite, and a wrong number of values, are a ValueError."""
    try:
        value: Any = function(text, label, context)  # type: ignore[arg-type]  # a screen is called with one text
        if isinstance(text, str):
            return RuleOutcome(value if value is None else _number(value))
        if not isinstance(value, Iterable):
            raise _NoNumberError(f"{type(value).__name__}, for {len(text)} texts")
        values = [_number(each) for each in value]
        if len(values) != len(text):
            raise ValueError(f"{len(values)} values for {len(text)} texts")
        return RuleOutcome(values=values)
    except MemoryError:
        return RuleOutcome(error="memory")
    except _NoNumberError as error:
        return RuleOutcome(error=f"{NO_NUMBER}{error}")
    except Exception as error:  # noqa: BLE001 - a rule is the user's code: its failure is a result, counted by type
        on_error(error)
        return RuleOutcome(error=f"exception:{type(error).__name__}")


class _NoNumberError(Exception):
    """A value of a type that cannot be a reward; `str(error)` is the type."""


def _number(value: object) -> Value:
    """Return the value as a bool or a float. It may be any real number, or a scalar of numpy or torch."""
    scalar: Any = value
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        scalar = scalar.item()
    if isinstance(scalar, bool):
        return scalar
    if not isinstance(scalar, (Real, Decimal)):
        raise _NoNumberError(type(value).__name__)
    if not math.isfinite(scalar):
        raise ValueError(f"{value} is not finite")
    return float(scalar)
