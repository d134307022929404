"""Spans: the phases of each process with their times, in one file per process in the run's folder.

::

    a phase ends (`Work`) ───────────────┐
    a command is answered (`services`) ──┼──► add ──► a queue ── once a second, a thread ──► spans/NAME.rank.start.jsonl
    a phase of the coordinator ends ─────┘

A process never waits for the file, and a run never reads it. A span that would exceed `logs.span_bytes`, or that the disk
refuses, is dropped and counted."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Coroutine, Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from runtime import run_files, timeouts, types
from runtime.config import Config, Deadlines
from runtime.process import os_process
from runtime.process.waiting import unless_failed

# ---- Progress
# The process shows that it makes progress. Once a second it sends a heartbeat with its phase to its node's agent:
#     a thread or a task ── at("backward") ──►  open phases  ──►  event loop ── Heartbeat ──►  launcher/node/watchdog.py
# A phase has a limit: `deadlines.watchdog`, or ten times its longest duration so far in the process, at least 10 s. The agent
# ends a process whose phase exceeds the limit, or whose event loop is silent for the limit of "loop". Writes have no limit.

now = time.monotonic
NAME = "SLUICE_BEATS"  # variable: the process's name; its standard input is then a socket for heartbeats
TIMES = 10  # a phase's limit over its longest duration, unless `deadlines.watchdog` has a limit
DISK = "disk"  # the phase of a write: to wait for a file system that does not answer is no stall
LEARNT = 10  # durations before they set a phase's limit: earlier ones may include the compilation of kernels


class Heartbeat(msgspec.Struct, frozen=True):
    """The most overdue phase of a process: `phase`, "" for none, for `seconds` of at most `limit`. `loop`: the limit of the
    event loop's own silence. `collectives`: the count that this rank has entered, by torch.distributed's group."""

    rank: int
    loop: float
    phase: str = ""
    detail: str = ""
    seconds: float = 0.0
    limit: float = 0.0
    collectives: dict[str, int] = {}


class Work:
    """The open phases of a process. Each thread or task is a line, with one phase at a time."""

    def __init__(self, settings: Deadlines | None = None):
        self.configure(settings or Deadlines())
        self._open: dict[Hashable, tuple[str, str, float]] = {}  # by line: phase, detail, since
        self._taken: dict[str, tuple[int, float]] = {}  # by phase: how often it ended, and the longest seconds

    def configure(self, settings: Deadlines) -> None:
        self._limits = {str(phase): seconds for phase, seconds in settings.watchdog.items()}
        self._first = settings.start

    @contextmanager
    def at(self, phase: str, detail: str = "") -> Iterator[None]:
        """Set this thread's phase within the block. Afterwards the phase before begins anew."""
        line = threading.get_ident()
        before = self._open.get(line)
        self.begin(line, phase, detail)
        try:
            yield
        finally:
            self.end(line)
            if before is not None:
                self.begin(line, *before[:2])

    def begin(self, line: Hashable, phase: str, detail: str = "") -> None:
        """Begin `phase` on `line`, or begin it anew after progress."""
        self.end(line)
        self._open[line] = phase, detail, now()

    def end(self, line: Hashable) -> None:
        """End the phase of `line`, which now waits for work."""
        if (was := self._open.pop(line, None)) is not None:
            at = now()
            self._over(was[0], at - was[2])
            log.add(was[0], was[2], at, threading.current_thread().name, detail=was[1])

    def _over(self, phase: str, seconds: float) -> None:
        times, longest = self._taken.get(phase, (0, 0.0))
        self._taken[phase] = times + 1, max(longest, seconds)

    def limit(self, phase: str) -> float:
        """Return the seconds after which `phase` counts as stalled."""
        if phase == DISK:
            return math.inf
        if phase in self._limits:
            return self._limits[phase]
        times, longest = self._taken.get(phase, (0, 0.0))
        return max(timeouts.STALL_LEAST, TIMES * longest if times >= LEARNT else self._first)

    def most_overdue(self) -> tuple[str, str, float, float]:
        """Return phase, detail, seconds and limit of the most overdue phase; empty values if no phase is open."""
        at = now()
        found = [(phase, detail, at - since, self.limit(phase)) for phase, detail, since in list(self._open.values())]
        return max(found, key=lambda one: one[2] - one[3], default=("", "", 0.0, 0.0))

    def shown(self) -> str:
        """Return the current phase in words; "" while the process waits for work."""
        phase, detail, seconds, _ = self.most_overdue()
        return f"{described(phase, detail)}, {seconds:.1f} s" if phase else ""

    async def send_heartbeats(self, agent: socket.socket, rank: int) -> None:
        with agent:
            agent.setblocking(False)
            while True:
                began = now()
                phase, detail, seconds, limit = self.most_overdue()
                loads = phase == "load"  # imports hold the GIL, so the event loop may be silent for as long
                beat = Heartbeat(rank, limit if loads else self.limit("loop"), phase, detail, seconds, limit, collectives())
                with suppress(OSError):  # an agent that is away or slow gets the next heartbeat
                    agent.send(types.encode(beat))
                await asyncio.sleep(timeouts.BEAT)
                if not loads:
                    self._over("loop", now() - began)


