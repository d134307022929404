"""docs/api.md has every name that users may import, once; each says what it is. Its tables have what is said of fields."""

from __future__ import annotations

import importlib
import re

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
