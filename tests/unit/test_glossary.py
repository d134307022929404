"""The glossary says where the code has a word, and no class has a name that the glossary calls an earlier one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "glossary.md"
ROWS = [
    [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    for line in PAGE.read_text().splitlines()
    if line.startswith("| **")
]
SOURCES = [file for package in ("runtime", "services", "launcher", "sluice") for file in (ROOT / package).rglob("*.py")]
CLASSES = {name for file in SOURCES for name in re.findall(r"^class (\w+)", file.read_text(), re.MULTILINE)}
EARLIER = {  # what classes were called whose things have the field's words now
    *("Letter", "Material", "EvaluationMaterial", "Lineage", "Books", "Places", "Updated", "TurnTaking", "TurnStage"),
    *("Shelf", "LentScorer", "Standstill", "RankPlace", "Here", "Subscription", "Transaction", "Gift", "Giver"),
    "KeptTexts",
}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_word_is_in_the_code_where_the_glossary_says(row: list[str]) -> None:
    word, meaning, places, _ = row
    assert meaning, word
    found = re.findall(r"`([^`]+)`", places)
    assert found, word
    for place in found:
        assert (ROOT / place).exists() if "/" in place else place in CLASSES, f"{word}: {place}"


def test_no_class_has_an_earlier_name() -> None:
    assert set() == CLASSES & EARLIER
