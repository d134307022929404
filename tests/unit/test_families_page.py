"""docs/guides/models.md says of each family which way it goes, and each of its words has a test."""

from __future__ import annotations

import pytest

from runtime.models.families import FAMILIES
from runtime.models.hf_folder import PACKED
from tests.unit.families_page import CHECKS, COLUMNS, PAGE, ROOT, named, page, rows
from tests.unit.tiny_models import WIDE


def test_the_page_is_the_table() -> None:
    assert PAGE.read_text() == page(), "python -m tests.unit.families_page"


def test_all_families_are_there() -> None:
    kinds = [kind for _, kind, _ in rows()]
    assert kinds == [*FAMILIES, *WIDE] or sorted(kinds) == sorted([*FAMILIES, *WIDE])
    assert set(PACKED) <= set(kinds)
    assert all(len(cells) == len(COLUMNS) for _, _, cells in rows())
    assert {check for _, _, cells in rows() for cell in cells if isinstance(cell, dict) for check in cell} == set(CHECKS)


def test_every_yes_has_its_test(request: pytest.FixtureRequest) -> None:
    """As pytest collects the files in this process, where most of what they import is already."""
    pytest.importorskip("megatron.core", reason="needs megatron-core: pip install 'sluice-rl[megatron]'")
    files = {test.partition("::")[0] for test in named()}
    modules = [pytest.Module.from_parent(request.session, path=ROOT / file) for file in sorted(files)]
    found = {item.nodeid for module in modules for item in module.collect()}
    assert not (missing := named() - found), sorted(missing)
