"""The rule of DAPO (arXiv:2503.14476): the last line `Answer: …` at the end of a reply, compared as normalised text.

The normal form is that of Minerva (arXiv:2206.14858, appendix D.1).
"""

from __future__ import annotations

import re

from runtime.rewards.rules import RuleContext, rule, up_to

WINDOW = 300  # characters at the end of the reply that are looked at
INLINE_CHARACTERS = 1 << 20  # whatever their number, 300 are looked at

_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_REPLACED = (
    *(("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text")),
    *((",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}")),
)
_UNITS = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "ft", "hours", "km", "units", "points", "feet", "minutes"),
    *("digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students", "childrentickets"),
    *("multiples", "\\text{s}", "\\text{.}", "\\text{}^2", "\\text{}^3", "\\text{}", "\\mathrm{th}", "^\\circ"),
    *("^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots", "\\ldots"),
)
_FORMULA = re.compile(r"\$([^$]*)\$")
_WRAPPED = re.compile(r"\\(?:text|textbf|overline|boxed)\{([^{}]*)\}")
_SHORT_FRACTION = re.compile(r"\\frac([^{\\])([^{\\])")
_SHORT_ROOT = re.compile(r"\\sqrt([^{\\])")
_EMPHASIS = "*_` "


def normal_form(answer: str) -> str:
    """What stands behind the last `=`, without units, spaces, text commands and thousands commas; `\\frac12` in full."""
    text = answer.strip(_EMPHASIS).rstrip(".").split("=")[-1]
    for old, new in _REPLACED:
        text = text.replace(old, new)
    for unit in _UNITS:
        text = text.replace(unit, "")
    if formula := _FORMULA.search(text):
        text = formula.group(1)
    text = _WRAPPED.sub(r"\1", text)
    text = _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text)
    text = _SHORT_ROOT.sub(r"\\sqrt{\1}", text).replace("$", "").strip(_EMPHASIS)
    digits = text.replace(",", "")
    return digits if digits.isdigit() else text


def _answer(text: str) -> str | None:
    found = _ANSWER.findall(text[-WINDOW:])
    return normal_form(found[-1]) if found else None


def _acc_for_dapo(text: str, label: str, context: RuleContext) -> float:
    """1 where the last `Answer: …` of the last 300 characters is the label, both in normal form; else -1."""
    answer = _answer(text)
    return 1.0 if answer is not None and answer == normal_form(label) else -1.0


acc_for_dapo = rule("acc_for_dapo", screen=up_to(INLINE_CHARACTERS, _acc_for_dapo), answer=_answer)(_acc_for_dapo)
