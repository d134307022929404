"""The architecture page's diagram is that of the code, and no two packages import each other."""

from __future__ import annotations

from itertools import combinations

from tests.unit.import_diagram import PAGE, arrows, leads, written


def test_the_page_has_the_diagram_of_the_code() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert written(page) == page, "run make diagram"


def test_packages_import_each_other_one_way() -> None:
    found = arrows()
    packages = sorted({name for arrow in found for name in arrow})
    circles = {frozenset(pair) for pair in combinations(packages, 2) if leads(found, *pair) and leads(found, *pair[::-1])}
    assert circles == set()