work = Work()  # the phases of this process
at = work.at


def described(phase: str, detail: str) -> str:
    return f"{phase} of {detail}" if detail else phase


def collectives() -> dict[str, int]:
    """Return the count of collectives that this rank has entered, by group name. Members wait for the rank with the lowest."""
    torch = sys.modules.get("torch.distributed")
    initialized = getattr(torch, "is_initialized", None)  # None during the import, or in a torch without distributed
    if torch is None or initialized is None or not initialized():
        return {}
    world = torch.distributed_c10d._world
    return {name: group._get_sequence_number_for_group() for group, name in list(world.pg_names.items())}


def keep_flight_record(path: Path) -> None:
    """Write this rank's newest collectives, NCCL's first, as a JSON list, if it has a group: its flight record."""
    if not collectives():
        return
    from torch._C import _distributed_c10d as recorder

    dumps = [getattr(recorder, dump)() for dump in ("_dump_nccl_trace_json", "_dump_fr_trace_json") if hasattr(recorder, dump)]
    with suppress(OSError):  # the process may hang on this very disk
        path.write_bytes(b"[" + b",".join(dumps) + b"]")


async def with_heartbeats(config: Config, life: Coroutine[Any, Any, None]) -> None:
    """Run `life` while sending heartbeats to the agent. On SIGUSR1, write a flight record into the folder of logs."""
    if not (name := os.environ.get(NAME, "")):
        return await life
    agent = _taken()
    work.configure(config.deadlines)
    rank, loop = int(os.environ.get("RANK", "0")), asyncio.get_running_loop()
    record = Path(config.run.dir) / run_files.LOGS / f"{name}.rank{rank}.flight.json"
    os_process.stacks_on_signal(lambda: loop.run_in_executor(None, keep_flight_record, record))
    beats = asyncio.create_task(work.send_heartbeats(agent, rank))
    try:
        await unless_failed({beats}, life)
    finally:
        beats.cancel()


def _taken() -> socket.socket:
    """Return the agent's socket, and replace standard input by an empty one, for this process and its children."""
    agent, nothing = socket.socket(fileno=os.dup(0)), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return agent


logger = logging.getLogger("sluice")

SUFFIX = ".jsonl"
JOINED = 0.002  # seconds: equal spans with at most this gap become one span, as a batch's decode steps do
_WAITING = 1 << 16  # spans that may wait for the thread
HEADER = 512  # bytes of a file's first line


class TracedSpan(NamedTuple):
    """One span. `start`, `end`: seconds since the epoch. `line`: a row of the process; spans of a line do not overlap, except
    on the lines OVERLAPPING. `group`: -1 for none. `step`: the span's step, or the version that it moves; -1 for none."""

    name: str
    start: float
    end: float
    line: str = ""
    group: int = -1
    step: int = -1
    detail: str = ""


CALLS = "calls"  # the line of a process's answered calls
EPISODES = "episodes"  # a gateway's line: the phases of each episode, and its calls of the policy
WEIGHT_SYNC = "weight_sync"  # the line of weight syncs, by several threads
OVERLAPPING = (CALLS, EPISODES, WEIGHT_SYNC)
STATE = "state of "  # the coordinator's lines: followed by a member's name; each span is a state of the member
POLICY = "policy"  # a call of the policy; `detail`: the episode's index in its group, and the rollout
TOOL = "tool"  # from a reply with tool calls to the episode's next policy call; `detail`: index, player and tools


class SpanHeader(msgspec.Struct):
    """The first line of a file, `HEADER` bytes. Written anew when spans were dropped."""

    process: str
    rank: int
    incarnation: int
    pid: int
    host: str
    dropped: int = 0


