"""What the parser does not read is left to math-verify: its LaTeX parser and sympy, within bounds on what they are given.

Both are called without their alarms, which work in the main thread only: the pool's time limit holds here. Of their parsers
only that of LaTeX is used; the one for plain text evaluates it as code.
"""

from __future__ import annotations

import logging
import re

from runtime.rewards.mathematics.tree import TooCostly

MAX_LENGTH = 400
MAX_DEPTH = 12
_LONG_NUMBER = re.compile(r"[0-9]{30}")
_GROWTH = re.compile(
    r"\^ ?\{? ?[0-9]{4}|[0-9]{4} ?(?:!|\}? ?\\choose)|\^ ?\{[^{}]*\^|\^ ?[A-Za-z0-9] ?\^|! ?!|\) ?!|\} ?!|\\binom ?\{ ?[0-9]{4}"
)
_BRACKET = re.compile(r"\\?[({\[]|\\?[)}\]]")


def affordable(text: str) -> bool:
    """Whether an expression is short, shallow, and holds no power, factorial or binomial coefficient that explodes."""
    if len(text) > MAX_LENGTH or _LONG_NUMBER.search(text) or _GROWTH.search(text):
        return False
    depth = deepest = 0
    for bracket in _BRACKET.finditer(text):
        depth += 1 if bracket.group()[-1] in "({[" else -1
        deepest = max(deepest, depth)
    return deepest <= MAX_DEPTH


def equal(prediction: str, truth: str) -> bool:
    """Whether math-verify finds two LaTeX expressions equal. Raises TooCostly for what it could hang on."""
    if not affordable(prediction) or not affordable(truth):
        raise TooCostly("an expression that algebra might not end on")
    import math_verify  # takes half a second, for few answers

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its alarms are off
    latex = [math_verify.LatexExtractionConfig()]
    sides = [
        math_verify.parse(f"${side}$", extraction_config=latex, fallback_mode="no_fallback", parsing_timeout=None)
        for side in (truth, prediction)
    ]
    return all(sides) and bool(math_verify.verify(*sides, timeout_seconds=None))
