"""A process that a supervisor has started: its log, and why it ended."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from contextlib import suppress
from pathlib import Path

from launcher.node.logs import Log
from launcher.node.topology import ProcessSpec
from runtime.errors import ServiceFault, SluiceError, UserError
from runtime.process import os_process

FAULT = "error: "  # how a process begins the line that says why it ends


class Child:
    """A process that was started, and its log. `incarnation`: how many were started under its name before it."""

    def __init__(self, spec: ProcessSpec, process: asyncio.subprocess.Process, output: Log, incarnation: int = 0):
        self.spec = spec
        self.process = process
        self.output = output
        self.log = output.path
        self.incarnation = incarnation
        self.given_up = ""  # why this node killed it while the others go on
        self.last = ""  # why it is not replaced
        self.starved = ""  # what the kernel says, if it killed the process for want of memory
        self.advice = ""  # what the user can do about the want of memory
        self.late = bool(incarnation)  # whether it was started when the run was under way

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process.returncode is None

    @property
    def mistaken(self) -> bool:
        """Whether it ended with a mistake that the user has to mend: a restart would end in the same way."""
        return self.process.returncode == os_process.MISTAKE or bool(self.advice)

    def give_up(self, reason: str) -> None:
        """Kill the process if it still runs. If it has already ended, unnoticed here, its own log says why."""
        if self.running and not os_process.ended(self.pid):
            self.given_up = reason
            self.process.kill()  # the processes that it started end with it

    def signal_group(self, number: int) -> None:
        """Signal the process and all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def _log_of(self, line: str) -> Path:
        """Return the newest log of the process that the line names first, if it has one here: it may say more than this log."""
        name = line.partition(":")[0]
        logs = self.log.parent.glob(f"{name}.*log") if re.fullmatch(r"[a-z]+-\d+", name) and name != self.spec.name else ()
        return max(logs, key=lambda path: path.stat().st_mtime, default=self.log)

    def fault(self) -> SluiceError:
        """Return why the process ended, in its own last line where it wrote one."""
        code = self.process.returncode or 0
        if self.advice:
            return UserError(f"{self.spec.name}: {self.starved}, twice: {self.advice}")
        if self.starved:
            return ServiceFault(self.spec.name, "run", self.starved + self.last)
        if self.given_up:
            return ServiceFault(self.spec.name, "run", self.given_up + self.last)
        if code < 0:
            return ServiceFault(self.spec.name, "run", f"was killed by {signal.Signals(-code).name}{self.last}")
        lines = self.output.tail().strip().splitlines() or ["(empty log)"]
        own = [line.removeprefix(FAULT) for line in lines if line.startswith(FAULT)]
        if own and self.mistaken:
            return UserError("\n".join(dict.fromkeys(own)))  # each rank writes the line
        if own:
            return SluiceError(f"{own[-1]} (log: {self._log_of(own[-1])}){self.last}")
        return ServiceFault(self.spec.name, "run", f"ended with exit code {code}: {lines[-1]} (log: {self.log}){self.last}")
