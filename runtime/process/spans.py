"""What each process did, and when: spans, in a file of its own in the run's folder, for whoever asks later.

::

    a phase ends (`process.progress`) ───┐
    a command is answered (`services`) ──┼──► add ──► a queue ── once a second, a thread ──► spans/NAME.rank.start.jsonl
    a phase of the coordinator's ends ───┘

Nothing waits for it, and nothing of a run is read from it. What would make the file larger than `logs.span_bytes`, and what no
disk takes, is dropped, the newest, and counted.
"""

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
from msgspec import Struct

from runtime import run_files, timeouts, types
from runtime.config import Config, Deadlines
from runtime.process import os_process
from runtime.process.aio import unless_failed

# ---- Progress
#
# What this process is at, told to its node's agent once a second: that it works, and not only that it lives.
#
# ::
#
#     a thread or a task ── at("backward") ──►  what is open, since when  ──►  event loop ── Beat ──►  launcher/node/watchdog.py
#
# A phase has a limit: `deadlines.stall`, or ten times the longest that it has taken here, 10 s at least. The agent ends a
# process that is longer in a phase than its limit, but for that of a write, or whose event loop is silent for as long as
# that of "loop".

now = time.monotonic
NAME = "SLUICE_BEATS"  # the variable with the name that the agent gave the process whose standard input is a socket for beats
TIMES = 10  # times the longest that a phase has taken: its limit, where `deadlines.stall` names none
DISK = "disk"  # the phase of a write: a file system that does not answer is waited for, and is no stall
LEARNT = 10  # times that a phase is over before its limit is known from them: until then kernels may be compiled


class Heartbeat(Struct, frozen=True):
    """What is most overdue of what a process is at: `phase` for `seconds` of at most `limit`; "" when it is at nothing.

    `rank`: of the process that the agent started. `loop`: the limit of the event loop's own silence.
    `collectives`: how many this rank has entered, by torch.distributed's group.
    """

    rank: int
    loop: float
    phase: str = ""
    detail: str = ""
    seconds: float = 0.0
    limit: float = 0.0
    collectives: dict[str, int] = {}


class Work:
    """What a process's threads and tasks are at. Each is a line, and at one phase at a time."""

    def __init__(self, settings: Deadlines | None = None):
        self.configure(settings or Deadlines())
        self._open: dict[Hashable, tuple[str, str, float]] = {}  # by line: phase, detail, since
        self._taken: dict[str, tuple[int, float]] = {}  # by phase: how often it is over, and the longest seconds

    def configure(self, settings: Deadlines) -> None:
        self._limits = {str(phase): seconds for phase, seconds in settings.stall.items()}
        self._first = settings.start

    @contextmanager
    def at(self, phase: str, detail: str = "") -> Iterator[None]:
        """This thread is at `phase` within the block; then at what it was at before, which has gone on thereby."""
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
        """`line` goes on to `phase`, or has made progress in it."""
        self.end(line)
        self._open[line] = phase, detail, now()

    def end(self, line: Hashable) -> None:
        """`line` waits for work."""
        if (was := self._open.pop(line, None)) is not None:
            at = now()
            self._over(was[0], at - was[2])
            log.add(was[0], was[2], at, threading.current_thread().name, detail=was[1])

    def _over(self, phase: str, seconds: float) -> None:
        times, longest = self._taken.get(phase, (0, 0.0))
        self._taken[phase] = times + 1, max(longest, seconds)

    def limit(self, phase: str) -> float:
        """Seconds after which `phase` counts as stalled."""
        if phase == DISK:
            return math.inf
        if phase in self._limits:
            return self._limits[phase]
        times, longest = self._taken.get(phase, (0, 0.0))
        return max(timeouts.STALL_LEAST, TIMES * longest if times >= LEARNT else self._first)

    def most_overdue(self) -> tuple[str, str, float, float]:
        """Phase, detail, seconds and limit; of nothing where nothing is open."""
        at = now()
        found = [(phase, detail, at - since, self.limit(phase)) for phase, detail, since in list(self._open.values())]
        return max(found, key=lambda one: one[2] - one[3], default=("", "", 0.0, 0.0))

    def shown(self) -> str:
        """What it is at, in words; "" while it waits for work."""
        phase, detail, seconds, _ = self.most_overdue()
        return f"{described(phase, detail)}, {seconds:.1f} s" if phase else ""

    async def tell(self, agent: socket.socket, rank: int) -> None:
        """Until cancelled, beat to the agent."""
        with agent:
            agent.setblocking(False)
            while True:
                began = now()
                phase, detail, seconds, limit = self.most_overdue()
                loads = phase == "load"  # what is imported holds the interpreter's lock
                beat = Heartbeat(rank, limit if loads else self.limit("loop"), phase, detail, seconds, limit, collectives())
                with suppress(OSError):  # an agent that is away, or behind, hears the next one
                    agent.send(types.encode(beat))
                await asyncio.sleep(timeouts.BEAT)
                if not loads:
                    self._over("loop", now() - began)


