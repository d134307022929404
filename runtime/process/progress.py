"""What this process is at, told to its node's agent once a second: that it works, and not only that it lives.

::

    a thread or a task ── at("backward") ──►  what is open, since when  ──►  event loop ── Beat ──►  launcher/node/stalls.py

A phase has a limit: `deadlines.stall`, or ten times the longest that it has taken here, 10 s at least. The agent ends a process
that is longer in a phase than its limit, but for that of a write, or whose event loop is silent for as long as that of "loop".
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Coroutine, Hashable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from msgspec import Struct

from runtime import codec, run_files, timeouts
from runtime.config import Config, Deadlines
from runtime.process import os_process, spans
from runtime.process.aio import unless_failed

now = time.monotonic
NAME = "SLUICE_BEATS"  # the variable with the name that the agent gave the process whose standard input is a socket for beats
TIMES = 10  # times the longest that a phase has taken: its limit, where `deadlines.stall` names none
DISK = "disk"  # the phase of a write: a file system that does not answer is waited for, and is no stall
LEARNT = 10  # times that a phase is over before its limit is known from them: until then kernels may be compiled


class Beat(Struct, frozen=True):
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
            spans.log.add(was[0], was[2], at, threading.current_thread().name, detail=was[1])

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
                beat = Beat(rank, limit if loads else self.limit("loop"), phase, detail, seconds, limit, collectives())
                with suppress(OSError):  # an agent that is away, or behind, hears the next one
                    agent.send(codec.encode(beat))
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
