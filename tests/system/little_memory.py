"""A control group in which there is next to no memory: the kernel kills what is put there as soon as it asks for more."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.system.runs import eventually

LITTLE = 1 << 16  # bytes that a process may add to what it has
LIMITS = {"/sys/fs/cgroup/memory": "memory.limit_in_bytes", "/sys/fs/cgroup": "memory.max"}  # cgroup v1 and v2
NEEDS = "needs a control group of memory: root, and cgroups that can be written"
END = 60.0


@contextmanager
def little_memory() -> Iterator[Path | None]:
    """The file that takes process ids; None where there is no such group to be had."""
    for root, limit in LIMITS.items():
        group = Path(root) / f"sluice-test-{os.getpid()}"
        with suppress(OSError):
            group.mkdir()
            try:
                (group / limit).write_text(str(LITTLE))
            except OSError:
                group.rmdir()
                continue
            try:
                yield group / "cgroup.procs"
            finally:
                eventually(lambda group=group: not (group / "cgroup.procs").read_text(), END, "the end of its processes")
                group.rmdir()
            return
    yield None
