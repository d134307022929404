"""Processes that are forked from one that has imported what they need, and those that are not since it is gone."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from launcher.node.fork_server import ForkedProcess, ForkServer
from launcher.node.logs import Log
from launcher.node.supervisor import Child, Supervisor
from launcher.node.topology import ProcessSpec
from runtime.config import Restarts
from runtime.process import os_process
from runtime.process.fork import ForkRequest
from sluice import start
from tests.loopback.line_views import Lines

DEADLINE = 120.0
PROGRAM = "tests.loopback.forked_program"
AGENT = f"""
import asyncio, os, sys
from launcher.node.fork_server import ForkServer

async def main():
    forked = await ForkServer(["rollout"]).fork({start.command(PROGRAM, "wait")}, {{**os.environ, "OMP_NUM_THREADS": "1"}}, 2)
    print(forked.pid, flush=True)
    os.kill(os.getpid(), 9)

asyncio.run(main())
"""


def supervised(tmp_path: Path, test: Callable[[Supervisor, ForkServer], Awaitable[None]]) -> list[str]:
    """What it said."""
    said: list[str] = []

    async def within() -> None:
        server = ForkServer(["rollout"])
        supervisor = Supervisor(tmp_path, Lines(said), fork_server=server)
        try:
            await asyncio.wait_for(test(supervisor, server), DEADLINE)
        finally:
            await supervisor.end_all(0.0)

    asyncio.run(within())
    assert not [one for one in psutil.Process().children() if PROGRAM in one.cmdline()]
    return said


def spec(how: str, threads: int = 1) -> ProcessSpec:
    env = {"MINE": "own", "OMP_NUM_THREADS": str(threads)}
    return ProcessSpec(name="rollout-0", role="rollout", command=start.command(PROGRAM, how), env=env, forked=True)


async def told(output: Log) -> dict[str, Any]:
    """What the program said of itself; the test's own deadline ends the wait."""
    while not (lines := output.tail().splitlines()):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    found: dict[str, Any] = json.loads(lines[0])
    return found


def process_of(server: ForkServer) -> subprocess.Popen[bytes]:
    assert server._process is not None
    return server._process


def is_forked(child: Child) -> bool:
    return isinstance(child.process, ForkedProcess)


def test_what_is_forked_is_as_a_process_that_was_started_and_has_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(supervisor: Supervisor, server: ForkServer) -> None:
        monkeypatch.setenv("NOT_MINE", "as this one has it")
        child = await supervisor.start(spec("3", threads=2))
        assert await child.process.wait() == 3
        found = await told(child.output)
        assert is_forked(child)
        assert (found["parent"], found["session"]) == (os.getpid(), child.pid)
        assert found["modules"] == ["torch"]
        assert found["environment"] == {"MINE": "own", "OMP_NUM_THREADS": "2", "NOT_MINE": "as this one has it"}
        assert found["threads"] == 2
        assert found["command"] == [*start.command(PROGRAM, "3")]
        assert found["input"] == ""
        assert "exit code 3" in str(child.fault())

    assert supervised(tmp_path, test) == []


def test_one_that_is_killed_is_forked_again(tmp_path: Path) -> None:
    async def test(supervisor: Supervisor, server: ForkServer) -> None:
        first = await supervisor.start(spec("wait"))
        supervisor.enable_restarts({"rollout-0": Restarts(backoff=0.0)})
        failing = asyncio.create_task(supervisor.first_failure())
        os.kill(first.pid, signal.SIGKILL)
        assert await first.process.wait() == -signal.SIGKILL
        while not (again := [child for child in supervisor.children if child.incarnation == 1]):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert is_forked(again[0])
        failing.cancel()

    (line,) = supervised(tmp_path, test)
    assert line == "rollout-0: run: was killed by SIGKILL; started again in 0 s"


def test_without_the_server_what_was_forked_lives_and_the_next_is_started_by_itself(tmp_path: Path) -> None:
    async def test(supervisor: Supervisor, server: ForkServer) -> None:
        forked = await supervisor.start(spec("wait"))
        process_of(server).kill()
        process_of(server).wait()
        plain = await supervisor.start(spec("0"), incarnation=1)
        assert await plain.process.wait() == 0
        found = await told(plain.output)
        assert (is_forked(plain), found["modules"]) == (False, [])
        assert found["parent"] == os.getpid()
        assert forked.running

    supervised(tmp_path, test)


def test_what_is_forked_ends_with_the_agent() -> None:
    agent = subprocess.Popen((sys.executable, "-c", AGENT), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    said, _ = agent.communicate(timeout=DEADLINE)  # its standard error is open as long as what was forked lives
    assert agent.returncode == -signal.SIGKILL
    assert int(said) > 0


def test_one_that_nobody_waits_for_any_more_is_ended_with_the_server() -> None:
    async def test() -> int:
        before = len(psutil.Process().children())
        server = ForkServer(["rollout"])
        assert server._socket is not None
        reader, writer = os.pipe()
        with os_process.adopting():
            request = ForkRequest(list(start.command(PROGRAM, "wait")), {**os.environ, "OMP_NUM_THREADS": "1"})
            socket.send_fds(server._socket, [msgspec.msgpack.encode(request)], [writer])
            assert select.select([server._socket], [], [], DEADLINE)[0]
        os.close(writer)
        assert len(psutil.Process().children()) == before + 2
        server.end()
        os.close(reader)
        return len(psutil.Process().children()) - before

    assert asyncio.run(test()) == 0


def test_one_that_is_cancelled_ends_the_server() -> None:
    async def test() -> list[psutil.Process]:
        before = psutil.Process().children()
        server = ForkServer(["rollout"])
        forking = asyncio.create_task(server.fork(start.command(PROGRAM, "wait"), {**os.environ, "OMP_NUM_THREADS": "1"}, 2))
        await asyncio.sleep(0)
        forking.cancel()
        await asyncio.gather(forking, return_exceptions=True)
        return [one for one in psutil.Process().children() if one not in before]

    assert asyncio.run(test()) == []


def test_the_server_has_one_thread() -> None:
    async def test() -> int:
        server = ForkServer(["rollout", "trainer"])
        try:
            reader, writer = os.pipe()
            forked = await server.fork(start.command(PROGRAM, "0"), {**os.environ, "OMP_NUM_THREADS": "1"}, writer)
            assert forked is not None
            await forked.wait()
            os.close(reader)
            os.close(writer)
            return psutil.Process(process_of(server).pid).num_threads()
        finally:
            server.end()

    assert asyncio.run(asyncio.wait_for(test(), DEADLINE)) == 1


def test_without_roles_there_is_no_server() -> None:
    assert asyncio.run(ForkServer(()).fork([PROGRAM, "0"], {}, 2)) is None
