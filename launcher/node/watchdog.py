"""Finds the processes of a node that make no progress. Each process sends a heartbeat once a second.

::

    heartbeats of each process ──►  HeartbeatMonitor  ──►  stalled()  ──►  stacks into its log  ──►  Supervisor.give_up

Each process sends over a socket of its own, which it gets as its standard input. The socket has no name: no other process can
fill it, or speak for that process. The kernel says which rank of a group has sent a heartbeat.
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
_LARGEST = 4096  # bytes of a heartbeat
_AT_ONCE = 64  # heartbeats taken from one process before the next process gets its turn
_STARTED = -1  # stands for the started process until a rank has sent a heartbeat


class ReceivedHeartbeat(Struct):
    """The newest heartbeat of a rank, and when it came. `pid`: of the process that sent it."""

    beat: Heartbeat
    pid: int
    when: float


def stalled(ranks: Mapping[int, ReceivedHeartbeat], now: float, stopped: Collection[int] = ()) -> tuple[int, str] | None:
    """Return which rank of a group has stalled, and why; None if no rank has stalled. Pure. A silent rank comes first: the
    other ranks wait for it. A rank that a signal has `stopped` neither loads nor compiles, so its limit is lower. Next come
    ranks that have entered fewer collectives of a group than other ranks. The others wait for these, and are not overdue until
    these are. If such a rank has no work, the rank that has waited too long has stalled."""
    for rank, heard in sorted(ranks.items()):
        limit = min(heard.beat.loop, timeouts.STALL_LEAST) if rank in stopped else heard.beat.loop
        if (silent := now - heard.when) > limit:
            why = f"its event loop has not run for {silent:.1f} s (deadlines.watchdog.loop: {limit:.3g} s)"
            return rank, f"is stopped: {why}" if rank in stopped else why
    furthest: dict[str, int] = {}
    for heard in ranks.values():
        furthest |= {group: max(count, furthest.get(group, 0)) for group, count in heard.beat.collectives.items()}
    waited_for = {rank: heard for rank, heard in ranks.items() if heard.beat.phase and _missing(heard.beat, furthest)}
    for rank, heard in sorted((waited_for or ranks).items()):
        beat = heard.beat
        if beat.phase and beat.seconds > beat.limit:
            why = f"no progress in {described(beat.phase, beat.detail)} for {beat.seconds:.1f} s"
            why += f" (deadlines.watchdog.{beat.phase}: {beat.limit:.3g} s)"
            if missing := _missing(beat, furthest):
                why += f"; other ranks wait for it in {missing}"
            return rank, why
    return None


def _missing(beat: Heartbeat, furthest: Mapping[str, int]) -> str:
    """Return the collective that other ranks have entered and this rank has not; "" if there is none."""
    for group, count in beat.collectives.items():
        if count < furthest[group]:
            return f"collective {furthest[group]} of group {group}"
    return ""


class HeartbeatMonitor:
    """The newest heartbeats of one node's processes. Each process has a connection of its own."""

    def __init__(self) -> None:
        self._heard: dict[str, dict[int, ReceivedHeartbeat]] = {}
        self._connections: dict[str, socket.socket] = {}

    def connected(self, name: str) -> socket.socket | IO[bytes]:
        """Return the standard input for the process `name`, and take heartbeats from its other end. Without such sockets (not
        Linux) the input is empty: no heartbeats come, and no process counts as stalled."""
        self._heard.pop(name, None)
        self._disconnect(name)
        if not sys.platform.startswith("linux"):
            return Path(os.devnull).open("rb")
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own.setblocking(False)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        own.shutdown(socket.SHUT_WR)  # a process that reads its standard input finds the end of it
        self._connections[name] = own
        asyncio.get_running_loop().add_reader(own, self._take, name, own)
        return other

    def close(self) -> None:
        for name in list(self._connections):
            self._disconnect(name)

    def _disconnect(self, name: str) -> None:
        if (own := self._connections.pop(name, None)) is not None:
            asyncio.get_running_loop().remove_reader(own)
            own.close()

    def began(self, name: str, pid: int) -> None:
        """Note that the process `name` was started. Before its first heartbeat it can stall only if a signal stops it."""
        self._heard[name] = {_STARTED: ReceivedHeartbeat(Heartbeat(_STARTED, math.inf), pid, time.monotonic())}

    def of(self, name: str) -> Mapping[int, ReceivedHeartbeat]:
        return self._heard.get(name, {})

    def take(self) -> None:
        """Take all heartbeats that have come until now."""
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
                ranks.pop(_STARTED, None)  # may be the parent of the ranks, which sends no heartbeats
                ranks[beat.rank] = ReceivedHeartbeat(beat, _CREDENTIALS.unpack(about[0][2])[0], time.monotonic())

    def forgive(self, seconds: float) -> None:
        """Move all arrival times by `seconds`. This process itself stood still for so long, so silence in it means nothing."""
        for ranks in self._heard.values():
            for heard in ranks.values():
                heard.when += seconds


async def keep_stacks(log: Log, ranks: Mapping[int, ReceivedHeartbeat]) -> None:
    """Make each rank in turn write its stacks and its collectives into `log`. Add the output of py-spy where it is installed:
    only py-spy can show the stacks of a stopped process."""
    spy = find_program("py-spy")
    for heard in ranks.values():
        with suppress(ProcessLookupError):
            os.kill(heard.pid, signal.SIGUSR1)
        await asyncio.sleep(timeouts.STACKS_WRITTEN)  # a rank writes in pieces; two ranks at once would mix them
        if spy is not None:
            log.add(await _spied(spy, heard.pid))


async def _spied(spy: str, pid: int) -> bytes:
    """Return what py-spy prints of the process; nothing if py-spy does not end within its deadline."""
    command = (spy, "dump", "--nonblocking", "--pid", str(pid))
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT)
    try:
        return (await asyncio.wait_for(process.communicate(), timeouts.STACKS))[0]
    except TimeoutError:
        process.kill()
        await process.wait()
        return b""


def is_stopped(pid: int) -> bool:
    with suppress(psutil.Error):
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    return False
