"""A process of a role in a simulation, as the coordinator sees it: the port, the connection, and what may befall both.

::

    coordinator ── post ──► link (delay, in order) ──► handler named after the command ──► link ──► answer
                     └── the command's deadline: Unanswered; of a group of ranks, its loss

A process that is stopped does nothing until it goes on; its connection stays. One that ends breaks its connection, which the
coordinator finds out after the link's delay.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from runtime import timeouts
from runtime.coordinator.sync_group import seen
from runtime.errors import ServiceFault, SluiceError, Unanswered, Unreachable
from runtime.status import Status
from runtime.types import GeneratedGroup, GroupRequest, LogprobRequest, ScoreRequest, ValueRequest, snake

if TYPE_CHECKING:
    from runtime.simulation.cluster import SimulatedCluster

_ASKED: dict[type, str] = {GroupRequest: "generate", ScoreRequest: "score", LogprobRequest: "logprobs", ValueRequest: "values"}
BYTES = 8  # of a payload for each token: the token and its log-probability
_LEAST = 1e-9  # seconds between two messages of one link: they stay in order


class SimulatedProcess:
    """A RolePort. What it does with a command is a method of the command's name, in the subclasses."""

    role = ""
    is_group = False  # ranks that are one unit: lost with the first command that is not answered, or ping
    withdraws = False  # ends what its caller has withdrawn

    def __init__(self, cluster: SimulatedCluster, name: str, incarnation: int, machine: str):
        self.name, self.incarnation, self.machine = name, incarnation, machine
        self.machines = {name: machine}
        self.cluster = cluster
        self.loop = cluster.loop
        self.cores = cluster.cores[machine]
        self.chance = random.Random(f"{cluster.seed}/{name}/{incarnation}")
        self.alive = True
        self.slow = 1.0  # by how much its link is slower
        self._busy = 0.0
        self._lost = ""  # why the coordinator has no connection to it any more
        self._tell: list[Callable[[str], None]] = []
        self._calls: dict[asyncio.Future[Any], str] = {}  # under way: the phase of each
        self._tasks: set[asyncio.Task[None]] = set()
        self._goes_on = asyncio.Event()
        self._goes_on.set()
        self._arrives = self._returns = 0.0  # when the last message does
        self._in_turn = asyncio.Lock()

    # ------------------------------------------------------------------------------------------ the port

    def post(self, command: Any) -> Coroutine[Any, Any, Any]:
        phase, answer = type(command).__name__, self.loop.create_future()
        answer.add_done_callback(seen)  # whoever asked may be gone
        self.loop.note(f"{self.name}.{self.incarnation} {phase}")
        if self._lost:
            answer.set_exception(Unreachable(self.name, phase, self._lost))
            return self._answered(answer, None, None)
        self._calls[answer] = phase
        seconds = self.cluster.deadlines.seconds(self.role, command)
        timer = self.loop.call_later(seconds, self._expire, answer, seconds)
        carrying: list[asyncio.Task[None]] = []
        self._arrives = self._sent(self._arrives, lambda: carrying.append(self._take(command, answer)))
        return self._answered(answer, timer, carrying)

    async def call(self, command: Any) -> Any:
        return await self.post(command)

    def acknowledge(self, command: Any) -> None:
        """What it has answered it does not keep."""

    async def status(self) -> Status:
        """What the engine says of itself; a stopped process says nothing."""
        if self._lost:
            raise Unreachable(self.name, "Status", self._lost)
        await asyncio.sleep(2 * self._delay())
        if not self._goes_on.is_set() or not self.alive:
            await asyncio.sleep(timeouts.CONTROL_CALL)
            raise Unanswered(self.name, "Status", "did not answer", timeouts.CONTROL_CALL)
        return Status(role=self.role, name=self.name, gauges=self.gauges())

    def when_lost(self, tell: Callable[[str], None]) -> None:
        if self._lost:
            tell(self._lost)
        else:
            self._tell.append(tell)

    def give_up(self, reason: str) -> None:
        self._tell.clear()
        self._lost = self._lost or reason
        calls, self._calls = self._calls, {}
        for answer, phase in calls.items():
            if not answer.done():
                answer.set_exception(Unreachable(self.name, phase, self._lost))

    def lose(self, reason: str) -> None:
        """The coordinator finds that the connection is gone."""
        if not self._lost:
            told = list(self._tell)
            self.give_up(reason)
            for tell in told:
                tell(reason)

    # ------------------------------------------------------------------------------------------ what befalls it

    def kill(self) -> None:
        """It ends at once, whatever it is at."""
        if self.alive:
            self.alive = False
            for task in self._tasks:
                task.cancel()
            self.ended()
            self.loop.call_later(self._delay(), self.lose, "connection lost")

    def stop(self) -> None:
        """As SIGSTOP does. Ranks are pinged."""
        if self._goes_on.is_set():
            self._goes_on.clear()
            self.paused(True)
            self.cluster.observer.stopped(self)
            if self.is_group:
                silence = self.cluster.config.deadlines.silence
                self.loop.call_later(silence, self._pinged, silence)

    def go_on(self) -> None:
        if not self._goes_on.is_set():
            self._goes_on.set()
            self.paused(False)

    def cut(self) -> None:
        """The connection breaks, and the process lives."""
        self.loop.call_later(self._delay(), self.lose, "connection reset")

    @property
    def noticed(self) -> bool:
        """Whether it goes on, or the coordinator does without it."""
        return self._goes_on.is_set() or bool(self._lost) or not self.alive

    def ended(self) -> None:
        """For those who have more than tasks."""

    def paused(self, paused: bool) -> None:
        """For those who have more than tasks."""

    def gauges(self) -> dict[str, float]:
        """As the role's service tells them."""
        return {"busy_seconds_total": self._busy}

    # ------------------------------------------------------------------------------------------ inside

    async def spend(self, seconds: float) -> float:
        """Compute; not while it is stopped. Returns the seconds that it took."""
        began = self.loop.time()
        await self.cores.spend(seconds)
        took = self.loop.time() - began
        self._busy += took
        await self._goes_on.wait()
        return took

    async def in_turn(self, seconds: float) -> None:
        """Compute, one after the other."""
        async with self._in_turn:
            await self.spend(seconds)

    def beside(self, work: Coroutine[Any, Any, None]) -> None:
        """Do `work` beside what it is asked."""
        self._tasks.add(self.loop.create_task(work))

    def fault(self, phase: str, message: str, deadline: float | None = None) -> ServiceFault:
        return ServiceFault(self.name, phase, message, deadline)

    def _delay(self) -> float:
        return self.slow * self.cluster.costs.delay.draw(self.chance)

    def _sent(self, last: float, deliver: Callable[[], Any]) -> float:
        when = max(last + _LEAST, self.loop.time() + self._delay())
        self.loop.call_at(when, deliver)
        return when

    def _take(self, command: Any, answer: asyncio.Future[Any]) -> asyncio.Task[None]:
        task = self.loop.create_task(self._carry_out(command, answer))
        self._tasks.add(task)
        task.add_done_callback(self._carried)
        if not self.alive:
            task.cancel()
        return task

    def _carried(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.loop.fail(error)

    async def _carry_out(self, command: Any, answer: asyncio.Future[Any]) -> None:
        await self._goes_on.wait()
        name = _ASKED.get(type(command)) or snake(type(command).__name__)
        try:
            result, error = await getattr(self, name)(command), None
        except SluiceError as raised:
            result, error = None, raised
        await self._goes_on.wait()

        def deliver() -> None:
            if answer.done() or not self.alive:
                return
            if error is None:
                answer.set_result(result)
            else:
                answer.set_exception(error)

        nbytes = BYTES * sum(result.response_tokens) if isinstance(result, GeneratedGroup) else 0
        self._returns = self._sent(self._returns, lambda: self.cluster.arrive(deliver, nbytes))

    async def _answered(
        self, answer: asyncio.Future[Any], timer: asyncio.TimerHandle | None, carrying: list[asyncio.Task[None]] | None
    ) -> Any:
        try:
            return await answer
        except asyncio.CancelledError:
            if self.withdraws and carrying:
                self._sent(0.0, carrying[0].cancel)
            raise
        finally:
            self._calls.pop(answer, None)
            if timer is not None:
                timer.cancel()

    def _expire(self, answer: asyncio.Future[Any], seconds: float) -> None:
        if answer.done():
            return
        phase = self._calls[answer]
        if self.is_group:
            self.lose(f"{phase}: did not answer")
        else:
            answer.set_exception(Unanswered(self.name, phase, "did not answer", seconds))

    def _pinged(self, silence: float) -> None:
        if not self._goes_on.is_set():
            self.lose(f"no answer to pings for {silence:g} s")
