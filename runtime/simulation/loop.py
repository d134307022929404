"""An event loop with virtual time, whose schedule is drawn from a seed.

Time stands still while any callback is ready, and then jumps to the next timer: an hour of waiting costs nothing. Callbacks
that become ready together run in an order drawn from the seed, as if mixed by a network and a kernel. Callbacks that one
callback scheduled keep their order, as asyncio promises. Work for an executor runs in this thread, after a simulated time. So
the seed alone determines the run, and the same seed gives the same `trace`.

Tasks and futures are asyncio's own, but hashed by a number: by their addresses, a set's order would differ in each process.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import Context
from typing import Any, TypeVar

import xxhash

T = TypeVar("T")

BEGAN = 1000.0  # the clock's start in seconds: not 0, which may mean "never"
_MOST_CANCELLED = 100  # cancelled timers to keep before all cancelled timers are dropped together
_LAST_ROUNDS = 10_000  # of callbacks, in which cancelled tasks must end


class Stuck(Exception):
    """No task can go on: no callback is ready, and no timer is set. The message lists every task and its position."""


class Crash(BaseException):
    """Ends a simulation between two callbacks, as a SIGKILL of the process would."""


class _Counted:
    """Hashed by the order of creation within one loop."""

    _number = 0

    def __hash__(self) -> int:
        return self._number


class _Future(_Counted, asyncio.Future):  # type: ignore[type-arg]
    pass


class _Task(_Counted, asyncio.Task):  # type: ignore[type-arg]
    pass


class SimulatedWorld:
    """The environment of a loop. In this base class no work costs time, and no work fails."""

    def before_round(self, rounds: int) -> None:
        """Prepare a round of callbacks, after `rounds` rounds. Any exception ends the simulation."""

    def after_round(self) -> None:
        """Finish a round of callbacks. Any exception ends the simulation."""

    def storage_seconds(self) -> float:
        """Return the seconds of the next work for an executor."""
        return 0.0

    def check_storage(self) -> None:
        """Check that work for an executor can be done. Any exception becomes the error of that work."""


class SimulatedLoop(asyncio.AbstractEventLoop):
    """The loop of one simulation, by `run`. An exception in a callback ends the simulation too."""

    def __init__(self, seed: str, world: SimulatedWorld, began: float = BEGAN):
        self.rounds = 0
        self._random = random.Random(seed)
        self._world = world
        self._time = began
        self._ready: list[tuple[int, asyncio.Handle]] = []  # each with the number of the scheduling callback
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._origin = self._created = self._cancelled = 0
        self._work: dict[Any, deque[Callable[[], None]]] = {}  # by executor, in order
        self._trace = xxhash.xxh3_64()
        self._failure: BaseException | None = None

    # ------------------------------------------------------------------------------------------ called by a simulation

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run `main`, and return its result. Raises the exceptions of `main` and of the world, and Stuck."""
        around = asyncio._get_running_loop()  # another loop may have called this
        asyncio._set_running_loop(self)
        try:
            task = self.create_task(main)
            while not task.done():
                self._world.before_round(self.rounds)
                self._round()
            return task.result()
        finally:
            asyncio._set_running_loop(around)

    def end(self) -> None:
        """Cancel the remaining tasks and let them clean up, so that none is left at the interpreter's end."""
        around = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        cancelled: set[asyncio.Task[Any]] = set()
        try:
            for _ in range(_LAST_ROUNDS):
                left = [task for task in asyncio.all_tasks(self) if not task.done()]
                for task in sorted(set(left) - cancelled, key=hash):
                    task.cancel()
                cancelled.update(left)
                if not self._ready and left:
                    with suppress(Stuck):
                        self._jump()
                if not self._ready:
                    break
                self._run_ready()
        finally:
            asyncio._set_running_loop(around)
            self._ready, self._timers, self._work = [], [], {}

    def fail(self, error: BaseException) -> None:
        """End the simulation with `error` after this round. The first error counts."""
        self._failure = self._failure or error

    def note(self, what: str) -> None:
        self._trace.update(f"{self._time!r} {what}\n".encode())

    @property
    def trace(self) -> str:
        """A hash of all events so far with their times."""
        return self._trace.hexdigest()

    def waiting(self) -> str:
        """List every task that is not done, with its position."""
        lines = []
        for task in sorted(asyncio.all_tasks(self), key=hash):
            frames = task.get_stack(limit=1)
            where = f"{frames[0].f_code.co_filename}:{frames[0].f_lineno}" if frames else "not begun"
            lines.append(f"{getattr(task.get_coro(), '__qualname__', task.get_name())} at {where}")
        return "\n".join(lines)

    # ------------------------------------------------------------------------------------------ one round

    def _round(self) -> None:
        if not self._ready:
            self._jump()
        self.rounds += 1
        self._trace.update(b"%d %d\n" % (len(self._ready), hash(self._time)))
        self._run_ready()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        self._world.after_round()

    def _jump(self) -> None:
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
            self._cancelled = max(0, self._cancelled - 1)
        if not self._timers:
            raise Stuck(f"no callback is ready and no timer is set; waiting tasks:\n{self.waiting()}")
        self._time = max(self._time, self._timers[0][0])
        while self._timers and self._timers[0][0] <= self._time:
            timer = heapq.heappop(self._timers)[2]
            self._origin += 1
            self._ready.append((self._origin, timer))

    def _run_ready(self) -> None:
        """Run the ready callbacks in a random order that keeps the order of each origin."""
        ready, self._ready = self._ready, []
        if len(ready) > 1:
            by_origin: dict[int, deque[asyncio.Handle]] = {}
            for origin, handle in ready:
                by_origin.setdefault(origin, deque()).append(handle)
            order = [origin for origin, _ in ready]
            if len(by_origin) > 1:
                self._random.shuffle(order)
            handles = [by_origin[origin].popleft() for origin in order]
        else:
            handles = [handle for _, handle in ready]
        first = self._origin
        for number, handle in enumerate(handles, start=1):
            self._origin = first + number
            if not handle.cancelled():
                handle._run()

    # ------------------------------------------------------------------------------------------ called by asyncio

    def time(self) -> float:
        return self._time

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> asyncio.Handle:  # type: ignore[override]
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append((self._origin, handle))
        return handle

    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> Any:  # type: ignore[override]
        return self.call_at(self._time + max(0.0, delay), callback, *args, context=context)

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> Any:  # type: ignore[override]
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._created += 1
        heapq.heappush(self._timers, (when, self._created, timer))
        return timer

    def create_future(self) -> asyncio.Future[Any]:
        future = _Future(loop=self)
        self._created += 1
        future._number = self._created
        return future

    def create_task(self, coro: Any, *, name: str | None = None, context: Context | None = None) -> asyncio.Task[Any]:  # type: ignore[override]
        self._created += 1
        task = _Task.__new__(_Task)
        task._number = self._created  # set first: the constructor puts the task into a set
        task.__init__(coro, loop=self, name=name or f"task-{self._created}")  # type: ignore[misc]
        return task

    def run_in_executor(self, executor: Any, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """Run `function` in this thread after a simulated time. Work of one executor keeps its order."""
        future = self.create_future()

        def work() -> None:
            try:
                self._world.check_storage()
                result = function(*args)
            except BaseException as error:  # noqa: BLE001 - the caller gets it through the future
                if not future.cancelled():
                    future.set_exception(error)
            else:
                if not future.cancelled():
                    future.set_result(result)

        if executor is None:
            self.call_later(self._world.storage_seconds(), work)
        else:
            queued = self._work.setdefault(executor, deque())
            queued.append(work)
            self.call_later(self._world.storage_seconds(), lambda: queued.popleft()())
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Fail on an exception in a callback. Unretrieved task exceptions are reported at times that no seed determines."""
        if "handle" in context:
            self.fail(context["exception"])

    def get_debug(self) -> bool:
        return False

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Count a cancelled timer. It is dropped when its time comes, or once half of all timers are cancelled."""
        self._cancelled += 1
        if self._cancelled > _MOST_CANCELLED and 2 * self._cancelled > len(self._timers):
            self._timers = [each for each in self._timers if not each[2].cancelled()]
            heapq.heapify(self._timers)
            self._cancelled = 0
