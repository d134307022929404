"""Reward rules: how to register one, and the built-in ones on the text of a reply.

A rule is a pure function of the reply's text, the problem's label and the context; it may be `async`. It runs in a worker
process that is killed at its limits, unless its `screen` decides the case in the service. See docs/guides/rewards.md."""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from decimal import Decimal
from itertools import islice
from math import isfinite
from numbers import Real
from typing import Any, TypeVar, overload

import msgspec

from runtime.registry import Registry
from runtime.rewards.extraction import BOX, closing_statement, final_answer, label_number, last_box, last_boxed, number
from runtime.rewards.mathematics.answers import canonical, equal, last_value
from runtime.rewards.mathematics.answers import screen as screen_answer

# ---- Signatures
# Reward functions in the forms of other trainers, recognized by a parameter: verl's by `solution_str`, TRL's by `completions`.
# TRL's arguments are lists over the group, and so is the result. Any other function is called with (text, label, context).

VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
LABEL_COLUMNS = ("label", "ground_truth", "answer", "solution", "target")  # of TRL's form, unless the row has such a column
Call = Callable[..., Any]


def _called(function: Call, arguments: Call, result: Call) -> Call:
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


NO_NUMBER = "no number: "  # and a type: the error of an outcome if the rule returned a value of this type, the user's mistake


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


