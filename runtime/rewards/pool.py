"""A pool of worker processes that can be killed: a task that hangs or crashes costs its own sample and nothing else.

Each slot of the pool is one asyncio task that owns one worker: it takes a few jobs, sends them as one frame, and waits for
one outcome after the other, each within the time limit. A worker that overruns it, or dies, is killed with its process group
and replaced; the job at its head gets the error, the jobs behind it go back to the front of the queue.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from runtime.errors import Cancelled, ServiceFault, SluiceError
from runtime.rewards.rules import Outcome
from runtime.rewards.worker import LENGTH, Task, frame

BATCH = 16  # jobs in one frame: enough to hide the pipe's latency
CAPACITY = 1024  # jobs that wait; beyond it `run` itself waits
START_TIMEOUT = 60.0  # from the start of a worker until its rules are imported
REAP_TIMEOUT = 10.0  # from SIGKILL until the process is gone

_decode = msgspec.msgpack.Decoder(Outcome).decode


class _Job:
    """An encoded task and the future of its outcome."""

    __slots__ = ("done", "task")

    def __init__(self, task: Task):
        self.task = msgspec.Raw(msgspec.msgpack.encode(task))  # here, so that a task that cannot be sent fails its caller
        self.done: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

    def settle(self, outcome: Outcome) -> None:
        if not self.done.done():
            self.done.set_result(outcome)

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)

    def withdraw(self) -> None:
        """Nobody waits any more: slots skip the job, and an error that it has is taken as seen."""
        if not self.done.cancel() and not self.done.cancelled():
            self.done.exception()


class _Worker:
    """One process and its two pipes."""

    def __init__(self, process: asyncio.subprocess.Process):
        assert process.stdin is not None and process.stdout is not None
        self._process, self._requests, self._replies = process, process.stdin, process.stdout

    @classmethod
    async def spawn(cls, rules: Sequence[str]) -> _Worker:
        """Start a process that finds modules where this one does. Raises OSError when the system gives none."""
        command = (sys.executable, "-m", "runtime.rewards.worker", str(os.getpid()), *rules)
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            start_new_session=True,  # a group of its own: killed whole, and Ctrl-C on the terminal passes it by
        )
        return cls(process)

    async def ready(self) -> None:
        """Wait until the rules are imported. Raises ServiceFault when they are not within START_TIMEOUT."""
        try:
            await asyncio.wait_for(self._frame(), START_TIMEOUT)
        except asyncio.TimeoutError as error:
            raise ServiceFault("reward", "start a worker", "its rules are still not imported", START_TIMEOUT) from error
        except asyncio.IncompleteReadError as error:
            raise ServiceFault("reward", "start a worker", "it ended early; its standard error says why") from error

    async def send(self, tasks: list[msgspec.Raw]) -> None:
        self._requests.write(frame(msgspec.msgpack.encode(tasks)))
        await self._requests.drain()

    async def receive(self) -> Outcome:
        return _decode(await self._frame())

    async def _frame(self) -> bytes:
        header = await self._replies.readexactly(LENGTH.size)
        return await self._replies.readexactly(LENGTH.unpack(header)[0])

    async def kill(self) -> None:
        """End the process and what it started; returns when it is reaped."""
        self._requests.close()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await asyncio.wait_for(self._process.wait(), REAP_TIMEOUT)


class KillablePool:
    """`workers` processes for the rules named `rules`, started at `start` or at the first `run`.

    `timeout` is the time limit of one task in seconds. All methods belong to one event loop.
    """

    def __init__(self, rules: Sequence[str], workers: int, timeout: float):
        self.timeout = timeout
        self.lost = 0  # workers killed at the time limit or found dead
        self._rules = tuple(rules)
        self._workers = workers
        self._waiting: deque[_Job] = deque()
        self._work = asyncio.Event()  # jobs wait
        self._room = asyncio.Event()  # fewer than CAPACITY do, or the pool has ended
        self._slots: list[asyncio.Task[None]] = []
        self._alive: set[_Worker] = set()  # processes that are not reaped yet
        self._ended: Exception | None = None  # why the pool takes no more tasks

    def start(self) -> None:
        """Start the workers in the background; returns at once."""
        if not self._slots:
            self._slots = [asyncio.create_task(self._slot(), name=f"reward-worker-{i}") for i in range(self._workers)]
            for slot in self._slots:
                slot.add_done_callback(self._slot_ended)

    async def run(self, tasks: Sequence[Task]) -> list[Outcome]:
        """The outcomes of `tasks`, in their order. Waits for room while CAPACITY jobs wait.

        Raises ServiceFault when no worker can be started, Cancelled when the pool is closed.
        """
        self._check()
        self.start()
        jobs = [_Job(task) for task in tasks]
        try:
            for job in jobs:
                while len(self._waiting) >= CAPACITY:
                    self._room.clear()
                    await self._room.wait()
                    self._check()
                self._waiting.append(job)
                self._work.set()
            return await asyncio.gather(*(job.done for job in jobs))
        finally:
            for job in jobs:
                job.withdraw()

    async def close(self) -> None:
        """Kill the workers; `run` calls under way raise Cancelled."""
        self._end(Cancelled("the reward pool is closed"))
        for slot in self._slots:
            slot.cancel()
        await asyncio.gather(*self._slots, return_exceptions=True)
        # A slot that was cancelled while it reaped its worker has left that to this method.
        await asyncio.gather(*(worker.kill() for worker in self._alive))

    def _slot_ended(self, slot: asyncio.Task[None]) -> None:
        """A slot ends by `close` alone. Should one fail (a worker that cannot even be killed), nobody may wait for it."""
        error = None if slot.cancelled() else slot.exception()
        if error is not None:
            self._end(ServiceFault("reward", "keep a worker", f"{type(error).__name__}: {error}"))

    def _end(self, why: Exception) -> None:
        self._ended = self._ended or why
        self._room.set()
        while self._waiting:
            self._waiting.popleft().fail(self._ended)

    def _check(self) -> None:
        if self._ended is not None:
            raise self._ended

    async def _slot(self) -> None:
        """Employ one worker after the other, for ever."""
        while True:
            fault = await self._employ()
            if fault is not None:  # reported to whoever needs a worker next; then tried again
                for job in await self._take():
                    job.fail(fault)

    async def _employ(self) -> ServiceFault | None:
        """Run one worker until it is lost; returns the fault when it did not even start."""
        try:
            worker = await _Worker.spawn(self._rules)
        except OSError as error:
            return ServiceFault("reward", "start a worker", str(error))
        self._alive.add(worker)
        try:
            await worker.ready()
            while await self._feed(worker):
                pass
        except ServiceFault as fault:
            return fault
        finally:
            await worker.kill()
            self._alive.discard(worker)
        return None

    async def _feed(self, worker: _Worker) -> bool:
        """Run one batch. False when the worker is lost: the job that it was at is settled, the rest is queued again."""
        jobs = await self._take()
        done = 0
        try:
            await asyncio.wait_for(worker.send([job.task for job in jobs]), self.timeout)
            for job in jobs:
                self._check()  # before Python 3.12 `wait_for` may swallow the cancellation of a closing pool
                job.settle(await asyncio.wait_for(worker.receive(), self.timeout))
                done += 1
            return True
        except asyncio.TimeoutError:
            reason = "timeout"
        except (ConnectionError, asyncio.IncompleteReadError, msgspec.DecodeError):
            reason = "crash"
        except (asyncio.CancelledError, SluiceError):
            for job in jobs[done:]:
                job.fail(self._ended or Cancelled("the reward pool is closed"))
            raise
        self.lost += 1
        jobs[done].settle(Outcome(error=reason))
        self._waiting.extendleft(reversed(jobs[done + 1 :]))
        self._work.set()
        return False

    async def _take(self) -> list[_Job]:
        """Wait for jobs and take this worker's share of them, BATCH at most."""
        while True:
            self._check()
            while not self._waiting:
                self._work.clear()
                await self._work.wait()
            share = min(BATCH, -(-len(self._waiting) // self._workers))
            taken = [self._waiting.popleft() for _ in range(share)]
            self._room.set()
            jobs = [job for job in taken if not job.done.done()]
            if jobs:
                return jobs
