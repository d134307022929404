"""Broken files of every kind, the same each time (tests/fuzz)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from hypothesis import settings

from tests.fuzz.targets import TARGETS

ROOT = Path(__file__).parents[2]
DEADLINE = 100.0


def test_broken_files_end_well() -> None:
    examples = str(settings().max_examples // 2)
    command = [sys.executable, "-W", "ignore", "-m", "tests.fuzz", *TARGETS, "--examples", examples]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(any(line.startswith(f"{name}: ") for line in done.stdout.splitlines()) for name in TARGETS)


def test_the_corpus_is_small() -> None:
    files = [path for path in (Path(__file__).parents[1] / "fuzz" / "corpus").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 100_000
