"""What is kept of a process that makes no progress: its stacks, also where a signal has stopped it."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from pathlib import Path

import pytest

from launcher.node.logs import Log
from launcher.node.watchdog import ReceivedHeartbeat, is_stopped, keep_stacks
from runtime.config import Logs
from runtime.process.os_process import find_program
from runtime.process.spans import Heartbeat
from tests.system.runs import POLL

SCRIPT = """
import faulthandler, signal, time
faulthandler.register(signal.SIGUSR1)
def computes():
    print("here", flush=True)
    while True:
        time.sleep(0.001)
computes()
"""


@pytest.mark.skipif(find_program("py-spy") is None, reason="needs py-spy: pip install py-spy")
def test_py_spy_finds_the_stacks_of_a_process_that_is_stopped(tmp_path: Path) -> None:
    async def kept() -> str:
        log = Log(tmp_path / "a.log", Logs(), "a")
        with log.writer() as out:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", SCRIPT, stdout=asyncio.subprocess.PIPE, stderr=out
            )
        try:
            assert process.stdout is not None
            await process.stdout.readline()
            process.send_signal(signal.SIGSTOP)
            while not is_stopped(process.pid):  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(POLL)
            await keep_stacks(log, {0: ReceivedHeartbeat(Heartbeat(0, 10.0), process.pid, time.monotonic())})
            return log.tail()
        finally:
            process.kill()
            await process.wait()
            log.close()

    assert "computes (<string>" in asyncio.run(kept())
