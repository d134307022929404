"""A rule that takes its time, so that a run which others look at leaves the processors to them."""

from __future__ import annotations

import time
from typing import Any

from sluice import rule


@rule("unhurried")
def unhurried(text: str, label: str, context: Any) -> float:
    time.sleep(0.05)
    return float(len(text) % 2)
