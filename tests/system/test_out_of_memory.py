"""A process that the kernel really kills for want of memory: it is said whose fault that was, and what it had."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.system.little_memory import NEEDS, little_memory
from tests.system.runs import LONG, Live, eventually, one_line, started

pytestmark = pytest.mark.timeout(360)

END = 120.0


@pytest.fixture
def little() -> Iterator[Path]:
    with little_memory() as group:
        if group is None:
            pytest.skip(NEEDS)
        yield group


def another(run: Live) -> psutil.Process | None:
    with suppress(KeyError):
        return run.member("rollout-0")
    return None


def test_a_process_that_is_out_of_memory_comes_back_once(config: Path, tmp_path: Path, little: Path) -> None:
    with started(config, *LONG, folder=tmp_path / "run") as run:
        run.reaches(2)
        little.write_text(str(run.member("rollout-0").pid))
        run.says("rollout-0: run: the kernel killed", END)
        assert "for want of memory" in run.output
        before = run.steps()
        eventually(lambda: run.steps() > before + 1, END, "two more steps")
        assert run.process.poll() is None
        little.write_text(str(eventually(lambda: another(run), END, "another rollout-0").pid))
        assert run.wait(END) == 2, run.output + run.errors
        line = one_line(run.errors)
    assert line.startswith("error: rollout-0: the kernel killed")
    assert "twice: lower services.rollout.max_num_seqs" in line
