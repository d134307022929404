"""Ends what a node's processes leave behind: the programs of agents, say, once their environment has been killed.

These lead sessions of their own, which no signal to a process's group reaches. The kernel makes them children of the agent,
which knows them by a variable that all of its processes start with, and whatever they start.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from runtime import timeouts
from runtime.process import os_process


class Orphans:
    """Children of this process that it has not started. They are told to end, and killed AGENT_END_GRACE later."""

    def __init__(self) -> None:
        self.variable = f"{os.environ.get(os_process.AGENTS, '')} {os.getpid()}".strip()
        """Of the processes: their agents, where one of them has started this one."""
        self._sessions = set[int]()  # that the node's processes have led
        self._seen = set[int]()
        self._told: dict[int, float] = {}  # by pid, when
        self._starting = 0

    @contextmanager
    def spared(self) -> Iterator[None]:
        """Inside the block a process is started, whose pid is not known yet."""
        os_process.adopt(True)
        self._starting += 1
        try:
            yield
        finally:
            self._starting -= 1

    def end(self, known: Collection[int]) -> list[str]:
        """Go on with the end of all that are not `known`, from the second look at them on: some end by themselves. Returns the
        names of those that were told to end now."""
        self._sessions.update(known)
        others = set() if self._starting else _children().difference(known)
        for pid in others - self._told.keys():
            if _ended_in(pid) in self._sessions:  # no process that a caller of this one has started
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
        found = {pid for pid in others if self._is_ours(pid)}
        seen_twice = found & self._seen - self._told.keys()
        names = [_tell(pid) for pid in seen_twice]
        self._told |= dict.fromkeys(seen_twice, time.monotonic())
        self._seen = found
        for pid, told in list(self._told.items()):
            try:
                if time.monotonic() - told > timeouts.AGENT_END_GRACE:
                    os.kill(pid, signal.SIGKILL)
                ended = os.waitpid(pid, os.WNOHANG)[0]
            except (ProcessLookupError, ChildProcessError):
                ended = pid
            if ended:
                del self._told[pid]
        return [name for name in names if name]

    @property
    def left(self) -> bool:
        """Whether one of them lives."""
        return bool(self._seen or self._told)

    def _is_ours(self, pid: int) -> bool:
        own = f"{os_process.AGENTS}=".encode()
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:  # it has ended, or is another user's by now
            return False
        return any(str(os.getpid()).encode() in each.removeprefix(own).split() for each in variables if each.startswith(own))


def _children() -> set[int]:
    found = set[int]()
    for task in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            found |= set(map(int, task.read_text().split()))
    return found


def _ended_in(pid: int) -> int:
    """Return the session of a process that has ended and is still waited for, else 0."""
    try:
        state, _, _, session = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:4]
    except OSError:
        return 0
    return int(session) if state == "Z" else 0


def _tell(pid: int) -> str:
    """Its name; "" where it has ended meanwhile."""
    with suppress(OSError):
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        os.kill(pid, signal.SIGTERM)
        return name
    return ""