def _rule_of(name: str, function: Any, **options: Any) -> RewardRule:
    """Make a rule of a function. Raises TypeError if its parameters would make it fail on every reply."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some C functions have no signature
        return RewardRule(name, function, **options)
    parameters, evaluate, fault = signature.parameters, function, ""
    if "solution_str" in parameters:
        if others := [each for each in _required(parameters) if each not in VERL]:
            fault = f"{', '.join(others)}; verl's reward functions do not get it; allowed: {', '.join(VERL)}"
        evaluate = _called(function, lambda *given: _chosen(parameters, _verl_arguments(*given)), _verl_score)
    elif "completions" in parameters:
        if "completion_ids" in _required(parameters):
            fault = "completion_ids, but rules get no token ids; take completions"
        evaluate = _called(function, lambda *given: _trl_arguments(parameters, *given), _trl_scores)
        options["grouped"] = True
    else:
        try:
            signature.bind("", "", None)
        except TypeError:
            text = "texts" if options.get("grouped") else "text"
            fault = f"{signature}; it is called with ({text}, label, context), or as verl or TRL calls it"
    if fault:
        raise TypeError(f"rule {name!r} takes {fault}")
    return RewardRule(name, evaluate, **options)


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
    return _registered(name, screen=screen, answer=answer)


@overload
def group_rule(name: Function) -> Function: ...
@overload
def group_rule(name: str) -> Callable[[Function], Function]: ...
def group_rule(name: Any) -> Any:
    """Register the decorated function, of (texts, label, GroupContext), as a rule over whole groups, like `rule`. It returns
    one value for each text, in their order. If it fails, all replies of the group are masked out."""
    return _registered(name, grouped=True)


def _registered(name: Any, **options: Any) -> Any:
    """Register the function `name` under its own name, or return a decorator that registers a function as `name`."""
    if callable(name):
        return _registered(name.__name__, **options)(name)
    return RULES.register_made(name, lambda function: _rule_of(name, function, **options))


def up_to(characters: int, function: Evaluate) -> Screen:
    """Return a screen for a function in linear time: `function` itself, on replies of at most `characters`."""

    def screen(text: str, label: str, context: RuleContext) -> Value | None:
        return function(text, label, context) if len(text) <= characters else None  # type: ignore[return-value]

    return screen


OnError = Callable[[Exception], None]


def attempt(
    function: Evaluate | Screen, text: str | list[str], label: str, context: Context, on_error: OnError = lambda error: None
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
    scalar: Any = value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value
    if isinstance(scalar, bool):
        return scalar
    if not isinstance(scalar, (Real, Decimal)):
        raise _NoNumberError(type(value).__name__)
    if not isfinite(scalar):
        raise ValueError(f"{value} is not finite")
    return float(scalar)


# ---- Format
# Rules about the form of a reply; they ignore its answer. Each takes linear time on any input.

FORMAT_CHARACTERS = 262_144  # at this length a rule is a few searches

THINK, THOUGHT, ANSWER, ANSWERED = "<think>", "</think>", "<answer>", "</answer>"

_ANSWER_AT_END = re.compile(r"(?<!#)####[ \t]*[-+]?\$?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?\s*\Z")
_TURN = re.compile(rf"{THOUGHT}\s*{ANSWER}")
_MARKER = re.compile(r"^(?:[0-9]+\.|[-*])|Step [0-9]+:|First,|Second,|Next,|Finally,", re.MULTILINE)
_MARKERS_WANTED = 3


def answer_part(text: str) -> str | None:
    """Return the text between the answer tags of a reply `<think>…</think> <answer>…</answer>`; None in another form."""
    end = len(text) - text.endswith("\n") - len(ANSWERED)
    if not text.startswith(THINK) or end < 0 or not text.startswith(ANSWERED, end):
        return None
    turn = _TURN.search(text, len(THINK), end)
    return None if turn is None else text[turn.end() : end]


def holds_one_box(text: str, part: str) -> bool:
    r"""Return whether `text` has exactly one `\boxed{`, and `part` of it holds this box complete."""
    return len(BOX.findall(text)) == 1 and last_boxed(part) is not None


def strictly_formatted(text: str) -> bool:
    r"""Return whether each tag and one `\boxed{}` occur exactly once, in order, from the first character to the last."""
    part = answer_part(text)
    once = all(text.count(tag) == 1 for tag in (THINK, THOUGHT, ANSWER, ANSWERED))
    return part is not None and once and text.endswith(ANSWERED) and holds_one_box(text, part)


def _rule(name: str, characters: int = FORMAT_CHARACTERS, answer: Answer | None = None) -> Callable[[Evaluate], Evaluate]:
    """Return a decorator that registers a linear-time function. The service calls it on replies of up to `characters`."""
    return lambda function: rule(name, screen=up_to(characters, function), answer=answer)(function)


@_rule("format")
def tagged(text: str, label: str, context: RuleContext) -> bool:
    """Return whether the reply is `<think>…</think>`, optional space, `<answer>…</answer>`."""
    return answer_part(text) is not None


@_rule("strict_format")
def strict_format(text: str, label: str, context: RuleContext) -> float:
    r"""Return 1 if the reply has the form of `format`, each tag once, and one `\boxed{}` in the answer; else -0.5."""
    return 1.0 if strictly_formatted(text) else -0.5


@_rule("r1_zero_format")
def r1_zero_format(text: str, label: str, context: RuleContext) -> bool:
    r"""Return whether the reply has the form of `format`, and exactly one `\boxed{}`, inside the answer."""
    part = answer_part(text)
    return part is not None and holds_one_box(text, part)


@_rule("think_answer")
def think_answer(text: str, label: str, context: RuleContext) -> bool:
    r"""Return whether the whole reply is `<think>\n…\n</think>\n<answer>\n…\n</answer>`."""
    head, turn, tail = f"{THINK}\n", f"\n{THOUGHT}\n{ANSWER}\n", f"\n{ANSWERED}"
    end = len(text) - len(tail)
    return text.startswith(head) and text.endswith(tail) and text.find(turn, len(head), max(end, 0)) >= 0


@_rule("think_prefix")
def think_prefix(text: str, label: str, context: RuleContext) -> bool:
    """Return whether the reply begins with its only `<think>` and has a `</think>`. Any text may follow."""
    return text.startswith(THINK) and text.count(THINK) == 1 and THOUGHT in text


@_rule("step")
def step(text: str, label: str, context: RuleContext) -> float:
    """Return min(1, markers / 3). Markers: numbered and bulleted lines, "Step 1:", "First,", "Second,", "Next,", "Finally,"."""
    return len(list(islice(_MARKER.finditer(text), _MARKERS_WANTED))) / _MARKERS_WANTED


@_rule("format_answer")
def format_answer(text: str, label: str, context: RuleContext) -> bool:
    """Return whether the reply ends with `#### number` and holds no other `####`."""
    mark = text.rfind("####")
    return text.count("####") == 1 and _ANSWER_AT_END.match(text, mark) is not None


@_rule("gsm8k_format")
def gsm8k_format(text: str, label: str, context: RuleContext) -> float:
    """Return 1.25 if `format_answer` is true, else -1."""
    return 1.25 if format_answer(text, label, context) else -1.0


INLINE_CHARACTERS = 32_768  # extraction takes linear time: about 1 ms at this length
TAIL_CHARACTERS = 2000  # searched for an answer if the reply marks none
VOTE_CHARACTERS = 1024  # two replies would not share a longer answer


def vote(extract: Answer) -> Answer:
    """Return the vote of a rule. `extract` finds the rule's answer in a reply."""

    def answer(text: str) -> str | None:
        words = canonical(extract(text) or "")
        return words if 0 < len(words) <= VOTE_CHARACTERS and not words.isspace() else None

    return answer


