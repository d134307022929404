"""What a reply votes for in maj@k: its final answer, as one text that obviously equal answers share."""

from __future__ import annotations

from collections.abc import Callable

from runtime.rewards.mathematics.answers import canonical
from runtime.rewards.rules import Answer

MAX_CHARACTERS = 1024  # what is longer is no answer that two replies would share


def vote(extract: Callable[[str], str | None]) -> Answer:
    """The vote of a rule whose answers `extract` finds in replies."""

    def answer(text: str) -> str | None:
        found = extract(text)
        if found is None:
            return None
        words = canonical(found)
        return words if 0 < len(words) <= MAX_CHARACTERS and not words.isspace() else None

    return answer
