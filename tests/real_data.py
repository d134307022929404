"""Where tests find published data sets, which are not part of the repository."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DATA = Path(os.environ.get("SLUICE_SHARED", ROOT.parent / "shared")) / "data"


def real_file(name: str) -> Path:
    """The file `name` of that folder; skips the test where it is not there."""
    path = DATA / name
    if not path.is_file():
        pytest.skip(f"no {path}; SLUICE_SHARED names the folder with the shared data")
    return path
