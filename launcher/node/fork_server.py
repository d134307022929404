"""A node's end of the fork server, of which services of models are forked: torch is imported once, and not by each of them."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import msgspec

from launcher.node.environment import OF_TORCH
from launcher.node.local_node import Machine
from launcher.node.stalls import is_stopped
from runtime import timeouts
from runtime.cluster.topology import instances, settings_of
from runtime.config import Computing, Config, Process
from runtime.process import keys, os_process
from runtime.process.os_process import LARGEST, ROOM, ForkRequest
from sluice import start


def on_torch(role: Process) -> bool:
    return isinstance(role, Computing) and getattr(role, "engine", "torch") == "torch"


def forked_roles(config: Config, trains: bool, machine: Machine) -> tuple[str, ...]:
    """Those whose processes may be forked: of models on CPUs. Libraries of devices are not known to bear it."""
    computing = {one.role for one in instances(config, trains) if on_torch(settings_of(config, one))}
    return tuple(sorted(computing)) if machine.kind == "cpu" else ()


class ForkedProcess:
    """What asyncio's own processes are, of a child that was forked from another process and is this one's now."""

    stdout: asyncio.StreamReader | None = None

    def __init__(self, pid: int):
        self.pid = pid
        self.returncode: int | None = None
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._descriptor = os.pidfd_open(pid)
        self._loop.add_reader(self._descriptor, self._reap)

    def _reap(self) -> None:
        _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)
        self._ended.set()

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


class ForkServer:
    """`fork` gives a process as long as the server lives, and None where it does not: then each imports for itself."""

    def __init__(self, roles: Sequence[str] = ()) -> None:
        """Have the server import what `roles` need, beside what else goes on; there is none where these are none. It has one
        thread: no other would be there in what is forked."""
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._one_at_a_time = asyncio.Lock()
        self.say: Callable[[str], None] = lambda _: None
        if not roles or not hasattr(os, "pidfd_open") or not sys.platform.startswith("linux"):
            return
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        with theirs:
            self._process = subprocess.Popen(
                (*start.command("services.fork_server", *roles), " " * ROOM),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # what cannot be imported, a service's own start says
                env={**keys.inherited(), **OF_TORCH, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
                preexec_fn=os_process.before_exec,
            )

    async def fork(self, command: Sequence[str], env: Mapping[str, str], given: int, log: int) -> ForkedProcess | None:
        """A child of this process, which has to adopt, that does what `command` of `sluice.start` would, reads the descriptor
        `given` and writes to `log`."""
        async with self._one_at_a_time:
            if self._socket is None:
                return None
            request = msgspec.msgpack.encode(ForkRequest(list(command), dict(env)))
            try:
                socket.send_fds(self._socket, [request], [given, log])
                told = await self._answer(self._socket)
            except OSError:
                told = b""
            except asyncio.CancelledError:
                self.end()
                raise
            if told:
                return ForkedProcess(int(told))
            self.end()
            return None

    async def _answer(self, ours: socket.socket) -> bytes:
        """Nothing where none comes in time, or where a signal has stopped the server meanwhile."""
        assert self._process is not None
        answer = asyncio.ensure_future(asyncio.get_running_loop().sock_recv(ours, LARGEST))
        went_on = began = time.monotonic()
        try:
            while not (await asyncio.wait({answer}, timeout=timeouts.BEAT))[0]:
                now = time.monotonic()
                went_on = went_on if is_stopped(self._process.pid) else now
                if now - went_on > timeouts.STALL_LEAST or now - began > timeouts.FORK_SERVER:
                    why = "is stopped" if went_on < now else "does not answer"
                    self.say(f"fork server: {why}, after {now - began:.0f} s; processes begin without it")
                    return b""
            return answer.result()
        finally:
            answer.cancel()

    def end(self) -> None:
        """Of the server. What was forked lives on, but for one that nobody waits for any more."""
        if self._socket is not None and self._process is not None:
            with suppress(OSError):  # it may be gone
                self._socket.shutdown(socket.SHUT_RD)  # from here on no other goes on that was forked
                if told := self._socket.recv(LARGEST):
                    os.kill(int(told), signal.SIGKILL)
                    os.waitpid(int(told), 0)
            self._socket.close()
            self._socket = None
            self._process.kill()
            self._process.wait()
