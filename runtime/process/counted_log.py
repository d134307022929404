"""How often the log tells of what strangers can repeat as they like: the first, the tenth, the hundredth and so on."""

from __future__ import annotations

from collections import Counter

KINDS = 256  # that are told apart

counts: Counter[str] = Counter()  # by what is told


def counted(what: str) -> int:
    """How many of `what` there are now, where that is to be told: a power of ten; else 0."""
    what = what if what in counts or len(counts) < KINDS else "others"
    counts[what] += 1
    count = counts[what]
    return count if str(count).strip("0") == "1" else 0