def numeric_equal(answer: str, label: str) -> bool:
    """Return whether `answer` is the number `label`, by exact value. Raises ValueError if the label is not a number."""
    expected = label_number(label)
    if expected is None:
        raise ValueError(f"the label {label!r} is not a number")
    return number(answer) == expected


@_rule("gsm8k", INLINE_CHARACTERS, vote(final_answer))
def gsm8k(text: str, label: str, context: RuleContext) -> bool:
    """Return whether `final_answer` (last box, `####`, answer tag or closing statement) is the number `label`."""
    return numeric_equal(final_answer(text) or "", label)


@_rule("gsm8k_answer", INLINE_CHARACTERS, vote(final_answer))
def gsm8k_answer(text: str, label: str, context: RuleContext) -> float:
    """Return 1 if `gsm8k` is true, else -1."""
    return 1.0 if gsm8k(text, label, context) else -1.0


_LAST_NUMBER = re.compile(r"(?:(?<![0-9])-)?[0-9][0-9,]*(?:\.[0-9]+)?")


def last_number_answer(text: str) -> str | None:
    """Return the last number within the last TAIL_CHARACTERS of the reply; None without a number."""
    found = _LAST_NUMBER.findall(text[-TAIL_CHARACTERS:])
    return found[-1].rstrip(",") if found else None


@_rule("last_number", 1 << 62, vote(last_number_answer))
def last_number(text: str, label: str, context: RuleContext) -> bool:
    """Return whether the reply's last number is `label`. A reply that only repeats a sum has no answer."""
    return numeric_equal(last_number_answer(text) or "", label)


# ---------------------------------------------------------------------------------------------------- mathematics

Compare = Callable[[str, str], "bool | None"]  # compares an answer with a label; None: undecided


def math_answer(text: str) -> str | None:
    """Return the last box, else the text behind the last `####`, the last answer tag, a closing statement, or None."""
    box = last_box(text)
    return final_answer(text) if box is None else box


def boxed_answer(text: str) -> str | None:
    """Return the last box, else a closing statement, else the reply's last formula or number, or None."""
    box = last_box(text)
    return closing_statement(text) or last_value(text[-TAIL_CHARACTERS:]) if box is None else box


def filled_box(text: str) -> str | None:
    """Return the last box; None if it is empty or not closed."""
    box = last_box(text)
    return box if box and not box.isspace() else None


def strictly_filled_box(text: str) -> str | None:
    """Return `filled_box` of a reply with the form of `strict_format`; else None."""
    return filled_box(text) if strictly_formatted(text) else None


def _register(
    name: str, extract: Answer, right: Value = True, wrong: Value = False, missing: Value = False, vote_by: Answer | None = None
) -> Evaluate:
    """Register the rule `name`: whether the answer that `extract` finds is mathematically the label. `missing`: the value if it
    finds none. The screen compares without algebra. A reply votes for the answer of `vote_by`, else of `extract`."""

    def judged(text: str, label: str, compare: Compare) -> Value | None:
        answer = extract(text)
        if answer is None:
            return missing
        verdict = compare(answer, label)
        return None if verdict is None else right if verdict else wrong

    def screened(text: str, label: str, context: RuleContext) -> Value | None:
        return judged(text, label, screen_answer) if len(text) <= INLINE_CHARACTERS else None

    def evaluate(text: str, label: str, context: RuleContext) -> Value:
        return judged(text, label, equal)  # type: ignore[return-value]  # the full comparison always decides

    return rule(name, screen=screened, answer=vote(vote_by or extract))(evaluate)


