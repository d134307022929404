"""Rules on whether the answer of a reply is mathematically right: `math` for training, `boxed` and `expr` for scored files."""

from __future__ import annotations

from collections.abc import Callable

from runtime.rewards.extraction import closing_statement, final_answer, last_box
from runtime.rewards.mathematics.answers import equal
from runtime.rewards.mathematics.answers import screen as screen_answer
from runtime.rewards.mathematics.tidy import last_value
from runtime.rewards.rules import Evaluate, RuleContext, Screen, rule
from runtime.rewards.votes import vote

INLINE_CHARACTERS = 32_768  # extraction takes linear time: about 1 ms at this length
TAIL_CHARACTERS = 2000  # where an answer is looked for in a reply that marks none

Extract = Callable[[str], "str | None"]


def math_answer(text: str) -> str | None:
    """The last box, else what follows the last `####`, else the last answer tag, else a closing statement; None without any."""
    box = last_box(text)
    return final_answer(text) if box is None else box


def boxed_answer(text: str) -> str | None:
    """The last box, else a closing statement, else the reply's last formula or number; None without any."""
    box = last_box(text)
    if box is not None:
        return box
    return closing_statement(text) or last_value(text[-TAIL_CHARACTERS:])


def _whole(text: str) -> str:
    return text


def _right(extract: Extract) -> Evaluate:
    def evaluate(text: str, label: str, context: RuleContext) -> bool:
        answer = extract(text)
        return answer is not None and equal(answer, label)

    return evaluate


def _screen(extract: Extract) -> Screen:
    def screen(text: str, label: str, context: RuleContext) -> bool | None:
        if len(text) > INLINE_CHARACTERS:
            return None
        answer = extract(text)
        return False if answer is None else screen_answer(answer, label)

    return screen


math = rule("math", screen=_screen(math_answer), answer=vote(math_answer))(_right(math_answer))
boxed = rule("boxed", screen=_screen(boxed_answer), answer=vote(boxed_answer))(_right(boxed_answer))
expr = rule("expr", screen=_screen(_whole), answer=vote(_whole))(_right(_whole))
