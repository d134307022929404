"""The coordinator as a child of the node that leads the run: in place of one that is killed another comes, which takes up what
lives."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Sequence

from launcher.node.child import Child
from launcher.node.supervisor import Supervisor
from launcher.node.topology import ProcessSpec
from runtime.cluster.restarts import Allowance
from runtime.config import Restarts


class CoordinatorKeeper:
    """Of the newest coordinator that this node has started, `child`; None before there is one."""

    def __init__(self, supervisor: Supervisor):
        self.child: Child | None = None
        self._supervisor = supervisor
        self._stopping = False

    async def start(self, spec: ProcessSpec, pass_fds: Sequence[int] = (), incarnation: int = 0) -> Child:
        self.child = await self._supervisor.start(spec, pass_fds=pass_fds, incarnation=incarnation)
        if self._stopping:
            self.terminate()
        return self.child

    async def until_finished(self, again: ProcessSpec, restarts: Restarts) -> None:
        """`again`: how another is started. Raises the fault of one that fails, or is killed when `restarts` allow no further
        start."""
        assert self.child is not None
        self._supervisor.followed = (again.name,)
        allowance = Allowance(restarts)
        while code := await self.child.process.wait():
            former, fault = self.child, self.child.fault()
            delay = allowance.delay(time.monotonic()) if code < 0 else None
            if delay is None:
                raise fault
            self._supervisor.say(f"{fault}; started again in {delay:g} s")
            self._supervisor.let_go(former)
            await asyncio.sleep(delay)
            await self.start(again, incarnation=former.incarnation + 1)

    def terminate(self) -> None:
        """The run is to save and to end; if the coordinator is away, the next one is told."""
        self._stopping = self._supervisor.stopping = True
        if self.child is not None:
            self.child.signal_group(signal.SIGTERM)  # which is kept for one that still begins
