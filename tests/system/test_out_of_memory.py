"""A process that the kernel really kills for want of memory: it is said whose fault that was, and what it had."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.system.runs import Live, eventually, one_line, started

pytestmark = pytest.mark.timeout(360)

END = 120.0
LITTLE = 1 << 16  # bytes: what a process may add to what it has
LIMITS = {"/sys/fs/cgroup/memory": "memory.limit_in_bytes", "/sys/fs/cgroup": "memory.max"}  # cgroup v1 and v2


@pytest.fixture
def little() -> Iterator[Path]:
    """The list of processes of a control group in which there is next to no memory."""
    for root, limit in LIMITS.items():
        group = Path(root) / f"sluice-test-{os.getpid()}"
        with suppress(OSError):
            group.mkdir()
            try:
                (group / limit).write_text(str(LITTLE))
                yield group / "cgroup.procs"
            finally:
                eventually(lambda group=group: not (group / "cgroup.procs").read_text(), END, "the end of its processes")
                group.rmdir()
            return
    pytest.skip("needs a control group of memory: root, and cgroups that can be written")


def another(run: Live) -> psutil.Process | None:
    with suppress(KeyError):
        return run.member("rollout-0")
    return None


def test_a_process_that_is_out_of_memory_comes_back_once(config: Path, tmp_path: Path, little: Path) -> None:
    with started(config, "training.steps=100000", folder=tmp_path / "run") as run:
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
    assert "twice: lower services.rollout.slots" in line
