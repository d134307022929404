"""What a start-up takes: each process's own phases, the run's, and the one line that a user reads of both."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psutil
from msgspec import Struct

from runtime import run_files
from runtime.process import os_process

# ---- Memory
#
# The memory of a run's processes, as Linux accounts it.


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


# One after the other, from the command to the batch of the first step in the trainer's hands.
PHASES = ("launcher", "coordinator", "data", "services", "first publication", "first step")
TOTAL = "to first step"  # their sum, nearly
OF_A_PROCESS = ("interpreter", "imports", "libraries", "load")
NOT_COUNTED = "evaluation"  # of the model before training: it is work that was asked for


class Startup(Struct, kw_only=True):
    """Seconds. `phases` are the run's: those of PHASES, TOTAL, and NOT_COUNTED where there was one. `processes` has each
    process's own phases, in their order; processes start side by side."""

    phases: dict[str, float]
    processes: dict[str, dict[str, float]] = {}

    def write(self, folder: Path) -> None:
        """As startup.json, whole or not at all."""
        run_files.write_json(folder / run_files.STARTUP, self)

    @classmethod
    def read(cls, folder: Path) -> Startup | None:
        """None where no first step was submitted, and where the file is damaged: nothing but a line rests on it. Raises
        UserError for what is no file."""
        try:
            return msgspec.json.decode(run_files.regular(folder / run_files.STARTUP).read_bytes(), type=cls)
        except (FileNotFoundError, *run_files.NOT_DECODED):
            return None


class Phases:
    """Of this process: each phase begins where the one before ended, the first with the process. `born` and `at` are on the
    clock of time.monotonic, which all processes of a machine share."""

    def __init__(self) -> None:
        self.born = self._last = time.monotonic() - os_process.age()
        self.seconds: dict[str, float] = {}

    def mark(self, phase: str, at: float | None = None) -> None:
        """`phase` ends now, or has ended at `at`."""
        at = time.monotonic() if at is None else at
        self.seconds[phase] = at - self._last
        self._last = at


_YOUNG = 20_000


@contextmanager
def uncollected() -> Iterator[None]:
    """Around what imports libraries and makes an engine: nearly all of it stays, and looking through it for garbage again and
    again is a quarter of a trainer's start. No later collection looks at it either."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def collect_rarely() -> None:
    """Have this process look for garbage after `_YOUNG` new objects, not 700. What is under way for a thousand rollouts (tasks,
    futures, messages) is more than that, so that it was looked through again and again, and grew old before it was done: half
    of the coordinator's time for a sample, which with ten rollouts was a tenth."""
    gc.set_threshold(_YOUNG, 20, 20)


def line(startup: Startup) -> str:
    """The report: phases in their order, and of the processes the one that all waited for."""
    phases = startup.phases
    told = [f"{name} {phases[name]:.1f}" for name in PHASES if name in phases]
    if startup.processes and (services := {k: v for k, v in startup.processes.items() if k != "coordinator"}):
        slowest = max(services, key=lambda name: sum(services[name].values()))
        parts = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in services[slowest].items())
        told[told.index(f"services {phases['services']:.1f}")] += f" ({slowest}: {parts})"
    text = f"{phases.get(TOTAL, 0.0):.1f} s to the first step: {', '.join(told)}"
    return f"{text}; not counted: {NOT_COUNTED} {phases[NOT_COUNTED]:.1f}" if NOT_COUNTED in phases else text


def in_order(seconds: Mapping[str, float]) -> dict[str, float]:
    """A process's phases as they followed each other, however a message has shuffled them."""
    return {phase: seconds[phase] for phase in OF_A_PROCESS if phase in seconds}
