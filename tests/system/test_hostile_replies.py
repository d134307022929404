"""Replies made to hang or exhaust their judge, or to have it run their code: every one is answered, and nothing happens."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from runtime.rewards.rules import RULES
from tests.system.hostile_replies import Report, hostile_replies

ROOT = Path(__file__).parents[2]
EVERY = 6  # of the replies is tried always; all in `make test-long`
MEMORY = 512_000_000  # bytes that no worker may come to have resident


@pytest.mark.timeout(600)
@pytest.mark.parametrize("every", [EVERY, pytest.param(1, marks=pytest.mark.long)])
def test_hostile_replies_are_answered_within_the_limits(tmp_path: Path, every: int) -> None:
    replies = hostile_replies()[::every]
    done = subprocess.run(
        [sys.executable, "-m", "tests.system.hostile_replies", str(every)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    report = msgspec.json.decode(done.stdout, type=Report)
    assert {ending.name for ending in report.endings} == {hostile.name for hostile in replies}
    assert len(report.endings) == len(replies) * len(list(RULES))
    odd = {ending.error for ending in report.endings if not ending.error.startswith("exception:")} - {"", "timeout", "memory"}
    assert odd == set()
    assert report.peak_bytes < MEMORY
    assert list(tmp_path.iterdir()) == []  # nobody carried out what a reply says