work = Work()
"""This process's."""
at = work.at


def described(phase: str, detail: str) -> str:
    return f"{phase} of {detail}" if detail else phase


def collectives() -> dict[str, int]:
    """How many this rank has entered, by the name that all members have for a group: they wait for who has entered fewer."""
    torch = sys.modules.get("torch.distributed")
    initialized = getattr(torch, "is_initialized", None)  # it may be about to be imported, and may not have been built in
    if torch is None or initialized is None or not initialized():
        return {}
    world = torch.distributed_c10d._world
    return {name: group._get_sequence_number_for_group() for group, name in list(world.pg_names.items())}


def keep_flight_record(path: Path) -> None:
    """The newest collectives of this rank, as torch.distributed's flight recorder has them: a JSON list of what NCCL and what
    others recorded. Nothing of a process without a group."""
    if not collectives():
        return
    from torch._C import _distributed_c10d as recorder

    told = [getattr(recorder, dump)() for dump in ("_dump_nccl_trace_json", "_dump_fr_trace_json") if hasattr(recorder, dump)]
    with suppress(OSError):  # the disk may be what it waits for
        path.write_bytes(b"[" + b",".join(told) + b"]")


async def telling(config: Config, life: Coroutine[Any, Any, None]) -> None:
    """`life`, of this process, while its agent is told what it is at. On SIGUSR1 the folder of logs gets its flight record."""
    if not (name := os.environ.get(NAME, "")):
        return await life
    agent = _taken()
    work.configure(config.deadlines)
    rank, loop = int(os.environ.get("RANK", "0")), asyncio.get_running_loop()
    record = Path(config.run.dir) / run_files.LOGS / f"{name}.rank{rank}.flight.json"
    os_process.stacks_on_signal(lambda: loop.run_in_executor(None, keep_flight_record, record))
    beats = asyncio.create_task(work.tell(agent, rank))
    try:
        await unless_failed({beats}, life)
    finally:
        beats.cancel()


def _taken() -> socket.socket:
    """The agent's socket, in whose place this process and what it starts have an empty standard input."""
    agent, nothing = socket.socket(fileno=os.dup(0)), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return agent


logger = logging.getLogger("sluice")

SUFFIX = ".jsonl"
JOINED = 0.002  # seconds: two spans that are the same but for this gap are one, as the decode steps of a batch are
_WAITING = 1 << 16  # spans that wait for the thread at most
_HEADER = 512  # bytes of a file's first line


class TracedSpan(NamedTuple):
    """`start`, `end`: seconds since the epoch. `line`: what of the process; spans of one line do not overlap, but those of
    OVERLAPPING. `group`: -1 for none. `step`: that it is of, or the version that it moves, -1 for none."""

    name: str
    start: float
    end: float
    line: str = ""
    group: int = -1
    step: int = -1
    detail: str = ""


CALLS = "calls"  # the line of what a process is asked
EPISODES = "episodes"  # of a gateway: the phases of each episode, and its calls of the policy
PUBLICATION = "publication"  # of several threads
OVERLAPPING = (CALLS, EPISODES, PUBLICATION)
STATE = "state of "  # of the coordinator: with a member's name, the line of what state it is in
POLICY = "policy"  # a call of it; `detail`: the episode's index in its group, and the rollout
TOOL = "tool"  # from a reply that calls tools to the episode's next call of the policy; `detail`: its index, player and tools


class SpanHeader(Struct):
    """The first line of a file, of `_HEADER` bytes: it is written anew where something was dropped."""

    process: str
    rank: int
    incarnation: int
    pid: int
    host: str
    dropped: int = 0


