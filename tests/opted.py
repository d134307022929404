"""Cases that take minutes and show what a few of their kind show already: `SLUICE_FAMILIES=all` runs them."""

from __future__ import annotations

import os
from typing import Any

import pytest

_ASKED = os.environ.get("SLUICE_FAMILIES") == "all"


def opted(*cases: str) -> list[Any]:
    mark = pytest.mark.skipif(not _ASKED, reason="takes minutes: SLUICE_FAMILIES=all runs it")
    return [pytest.param(case, marks=mark) for case in cases]