math = _register("math", math_answer)
boxed = _register("boxed", boxed_answer)
expr = _register("expr", str)
# Only the last box: the values of MindSpeed-RL and R1-Zero.
acc = _register("acc", filled_box, 1.0, -0.5, -1.0)
base_acc = _register("base_acc", strictly_filled_box, vote_by=filled_box)
math_17k_acc = _register("math_17k_acc", filled_box)
r1_zero_acc = _register("r1_zero_acc", filled_box, 1.0, -1.0, -1.0)


# ---- DAPO's rule (arXiv:2503.14476): the last line `Answer: …`, as normalized text

WINDOW = 300  # characters that are searched at the end of the reply
DAPO_CHARACTERS = 1 << 20  # a longer reply costs no more: only WINDOW characters are searched

_LAST_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_DAPO_REPLACED = (
    *(("an ", ""), ("a ", ""), (",\\!", ""), ("{,}", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text")),
    *((",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}")),
)
_DAPO_UNITS = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "ft", "hours", "km", "units", "points", "feet", "minutes"),
    *("digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students", "childrentickets"),
    *("multiples", "\\text{s}", "\\text{.}", "\\text{}^2", "\\text{}^3", "\\text{}", "\\mathrm{th}", "^\\circ"),
    *("^{\\circ}", "\\;", '"', "\\dots", "\\ldots"),
)
_FORMULA = re.compile(r"\$([^$]*)\$")
_APART = re.compile(r"(?<=[0-9]) +(?![0-9]{3}(?![0-9]))(?=[0-9])")  # two numbers, but not 1 000
_THOUSANDS = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+")
_MORE = re.compile(r"[$0-9]|not|wrong|incorrect|most|least|than")  # beside a formula: another value, or a negation
_WRAPPED = re.compile(r"\\(?:text|textbf|overline|boxed)\{([^{}]*)\}")
_SHORT_FRACTION = re.compile(r"\\frac([^{\\])([^{\\])")
_SHORT_ROOT = re.compile(r"\\sqrt([^{\\])")
_EMPHASIS = "*_` "


def normal_form(answer: str) -> str:
    """Return the text behind the last `=` without units, spaces, text commands and thousands commas; expand `\\frac12`."""
    text = _APART.sub("\0", answer.strip(_EMPHASIS).rstrip(".").split("=")[-1].replace("\0", ""))
    for old, new in _DAPO_REPLACED:
        text = text.replace(old, new)
    for unit in _DAPO_UNITS:
        text = text.replace(unit, "\0")
    text = re.sub(r"(?<=[0-9])\0+(?=[0-9])", " ", text).replace("\0", "")  # 5 hours 30 minutes
    formula = _FORMULA.search(text)
    if formula and not _MORE.search(text[: formula.start()] + text[formula.end() :]):
        text = formula.group(1)
    text = _WRAPPED.sub(r"\1", text)
    text = _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text)
    text = _SHORT_ROOT.sub(r"\\sqrt{\1}", text).replace("$", "").strip(_EMPHASIS)
    return text.replace(",", "") if _THOUSANDS.fullmatch(text) else text


def _last_line(text: str) -> str | None:
    found = _LAST_LINE.findall(text[-WINDOW:])
    return normal_form(found[-1]) if found else None


@_rule("acc_for_dapo", DAPO_CHARACTERS, _last_line)
def acc_for_dapo(text: str, label: str, context: RuleContext) -> float:
    """Return 1 if the last `Answer: …` of the last 300 characters is the label, both in normal form; else -1."""
    answer = _last_line(text)
    return 1.0 if answer is not None and answer == normal_form(label) else -1.0
