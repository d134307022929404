"""Rules on whether the answer is right."""

from __future__ import annotations

from runtime.rewards.extraction import final_answer
from runtime.rewards.numeric import label_number, number
from runtime.rewards.rules import RuleContext, rule, up_to
from runtime.rewards.votes import vote

INLINE_CHARACTERS = 32_768  # extraction takes linear time: about 1 ms at this length


def numeric_equal(answer: str, label: str) -> bool:
    """Whether `answer` is the number `label`, by exact value. Raises ValueError when the label is no number."""
    if answer == label and answer.isdecimal() and answer.isascii():
        return True
    expected = label_number(label)
    if expected is None:
        raise ValueError(f"the label {label!r} is not a number")
    return number(answer) == expected


def _gsm8k(text: str, label: str, context: RuleContext) -> bool:
    r"""The final answer (last `\boxed{}`, else `####`, else <answer>, else closing statement) is the number `label`."""
    answer = final_answer(text)
    return numeric_equal("" if answer is None else answer, label)


gsm8k = rule("gsm8k", screen=up_to(INLINE_CHARACTERS, _gsm8k), answer=vote(final_answer))(_gsm8k)


def _gsm8k_answer(text: str, label: str, context: RuleContext) -> float:
    """1 where `gsm8k` is true, else -1."""
    return 1.0 if _gsm8k(text, label, context) else -1.0


gsm8k_answer = rule("gsm8k_answer", screen=up_to(INLINE_CHARACTERS, _gsm8k_answer), answer=vote(final_answer))(_gsm8k_answer)
