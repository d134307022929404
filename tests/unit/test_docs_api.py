"""docs/api.md has every name that users may import, once; each says what it is. Its tables have what is said of fields."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

import sluice
import sluice.agents
from tests.unit.docs_blocks import ROOT

NAMED = re.findall(r"^::: (\S+)$", (ROOT / "docs/api.md").read_text(encoding="utf-8"), re.MULTILINE)


def test_every_public_name_is_on_the_page_once() -> None:
    public = {f"{module.__name__}.{name}" for module in (sluice, sluice.agents) for name in module.__all__}
    assert sorted(public - set(NAMED)) == []
    assert len(NAMED) == len(set(NAMED))


def test_a_name_on_the_page_says_what_it_is() -> None:
    for name in NAMED:
        module, _, own = name.rpartition(".")
        said = getattr(importlib.import_module(module), own).__doc__ or ""
        assert said and not said.startswith(f"{own}("), f"{name}: a dataclass without one has its signature in its place"


def test_fields_become_a_table(tmp_path: Path) -> None:
    griffe = pytest.importorskip("griffe", reason="griffe is not installed: make install-dev")
    (tmp_path / "shown.py").write_text(
        "class A:\n"
        '    """What A is."""\n\n'
        "    size: int = 3  # in tokens\n"
        "    _own: int = 0  # not shown\n"
        "    name: str | None\n"
        '    """By whom:\n    a | b."""\n\n'
        "    def __init__(self):\n"
        "        self.late = 5\n"
    )
    extensions = griffe.load_extensions(str(ROOT / "tests/unit/field_tables.py"))
    shown = griffe.load("shown", search_paths=[tmp_path], extensions=extensions)["A"]
    assert set(shown.members) == {"_own", "__init__"}
    assert shown.docstring.value.splitlines() == [
        "What A is.",
        "",
        "| field | type | default | |",
        "| --- | --- | --- | --- |",
        "| `size` | `int` | `3` | in tokens |",
        "| `name` | `str | None` |  | By whom: a \\| b. |",
    ]