class SpanLog:
    """Of this process. Until `open` it takes nothing."""

    def __init__(self) -> None:
        self._waiting: deque[TracedSpan] = deque()
        self._file: FileIO | None = None
        self._header = SpanHeader("", 0, 0, 0, "")
        self._room = 0  # bytes
        self._headed = False  # the first line is there
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._offset = time.time() - time.monotonic()

    @property
    def dropped(self) -> int:
        """Spans that found no room so far."""
        return self._header.dropped

    def open(self, config: Config, process: str) -> None:
        """Begin a file in the run's folder; those of the process's earlier starts have their part of `logs.span_bytes`."""
        rank, incarnation = (int(os.environ.get(name, "0")) for name in ("RANK", os_process.INCARNATION))
        self._header = header = SpanHeader(process, rank, incarnation, os.getpid(), socket.gethostname())
        if not config.logs.span_bytes or not config.run.dir:
            return
        path = Path(config.run.dir) / run_files.SPANS / f"{process}.{rank}.{time.time():.3f}{SUFFIX}"
        try:
            path.parent.mkdir(exist_ok=True)
            earlier = sum(file.stat().st_size for file in path.parent.glob(f"{process}.{rank}.*{SUFFIX}"))
            self._room = config.logs.span_bytes - earlier - _HEADER
            self._file = path.open("wb", buffering=0)
        except OSError as error:  # it costs the run its spans, and nothing else
            logger.warning("no spans of %s: %s", header.process, error)
            return
        self._write_header()
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def add(
        self, name: str, start: float, end: float, line: str = "", group: int = -1, step: int = -1, detail: str = ""
    ) -> None:
        """A span that is over, on the clock of time.monotonic. From any thread."""
        if self._thread is None:
            return
        if len(self._waiting) >= _WAITING:
            self._header.dropped += 1
            return
        self._waiting.append(TracedSpan(name, start + self._offset, end + self._offset, line, group, step, detail))

    @contextmanager
    def span(self, name: str, line: str = "", step: int = -1) -> Iterator[None]:
        """The time inside the block, however it is left."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.add(name, start, time.monotonic(), line, step=step)

    def close(self) -> None:
        """Write what waits: the process ends."""
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
        """Whether the line is in the file: whole, or not at all."""
        assert self._file is not None
        if len(line) > self._room:
            return False
        if not self._headed:
            self._write_header()
        if not self._headed:
            return False
        at = self._file.tell()
        try:
            if self._file.write(line) == len(line):
                self._room -= len(line)
                return True
        except OSError:  # no room on the disk, now
            pass
        with suppress(OSError):
            self._file.seek(at)
            self._file.truncate()
        return False

    def _write_header(self) -> None:
        assert self._file is not None
        with suppress(OSError):
            written = msgspec.json.encode(self._header).ljust(_HEADER - 1) + b"\n"
            self._headed = os.pwrite(self._file.fileno(), written, 0) == _HEADER or self._headed
            self._file.seek(0, os.SEEK_END)


def joined(spans: Iterable[TracedSpan]) -> list[TracedSpan]:
    """Those that only a short gap parts from their like before, as one; nothing else of their line lies in it."""
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


log = SpanLog()
"""This process's."""


class LineStates:
    """Lines that are in one state after the other: a span for each, once it is over."""

    def __init__(self) -> None:
        self._now: dict[str, tuple[str, float, str]] = {}  # by line: state, since, detail

    def enter(self, line: str, state: str, detail: str = "") -> None:
        now = time.monotonic()
        if (was := self._now.get(line)) is not None:
            log.add(was[0], was[1], now, line, detail=was[2])
        self._now[line] = state, now, detail

    def close(self) -> None:
        """All are over."""
        for line in self._now:
            self.enter(line, "")


# ------------------------------------------------------------------------------------------ reading


_decode = msgspec.json.Decoder(tuple[str, float, float, str, int, int, str]).decode


def _decoded(written: bytes) -> TracedSpan:
    """Its texts are shared with others': they are few, and each is in many spans."""
    name, start, end, line, group, step, detail = _decode(written)
    return TracedSpan(sys.intern(name), start, end, sys.intern(line), group, step, sys.intern(detail))


class SpanFile(Struct):
    """One file: who wrote it, and what was read of it. `at`: bytes that are read."""

    path: Path
    header: SpanHeader
    spans: list[TracedSpan] = []
    at: int = _HEADER

    def follow(self) -> list[TracedSpan]:
        """What came since, which is also behind the others in `spans`. A line that is still being written is left for later;
        one that is torn, by a kill, is left out."""
        with run_files.regular(self.path).open("rb") as file:
            self.header = msgspec.json.decode(file.read(_HEADER), type=SpanHeader)
            file.seek(self.at)
            whole, newline, _ = file.read().rpartition(b"\n")
        self.at += len(whole) + len(newline)
        new: list[TracedSpan] = []
        for line in whole.splitlines():
            with suppress(*run_files.NOT_DECODED):
                new.append(_decoded(line))
        self.spans += new
        return new


class SpanFolder:
    """The spans of a run, as far as they are there."""

    def __init__(self, run: Path):
        self._folder = run / run_files.SPANS
        self.files: dict[str, SpanFile] = {}

    def follow(self) -> None:
        """Read what came since. A file that is gone, as another run is in this one's place, is forgotten."""
        paths = sorted(self._folder.glob(f"*{SUFFIX}"))
        self.files = {path.name: self.files[path.name] for path in paths if path.name in self.files}
        for path in paths:
            if path.name not in self.files:
                try:
                    with run_files.regular(path).open("rb") as file:
                        header = msgspec.json.decode(file.read(_HEADER), type=SpanHeader)
                except run_files.NOT_DECODED:
                    continue  # not whole yet
                self.files[path.name] = SpanFile(path, header)
            self.files[path.name].follow()

    def by_process(self) -> dict[str, list[TracedSpan]]:
        """Those of all that had a process's name; of a group of ranks those of its first."""
        found: dict[str, list[TracedSpan]] = {}
        for file in self.files.values():
            if file.header.rank == 0:
                found.setdefault(file.header.process, []).extend(file.spans)
        return found
