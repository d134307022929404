"""Which of a node's processes make no progress, by what they tell once a second.

::

    Work.tell of each process ── Beat, a message ──►  Beats  ──►  stalled()  ──►  stacks into its log  ──►  Supervisor.give_up

Each process has a socket of its own for it, which it is started with as its standard input. It has no name: nobody else can
fill it, or speak for that process. The kernel says which rank of a group has sent a beat.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

import psutil
from msgspec import Struct

from launcher.node.logs import Log
from runtime import timeouts, types
from runtime.errors import InvalidMessage
from runtime.process.os_process import find_program
from runtime.process.spans import Heartbeat, described

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_LARGEST = 4096  # bytes of a beat
_AT_ONCE = 64  # beats of a process, then it is the next one's turn
_STARTED = -1  # in a rank's place, until one has told: the process that was started


class ReceivedHeartbeat(Struct):
    """The newest beat of a rank, and when it came. `pid`: of the process that sent it."""

    beat: Heartbeat
    pid: int
    when: float


def stalled(ranks: Mapping[int, ReceivedHeartbeat], now: float, stopped: Collection[int] = ()) -> tuple[int, str] | None:
    """Which of a group's ranks has stalled, and how; None while all go on. Pure.

    A rank that is silent holds the others up; one that a signal has `stopped` neither loads nor compiles meanwhile. Else one
    that has entered fewer of a group's collectives than others does: these wait for it, and are not overdue as long as it is
    not; if it was given nothing to do, who has waited too long is.
    """
    for rank, heard in sorted(ranks.items()):
        limit = min(heard.beat.loop, timeouts.STALL_LEAST) if rank in stopped else heard.beat.loop
        if (silent := now - heard.when) > limit:
            why = f"its event loop has not run for {silent:.1f} s (deadlines.stall.loop: {limit:.3g} s)"
            return rank, f"is stopped: {why}" if rank in stopped else why
    furthest: dict[str, int] = {}
    for heard in ranks.values():
        furthest |= {group: max(count, furthest.get(group, 0)) for group, count in heard.beat.collectives.items()}
    waited_for = {rank: heard for rank, heard in ranks.items() if heard.beat.phase and _missing(heard.beat, furthest)}
    for rank, heard in sorted((waited_for or ranks).items()):
        beat = heard.beat
        if beat.phase and beat.seconds > beat.limit:
            why = f"no progress in {described(beat.phase, beat.detail)} for {beat.seconds:.1f} s"
            why += f" (deadlines.stall.{beat.phase}: {beat.limit:.3g} s)"
            if missing := _missing(beat, furthest):
                why += f"; other ranks wait for it in {missing}"
            return rank, why
    return None


def _missing(beat: Heartbeat, furthest: Mapping[str, int]) -> str:
    """The collective that others have entered, and this rank has not; "" where there is none."""
    for group, count in beat.collectives.items():
        if count < furthest[group]:
            return f"collective {furthest[group]} of group {group}"
    return ""


class HeartbeatMonitor:
    """What the processes of one node have told, each over a connection of its own."""

    def __init__(self) -> None:
        self._heard: dict[str, dict[int, ReceivedHeartbeat]] = {}
        self._connections: dict[str, socket.socket] = {}

    def connected(self, name: str) -> socket.socket | IO[bytes]:
        """The standard input of the process called `name`, of which is known from now on what it tells. Where there are no such
        sockets it is empty: nothing is heard, and nobody is stalled."""
        self.forget(name)
        if not sys.platform.startswith("linux"):
            return Path(os.devnull).open("rb")
        own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own.setblocking(False)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        own.shutdown(socket.SHUT_WR)  # who reads its standard input finds the end of it
        self._connections[name] = own
        asyncio.get_running_loop().add_reader(own, self._take, name, own)
        return theirs

    def forget(self, name: str) -> None:
        self._heard.pop(name, None)
        self._disconnect(name)

    def close(self) -> None:
        for name in list(self._connections):
            self._disconnect(name)

    def _disconnect(self, name: str) -> None:
        if (own := self._connections.pop(name, None)) is not None:
            asyncio.get_running_loop().remove_reader(own)
            own.close()

    def began(self, name: str, pid: int) -> None:
        """The process called `name` was started. Before its first beat it can only have been stopped."""
        self._heard[name] = {_STARTED: ReceivedHeartbeat(Heartbeat(_STARTED, math.inf), pid, time.monotonic())}

    def of(self, name: str) -> Mapping[int, ReceivedHeartbeat]:
        return self._heard.get(name, {})

    def take(self) -> None:
        """What has come until now."""
        for name, own in list(self._connections.items()):
            self._take(name, own)

    def _take(self, name: str, own: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            try:
                data, about, _, _ = own.recvmsg(_LARGEST, socket.CMSG_SPACE(_CREDENTIALS.size))
            except BlockingIOError:
                return
            if not data:
                self._disconnect(name)
                return
            with suppress(InvalidMessage):
                beat = types.decode(Heartbeat, data)
                ranks = self._heard.setdefault(name, {})
                ranks.pop(_STARTED, None)  # which may be what has started the ranks, and tells of nothing
                ranks[beat.rank] = ReceivedHeartbeat(beat, _CREDENTIALS.unpack(about[0][2])[0], time.monotonic())

    def forgive(self, seconds: float) -> None:
        """This process itself has stood still for so long: what it has not taken meanwhile is nobody's silence."""
        for ranks in self._heard.values():
            for heard in ranks.values():
                heard.when += seconds


async def keep_stacks(log: Log, ranks: Mapping[int, ReceivedHeartbeat]) -> None:
    """Each of the ranks, one after the other, writes its stacks into their `log`, and its collectives beside it. Where py-spy
    is installed, the log has what that finds too: of a process that is stopped, it alone can tell."""
    spy = find_program("py-spy")
    for heard in ranks.values():
        with suppress(ProcessLookupError):
            os.kill(heard.pid, signal.SIGUSR1)
        await asyncio.sleep(timeouts.STACKS_WRITTEN)  # in pieces, which those of two ranks would tear
        if spy is not None:
            log.add(await _spied(spy, heard.pid))


async def _spied(spy: str, pid: int) -> bytes:
    """What py-spy finds the process at; nothing if it does not end within its deadline."""
    command = (spy, "dump", "--nonblocking", "--pid", str(pid))
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT)
    try:
        return (await asyncio.wait_for(process.communicate(), timeouts.STACKS))[0]
    except TimeoutError:
        process.kill()
        await process.wait()
        return b""


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped the process."""
    with suppress(psutil.Error):
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    return False
