"""The names that docs/metrics.md describes."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
ABSENT = "## Names of MindSpeed-RL that are not logged"


def described(absent: bool = False) -> list[str]:
    """Of every row of its tables, in order; `absent`: those of MindSpeed-RL that are not logged."""
    logged, _, others = PAGE.read_text(encoding="utf-8").partition(f"\n{ABSENT}\n")
    rows = re.findall(r"^\| (`[^|]+`) \|", others if absent else logged, re.MULTILINE)
    return [name for cell in rows for quoted in re.findall(r"`([^`]+)`", cell) for name in _expanded(quoted)]


def pattern(name: str) -> re.Pattern[str]:
    """What a run makes of it: any word for a placeholder in capitals."""
    return re.compile("".join(".+" if part.isupper() else re.escape(part) for part in re.split(r"([A-Z]{3,}|\bK\b)", name)))


def _expanded(text: str) -> list[str]:
    """`a/{b,c}` is `a/b` and `a/c`."""
    parts = [part.strip("{}").split(",") for part in re.split(r"(\{[^}]*\})", text)]
    return ["".join(choice) for choice in product(*parts)]
