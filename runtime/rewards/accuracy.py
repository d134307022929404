"""Rules that decide whether a reply's answer is right, and the votes of replies in maj@k."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import islice

from runtime.rewards.extraction import BOX, closing_statement, final_answer, label_number, last_box, last_boxed, number
from runtime.rewards.mathematics.answers import canonical, equal, last_value
from runtime.rewards.mathematics.answers import screen as screen_answer
from runtime.rewards.rules import Answer, Evaluate, RuleContext, Value, rule, up_to

# ---- Format
# Rules about the form of a reply; they ignore its answer. Each takes linear time on any input.

FORMAT_CHARACTERS = 262_144  # at this length a rule is a few searches

THINK, THOUGHT, ANSWER, ANSWERED = "<think>", "</think>", "<answer>", "</answer>"

_ANSWER_AT_END = re.compile(r"(?<!#)####[ \t]*[-+]?\$?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?\s*\Z")
_TURN = re.compile(rf"{THOUGHT}\s*{ANSWER}")
_MARKER = re.compile(r"^(?:[0-9]+\.|[-*])|Step [0-9]+:|First,|Second,|Next,|Finally,", re.MULTILINE)
_MARKERS_WANTED = 3


def answer_part(text: str) -> str | None:
    """Return the text between the answer tags of a reply `<think>…</think> <answer>…</answer>`; None in another form. It
    matches as `^<think>.*?</think>\\s*<answer>.*?</answer>$` with DOTALL, but takes linear time."""
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
    """Return a decorator that registers a linear-time function as the rule `name`. For replies of at most `characters` the
    service calls the function itself, instead of a worker."""
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
        found = extract(text)
        if found is None:
            return None
        words = canonical(found)
        return words if 0 < len(words) <= VOTE_CHARACTERS and not words.isspace() else None

    return answer


# ---------------------------------------------------------------------------------------------------- GSM8K's numbers


def numeric_equal(answer: str, label: str) -> bool:
    """Return whether `answer` is the number `label`, by exact value. Raises ValueError if the label is not a number."""
    if answer == label and answer.isdecimal() and answer.isascii():
        return True
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
