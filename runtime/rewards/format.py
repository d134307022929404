"""Rules on the form of a reply, whatever its answer."""

from __future__ import annotations

import re

from runtime.rewards.rules import RuleContext, rule, up_to

INLINE_CHARACTERS = 262_144  # one search from the end

_ANSWER_AT_END = re.compile(r"(?<!#)####[ \t]*[-+]?\$?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?\s*\Z")


def _format_answer(text: str, label: str, context: RuleContext) -> bool:
    """The reply ends with `#### number`, and holds no other `####`."""
    mark = text.rfind("####")
    return text.count("####") == 1 and _ANSWER_AT_END.match(text, mark) is not None


format_answer = rule("format_answer", screen=up_to(INLINE_CHARACTERS, _format_answer))(_format_answer)
