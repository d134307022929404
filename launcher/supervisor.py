"""Starts a run's processes, watches them, and leaves none behind.

Each process leads a process group of its own, so that Ctrl-C reaches only the launcher and a whole role can be ended at
once; each writes to a log of its own.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from launcher.topology import ProcessSpec
from runtime import os_process
from runtime.errors import DeadlineExceeded, ServiceFault, SluiceError, UserError

FAULT = "error: "  # how a process begins the line that says why it ends


class Child:
    """A process that was started, and its log."""

    def __init__(self, spec: ProcessSpec, process: asyncio.subprocess.Process, log: Path):
        self.spec = spec
        self.process = process
        self.log = log
        self.spared = False  # it ended badly, and the others go on without it

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process.returncode is None

    def signal_group(self, number: int) -> None:
        """Signal the process and all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def fault(self) -> SluiceError:
        """Why it ended, in its own last word where it had one."""
        code = self.process.returncode or 0
        if code < 0:
            return ServiceFault(self.spec.name, "run", f"was killed by {signal.Signals(-code).name}")
        lines = self.log.read_text(errors="replace").strip().splitlines() or ["(empty log)"]
        own = [line.removeprefix(FAULT) for line in lines if line.startswith(FAULT)]
        if code == 2 and own:
            return UserError("\n".join(own))
        if own:
            return SluiceError(f"{own[-1]} (log: {self.log})")
        return ServiceFault(self.spec.name, "run", f"ended with exit code {code}: {lines[-1]} (log: {self.log})")


class Supervisor:
    """The children of one run, in the order in which they were started."""

    def __init__(self, logs: Path):
        self._logs = logs
        self.children: list[Child] = []

    async def start(self, spec: ProcessSpec, pass_fds: Sequence[int] = (), capture: bool = False) -> Child:
        """Start one process; with `capture`, its standard output is the caller's to read. Raises UserError for an
        interpreter that is not there."""
        log = self._logs / f"{spec.name}.log"
        with log.open("wb") as out:
            try:
                process = await asyncio.create_subprocess_exec(
                    *spec.command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE if capture else out,
                    stderr=out,
                    env={**os.environ, **spec.env},
                    pass_fds=pass_fds,
                    start_new_session=True,
                    preexec_fn=os_process.die_with_parent,  # torchrun does not ask for it by itself
                )
            except FileNotFoundError:
                raise UserError(f"services.{spec.role}.python: no such interpreter: {spec.command[0]}") from None
        child = Child(spec, process, log)
        self.children.append(child)
        return child

    def pids(self) -> list[int]:
        return [child.pid for child in self.children if child.running]

    def culprit(self) -> Child | None:
        """Of the children that ended badly: one that was killed, else one that its user can help, else the first."""
        failed = [(child.process.returncode, child) for child in self.children if child.process.returncode and not child.spared]
        return min(failed, key=lambda one: (one[0] > 0, one[0] != 2), default=(0, None))[1]

    async def first_failure(self, spares: Callable[[Child], bool]) -> Child:
        """Waits until a child ends otherwise than with exit code 0, and the others cannot go on without it: `spares` is asked
        once of each."""
        waits = {asyncio.create_task(child.process.wait()): child for child in self.children if not child.spared}
        try:
            while waits:
                done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    child = waits.pop(task)
                    if child.process.returncode:
                        child.spared = spares(child)
                        if not child.spared:
                            return child
                        # What it left ends in order: Python's resource tracker frees shared memory, and heeds no SIGTERM.
                        child.signal_group(signal.SIGTERM)
            await asyncio.Future()  # all ended well: there will be no failure
            raise AssertionError
        finally:
            for task in waits:
                task.cancel()

    async def wait_all(self, timeout: float) -> None:
        """Wait for every child to end. Raises DeadlineExceeded naming one that did not."""
        waits = [asyncio.create_task(child.process.wait()) for child in self.children]
        if waits:
            await asyncio.wait(waits, timeout=timeout)
        for child in self.children:
            if child.running:
                raise DeadlineExceeded(child.spec.name, "stop", "did not end", timeout)

    async def end_all(self, grace: float) -> None:
        """SIGTERM to whoever still runs, SIGKILL after `grace` seconds; returns when every one is gone."""
        for child in self.children:
            if child.running:
                child.signal_group(signal.SIGTERM)
        with suppress(DeadlineExceeded):
            await self.wait_all(grace)
        for child in self.children:
            child.signal_group(signal.SIGKILL)  # also what the child left in its group
        for child in self.children:
            await child.process.wait()
