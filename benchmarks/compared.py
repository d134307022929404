"""What a bench compares, in the form in which `sluice bench all` puts the benches side by side."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from msgspec import Struct

ROOT = Path(__file__).parents[1]
GIT = ("git", "describe", "--always", "--dirty", "--exclude=*")
GIT_DEADLINE = 30.0  # seconds


class Measurement(Struct, frozen=True):
    """When, where and of which commit it was measured. `date`: of its end, in UTC. `commit`: "" where this is no clone;
    "-dirty" follows where files differ from it."""

    date: str
    commit: str
    cores: int
    processor: str
    python: str

    @classmethod
    def here(cls) -> Measurement:
        """Of this machine, now."""
        today = datetime.now(UTC).date().isoformat()
        return cls(today, _commit(), len(os.sched_getaffinity(0)), platform.machine(), platform.python_version())


def _commit() -> str:
    if not (ROOT / ".git").exists():  # a wheel's folder may lie in another project's clone
        return ""
    try:
        return subprocess.run(GIT, cwd=ROOT, capture_output=True, text=True, timeout=GIT_DEADLINE, check=False).stdout.strip()
    except (OSError, subprocess.SubprocessError):  # it has to do without git
        return ""


class Compared(Struct, frozen=True):
    """One ratio or cost: a value for each round or pair that was measured. `asked`: what it is to be, "≥ 0.85" say."""

    what: str
    values: list[float]
    asked: str = ""

    @classmethod
    def of(cls, what: str, values: Iterable[float | None], asked: str = "") -> Compared:
        """Without the rounds that gave none."""
        return cls(what, [value for value in values if value is not None], asked)
