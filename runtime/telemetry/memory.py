"""The memory of a run's processes, as Linux accounts it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import psutil
from msgspec import Struct


class Memory(Struct, frozen=True):
    """Of one process, or of several together."""

    rss_bytes: int = 0
    """Resident: everything that is in memory, libraries that others use too included."""
    pss_bytes: int = 0
    """Proportional: a page that n processes share counts 1/n in each."""

    def __add__(self, other: Memory) -> Memory:
        return Memory(self.rss_bytes + other.rss_bytes, self.pss_bytes + other.pss_bytes)


def of(pids: Iterable[int]) -> Memory:
    """These processes together; those that are gone, or cannot be looked into, count 0."""
    total = Memory()
    for pid in pids:
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except (FileNotFoundError, ProcessLookupError, PermissionError):  # the last: as it is forked of one that is closed
            continue
        total += Memory(_figure(rollup, "Rss:"), _figure(rollup, "Pss:"))
    return total


def _figure(rollup: str, name: str) -> int:
    return next((int(line.split()[1]) << 10 for line in rollup.splitlines() if line.startswith(name)), 0)


class PeakMemory:
    """The most seen of this process and all that descend from it. One sample costs about a millisecond a process."""

    def __init__(self, root_name: str):
        self.pss_bytes = 0  # of all together
        self.by_process: dict[str, Memory] = {}  # of each the largest in rss_bytes
        self._root_name = root_name
        self._root = psutil.Process()

    def sample(self, names: Mapping[int, str]) -> Memory:
        """All together, now. `names`: of the children by pid; what a child started is accounted to it."""
        total = self._seen(self._root_name, [self._root.pid])
        for child in self._root.children():
            try:
                tree = [child.pid, *(one.pid for one in child.children(recursive=True))]
            except psutil.NoSuchProcess:
                continue
            total += self._seen(names.get(child.pid, ""), tree)
        self.pss_bytes = max(self.pss_bytes, total.pss_bytes)
        return total

    def _seen(self, name: str, pids: list[int]) -> Memory:
        now = of(pids)
        if name and now.rss_bytes >= self.by_process.get(name, Memory()).rss_bytes:
            self.by_process[name] = now
        return now