class SpanLog:
    """The span log of this process. Ignores spans until `open`."""

    def __init__(self) -> None:
        self._waiting: deque[TracedSpan] = deque()
        self._file: FileIO | None = None
        self._header = SpanHeader("", 0, 0, 0, "")
        self._room = 0  # bytes
        self._headed = False  # whether the first line is written
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._offset = time.time() - time.monotonic()

    @property
    def dropped(self) -> int:
        return self._header.dropped

    def open(self, config: Config, process: str) -> None:
        """Begin a file in the run's folder. Files of the process's earlier starts count towards `logs.span_bytes`."""
        rank, incarnation = (int(os.environ.get(name, "0")) for name in ("RANK", os_process.INCARNATION))
        self._header = header = SpanHeader(process, rank, incarnation, os.getpid(), socket.gethostname())
        if not config.logs.span_bytes or not config.run.dir:
            return
        path = Path(config.run.dir) / run_files.SPANS / f"{process}.{rank}.{time.time():.3f}{SUFFIX}"
        try:
            path.parent.mkdir(exist_ok=True)
            earlier = sum(file.stat().st_size for file in path.parent.glob(f"{process}.{rank}.*{SUFFIX}"))
            self._room = config.logs.span_bytes - earlier - HEADER
            self._file = path.open("wb", buffering=0)
        except OSError as error:  # the run goes on without these spans
            logger.warning("no spans of %s: %s", header.process, error)
            return
        self._write_header()
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def add(
        self, name: str, start: float, end: float, line: str = "", group: int = -1, step: int = -1, detail: str = ""
    ) -> None:
        """Add an ended span, on the clock of time.monotonic. From any thread."""
        if self._thread is None:
            return
        if len(self._waiting) >= _WAITING:
            self._header.dropped += 1
            return
        self._waiting.append(TracedSpan(name, start + self._offset, end + self._offset, line, group, step, detail))

    @contextmanager
    def span(self, name: str, line: str = "", step: int = -1) -> Iterator[None]:
        """Add a span of the block, also if the block raises."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.add(name, start, time.monotonic(), line, step=step)

    def close(self) -> None:
        """Write the waiting spans, before the process ends."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(timeouts.SPANS)
            self._thread = None

    def _run(self) -> None:
        while not self._over.wait(timeouts.SPANS):
            self._flush()
        self._flush()

    def _flush(self) -> None:
        before = self._header.dropped
        taken = [self._waiting.popleft() for _ in range(len(self._waiting))]
        for span in joined(taken):
            line = msgspec.json.encode(span) + b"\n"
            self._header.dropped += not self._write(line)
        if self._header.dropped > before:
            self._write_header()

    def _write(self, line: bytes) -> bool:
        """Write the line whole or not at all. Returns whether it was written."""
        assert self._file is not None
        if len(line) > self._room or not (self._headed or self._write_header()):
            return False
        at = self._file.tell()
        try:
            if self._file.write(line) == len(line):
                self._room -= len(line)
                return True
        except OSError:  # for example a full disk
            pass
        with suppress(OSError):
            self._file.seek(at)
            self._file.truncate()
        return False

    def _write_header(self) -> bool:
        """Write the first line, or write it anew. Returns whether it is there."""
        assert self._file is not None
        with suppress(OSError):
            written = msgspec.json.encode(self._header).ljust(HEADER - 1) + b"\n"
            self._headed = os.pwrite(self._file.fileno(), written, 0) == HEADER or self._headed
            self._file.seek(0, os.SEEK_END)
        return self._headed


def joined(spans: Iterable[TracedSpan]) -> list[TracedSpan]:
    """Join each span with an equal span before it on its line, if the gap is shorter than `JOINED`."""
    found: list[TracedSpan] = []
    newest: dict[str, int] = {}  # by line
    for span in spans:
        at = newest.get(span.line)
        if at is not None and span.line not in OVERLAPPING and 0 <= span.start - found[at].end < JOINED:
            one = found[at]._replace(end=span.end)
            if one == span._replace(start=one.start):
                found[at] = one
                continue
        newest[span.line] = len(found)
        found.append(span)
    return found


log = SpanLog()  # the span log of this process


class LineStates:
    """Lines with one state at a time. Adds a span for each state that ends."""

    def __init__(self) -> None:
        self._now: dict[str, tuple[str, float, str]] = {}  # by line: state, since, detail

    def enter(self, line: str, state: str, detail: str = "") -> None:
        now = time.monotonic()
        if (was := self._now.get(line)) is not None:
            log.add(was[0], was[1], now, line, detail=was[2])
        self._now[line] = state, now, detail

    def close(self) -> None:
        for line in self._now:
            self.enter(line, "")
