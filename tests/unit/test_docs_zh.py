"""The Chinese pages keep up with their English sources, have their shape, and name the same commands, keys and files."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.unit import zh_pages
from tests.unit.zh_pages import ROOT

FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def shape(text: str) -> dict[str, object]:
    """What a translation does not change: headings by level, blocks of code, rows of tables."""
    plain = FENCE.sub("", text)
    return {
        "headings": [len(found) for found in re.findall(r"^(#+) ", plain, re.MULTILINE)],
        "blocks of code": len(FENCE.findall(text)),
        "rows": len(re.findall(r"^\|", plain, re.MULTILINE)),
    }


def code(text: str) -> set[str]:
    """What stands in `code`, outside blocks; a line may end within it."""
    return {" ".join(found.split()) for found in re.findall(r"`([^`]+)`", FENCE.sub("", text))}


@pytest.mark.parametrize("page", zh_pages.pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_current_and_has_the_shape_and_names_of_its_source(page: Path) -> None:
    """The pages of both languages lead to each other, and to the reference."""
    source, text = zh_pages.source_of(page), page.read_text(encoding="utf-8")
    lags = f"{source.relative_to(ROOT)} has changed: translate that, then run make docs-zh-stamp"
    assert zh_pages.is_current(page), lags
    translated = zh_pages.translated(source)
    assert shape(text) == shape(translated)
    assert sorted(code(translated) - code(text)) == []
    assert f"]({os.path.relpath(source, page.parent)})" in text[:400]
    assert f"]({os.path.relpath(page, source.parent)})" in source.read_text(encoding="utf-8")[:400]
    assert "configuration-reference.md" in text
    assert ill_shown(text) == []


def ill_shown(text: str) -> list[str]:
    """Where a line that ends within a paragraph is shown as a space, or stars as stars: after punctuation, before a letter."""
    plain = re.sub(r"`[^`]+`", "`", FENCE.sub("", text))
    found = re.findall(r"[\u4e00-\u9fff，。：；]\n(?![-*|#0-9])[^\n]", plain) + re.findall(
        r"[\u4e00-\u9fff] [\u4e00-\u9fff]", plain
    )
    for stars in re.finditer(r"(\*{1,2})([^*\n]+)\1(.?)", plain):
        if re.match(r"[。，、；：！？）]$", stars[2][-1]) and re.match(r"[\u4e00-\u9fff]", stars[3]):
            found.append(stars[0])
    return found
