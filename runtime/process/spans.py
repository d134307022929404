"""What each process did, and when: spans, in a file of its own in the run's folder, for whoever asks later.

::

    a phase ends (`process.progress`) ───┐
    a command is answered (`services`) ──┼──► add ──► a queue ── once a second, a thread ──► spans/NAME.rank.start.jsonl
    a phase of the coordinator's ends ───┘

Nothing waits for it, and nothing of a run is read from it. What would make the file larger than `logs.span_bytes`, and what no
disk takes, is dropped, the newest, and counted.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

from runtime import run_files, timeouts
from runtime.config import Config
from runtime.process import os_process

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
