r"""Rules on the form of a reply, whatever its answer. Each takes linear time on any input."""

from __future__ import annotations

import re
from collections.abc import Callable

from runtime.rewards.extraction import BOX, last_boxed
from runtime.rewards.rules import Evaluate, RuleContext, rule, up_to

INLINE_CHARACTERS = 262_144  # a few searches

THINK, THOUGHT, ANSWER, ANSWERED = "<think>", "</think>", "<answer>", "</answer>"

_ANSWER_AT_END = re.compile(r"(?<!#)####[ \t]*[-+]?\$?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?\s*\Z")
_TURN = re.compile(rf"{THOUGHT}\s*{ANSWER}")
_MARKER = re.compile(r"^(?:[0-9]+\.|[-*])|Step [0-9]+:|First,|Second,|Next,|Finally,", re.MULTILINE)
_MARKERS_WANTED = 3


def answer_part(text: str) -> str | None:
    """What stands between the answer tags of a reply in the form `<think>…</think> <answer>…</answer>`; None in another form.

    The first answer tag that follows a thought counts, and the last character but for a line's end belongs to `</answer>`:
    what `^<think>.*?</think>\\s*<answer>.*?</answer>$` matches, dot and all.
    """
    end = len(text) - text.endswith("\n") - len(ANSWERED)
    if not text.startswith(THINK) or end < 0 or not text.startswith(ANSWERED, end):
        return None
    turn = _TURN.search(text, len(THINK), end)
    return None if turn is None else text[turn.end() : end]


def holds_one_box(text: str, part: str) -> bool:
    r"""Whether `text` has exactly one `\boxed{`, and that one stands, complete, in its `part`."""
    return len(BOX.findall(text)) == 1 and last_boxed(part) is not None


def strictly_formatted(text: str) -> bool:
    r"""Each tag and one `\boxed{}` exactly once, in order, from the first character to the last."""
    part = answer_part(text)
    once = all(text.count(tag) == 1 for tag in (THINK, THOUGHT, ANSWER, ANSWERED))
    return part is not None and once and text.endswith(ANSWERED) and holds_one_box(text, part)


def _rule(name: str) -> Callable[[Evaluate], Evaluate]:
    """Register a function that takes linear time, and is therefore its own screen."""

    def register(function: Evaluate) -> Evaluate:
        return rule(name, screen=up_to(INLINE_CHARACTERS, function))(function)

    return register


@_rule("format")
def tagged(text: str, label: str, context: RuleContext) -> bool:
    """The reply is `<think>…</think>`, space or none, `<answer>…</answer>`."""
    return answer_part(text) is not None


@_rule("strict_format")
def strict_format(text: str, label: str, context: RuleContext) -> float:
    r"""1 for a reply in the form of `format` with each tag once and one `\boxed{}`, in the answer; else -0.5."""
    return 1.0 if strictly_formatted(text) else -0.5


@_rule("r1_zero_format")
def r1_zero_format(text: str, label: str, context: RuleContext) -> bool:
    r"""The form of `format`, with exactly one `\boxed{}`, inside the answer."""
    part = answer_part(text)
    return part is not None and holds_one_box(text, part)


@_rule("think_answer")
def think_answer(text: str, label: str, context: RuleContext) -> bool:
    r"""The reply is `<think>\n…\n</think>\n<answer>\n…\n</answer>` from its first character to its last."""
    head, turn, tail = f"{THINK}\n", f"\n{THOUGHT}\n{ANSWER}\n", f"\n{ANSWERED}"
    end = len(text) - len(tail)
    return text.startswith(head) and text.endswith(tail) and text.find(turn, len(head), max(end, 0)) >= 0


@_rule("think_prefix")
def think_prefix(text: str, label: str, context: RuleContext) -> bool:
    """The reply begins with `<think>`, the only one, and has a `</think>`, whatever follows."""
    return text.startswith(THINK) and text.count(THINK) == 1 and THOUGHT in text


@_rule("step")
def step(text: str, label: str, context: RuleContext) -> float:
    """min(1, markers / 3): numbered and bulleted lines, "Step 1:", "First,", "Second,", "Next," and "Finally,"."""
    markers = 0
    for _ in _MARKER.finditer(text):
        markers += 1
        if markers == _MARKERS_WANTED:
            break
    return markers / _MARKERS_WANTED


@_rule("format_answer")
def format_answer(text: str, label: str, context: RuleContext) -> bool:
    """The reply ends with `#### number`, and holds no other `####`."""
    mark = text.rfind("####")
    return text.count("####") == 1 and _ANSWER_AT_END.match(text, mark) is not None


@_rule("gsm8k_format")
def gsm8k_format(text: str, label: str, context: RuleContext) -> float:
    """1.25 where `format_answer` is true, else -1."""
    return 1.25 if format_answer(text, label, context) else -1.0
