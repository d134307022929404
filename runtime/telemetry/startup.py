"""The duration of a start: the phases of each process and of the run, and the line for the user about both."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import psutil
from msgspec import Struct

from runtime import run_files
from runtime.process import os_process

# ---- The memory of a run's processes, as Linux counts it


class Memory(Struct, frozen=True):
    rss_bytes: int = 0  # resident: all pages in memory, including shared libraries
    pss_bytes: int = 0  # proportional: a page shared by n processes counts 1/n in each

    def __add__(self, other: Memory) -> Memory:
        return Memory(self.rss_bytes + other.rss_bytes, self.pss_bytes + other.pss_bytes)


def of(pids: Iterable[int]) -> Memory:
    """Sum the memory of these processes. Processes that have ended or deny access, as a fork of a closed one, count 0."""
    total = Memory()
    for pid in pids:
        with suppress(psutil.Error):
            found = psutil.Process(pid).memory_full_info()
            total += Memory(found.rss, getattr(found, "pss", 0))
    return total


class PeakMemory:
    """The peak memory of this process and all its descendants. One sample costs about a millisecond a process."""

    def __init__(self, root_name: str):
        self.pss_bytes = 0  # of all together
        self.by_process: dict[str, Memory] = {}  # each at its largest rss_bytes
        self._root_name = root_name
        self._root = psutil.Process()

    def sample(self, names: Mapping[int, str]) -> Memory:
        """Measure all processes now. `names`: of the children by pid. A child's descendants count as part of the child."""
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


# Consecutive phases, from the command until the trainer has the batch of the first step.
PHASES = ("launcher", "coordinator", "data", "services", "first weight sync", "first step")
TOTAL = "to first step"  # nearly their sum
OF_A_PROCESS = ("interpreter", "imports", "libraries", "load")
NOT_COUNTED = "evaluation"  # of the model before training, which the user requested


class Startup(Struct, kw_only=True):
    """Seconds of a start. `phases`: the run's PHASES, TOTAL and NOT_COUNTED. `processes`: the phases of each, in order."""

    phases: dict[str, float]
    processes: dict[str, dict[str, float]] = {}

    def write(self, folder: Path) -> None:
        """Write startup.json, whole or not at all."""
        run_files.write_json(folder / run_files.STARTUP, self)

    @classmethod
    def read(cls, folder: Path) -> Startup | None:
        """Read startup.json. None if it is missing or damaged: one line needs it. Raises UserError if it is no regular file."""
        with suppress(FileNotFoundError, *run_files.NOT_DECODED):
            return msgspec.json.decode(run_files.regular(folder / run_files.STARTUP).read_bytes(), type=cls)
        return None


class Phases:
    """The phases of this process. Each begins at the end of the phase before, the first at the start of the process. `born` and
    `at` are on the clock of time.monotonic, which all processes of a machine share."""

    def __init__(self) -> None:
        self.born = self._last = time.monotonic() - os_process.age()
        self.seconds: dict[str, float] = {}

    def mark(self, phase: str, at: float | None = None) -> None:
        """End `phase` now, or at `at`."""
        at = time.monotonic() if at is None else at
        self.seconds[phase] = at - self._last
        self._last = at


_YOUNG = 20_000


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection, a quarter of a trainer's start, in a block whose objects stay. Later ones skip them."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def collect_rarely() -> None:
    """Collect garbage after `_YOUNG` new objects, not 700: at a thousand rollouts, scans took half of a sample's time."""
    gc.set_threshold(_YOUNG, 20, 20)


def line(startup: Startup) -> str:
    """Return the report: the phases in order, and the phases of the slowest process."""
    phases = startup.phases
    entries = {name: f"{name} {phases[name]:.1f}" for name in PHASES if name in phases}
    if services := {name: seconds for name, seconds in startup.processes.items() if name != "coordinator"}:
        slowest = max(services, key=lambda name: sum(services[name].values()))
        parts = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in services[slowest].items())
        entries["services"] += f" ({slowest}: {parts})"
    text = f"{phases.get(TOTAL, 0.0):.1f} s to the first step: {', '.join(entries.values())}"
    return f"{text}; not counted: {NOT_COUNTED} {phases[NOT_COUNTED]:.1f}" if NOT_COUNTED in phases else text


def in_order(seconds: Mapping[str, float]) -> dict[str, float]:
    """Sort a process's phases by time: a message may have reordered them."""
    return {phase: seconds[phase] for phase in OF_A_PROCESS if phase in seconds}
