"""An event loop with virtual time, whose schedule is drawn from a seed.

Time stands still while anything is ready, and then jumps to the next timer: an hour of waiting costs nothing. What becomes
ready together runs in an order drawn from the seed, as a network and a kernel would mix it; only what one callback scheduled
keeps its order, as asyncio promises. Work for an executor runs in this thread, after a time that the simulation gives. So the
seed alone says what happens, and the same seed gives the same `trace`.

Tasks, futures and handles are asyncio's own, but hashed by a number in place of their address: the order of a set of them
would be another in each process.
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

BEGAN = 1000.0  # what the clock shows at first, seconds: not 0, which may stand for "never"
_MOST_CANCELLED = 100  # timers, before those that are cancelled are dropped together
_LAST_ROUNDS = 10_000  # of callbacks in which what is cancelled has to end


class Stuck(Exception):
    """Nobody can go on: nothing is ready, and no timer is set. The message has every task, and where it waits."""


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
    """What a loop runs in. Here nothing costs time, and nothing goes wrong."""

    def before_round(self, rounds: int) -> None:
        """Called before each round of callbacks, with how many there were. What it raises ends the simulation."""

    def after_round(self) -> None:
        """Called after each. What it raises ends the simulation."""

    def storage_seconds(self) -> float:
        """That the next piece of work for an executor takes."""
        return 0.0

    def check_storage(self) -> None:
        """Raises what keeps such work from being done."""


class SimulatedLoop(asyncio.AbstractEventLoop):
    """`run` is all of a simulation. An exception that nobody took ends it, too."""

    def __init__(self, seed: str, world: SimulatedWorld, began: float = BEGAN):
        self.rounds = 0
        self._random = random.Random(seed)
        self._world = world
        self._time = began
        self._ready: list[tuple[int, asyncio.Handle]] = []  # each with the callback that scheduled it
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._origin = self._created = self._cancelled = 0
        self._work: dict[Any, deque[Callable[[], None]]] = {}  # by executor, which takes one after the other
        self._trace = xxhash.xxh3_64()
        self._failure: BaseException | None = None
        self._closed = False

    # ------------------------------------------------------------------------------------------ what a simulation calls

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """The result of `main`. Raises what it raised, what the world did, and Stuck."""
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
        """Cancel whatever is left and let it clean up, so that nothing is found at the interpreter's end."""
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
            self._closed = True
            self._ready, self._timers, self._work = [], [], {}

    def fail(self, error: BaseException) -> None:
        """End the simulation with `error` after this round; the first counts."""
        self._failure = self._failure or error

    def note(self, what: str) -> None:
        """Enter something that happened into the trace."""
        self._trace.update(f"{self._time!r} {what}\n".encode())

    @property
    def trace(self) -> str:
        """A hash of everything that happened so far, and when."""
        return self._trace.hexdigest()

    def waiting(self) -> str:
        """Every task that is not done, and where it waits."""
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
            raise Stuck(f"nothing is ready and no timer is set; these wait:\n{self.waiting()}")
        self._time = max(self._time, self._timers[0][0])
        while self._timers and self._timers[0][0] <= self._time:
            timer = heapq.heappop(self._timers)[2]
            self._origin += 1
            self._ready.append((self._origin, timer))

    def _run_ready(self) -> None:
        """The callbacks that are ready now, in a drawn order that keeps each origin's own."""
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

    # ------------------------------------------------------------------------------------------ what asyncio calls

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
        task._number = self._created  # it is put into a set while it is made
        task.__init__(coro, loop=self, name=name or f"task-{self._created}")  # type: ignore[misc]
        return task

    def run_in_executor(self, executor: Any, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """Here, after a time: what one executor is given is done in order, what several are given as it comes."""
        future = self.create_future()

        def work() -> None:
            try:
                self._world.check_storage()
                result = function(*args)
            except BaseException as error:  # noqa: BLE001 - it is the caller's, through the future
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
        """A callback raised. What a task raised and nobody took comes here too, but only once the collector finds it: at a
        time that no seed says, so it is left out."""
        if "handle" in context:
            self.fail(context["exception"])

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return not self._closed

    def is_closed(self) -> bool:
        return self._closed

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It is left out when its time comes, or with the others once they are half of all."""
        self._cancelled += 1
        if self._cancelled > _MOST_CANCELLED and 2 * self._cancelled > len(self._timers):
            self._timers = [each for each in self._timers if not each[2].cancelled()]
            heapq.heapify(self._timers)
            self._cancelled = 0

    async def shutdown_asyncgens(self) -> None:
        """None outlives the task that runs it."""
