"""A pool of worker processes that can be killed: a task that hangs or crashes costs its own sample and nothing else.

Each slot of the pool is one asyncio task that owns one worker: it takes a few jobs, sends them as one frame, and each is
settled as its verdict arrives. A worker that overruns a limit, or dies, is killed with its process group and replaced; the job
at its head gets the error, the jobs behind it go back to the front of the queue.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict, deque
from collections.abc import Container, Sequence

from runtime.errors import Cancelled, ServiceFault
from runtime.process import spans
from runtime.rewards.rules import RuleOutcome
from runtime.rewards.worker import Task, Verdict
from runtime.rewards.worker_process import Limits, WorkerProcess, WorkerTask, encoded, withdraw

DIGEST_BYTES = 16


def digest(task: bytes) -> bytes:
    """What stands for an encoded task. Cryptographic, as the text is whatever a model writes."""
    return hashlib.blake2b(task, digest_size=DIGEST_BYTES).digest()


class OutcomeCache:
    """Values by a task's digest, so that an entry takes about 200 bytes however long the reply is; at most `entries`.

    Only values are kept: what ran out of time once may have had a bad moment.
    """

    def __init__(self, entries: int):
        self._most = entries
        self._values: OrderedDict[bytes, bool | float] = OrderedDict()

    def get(self, key: bytes) -> bool | float | None:
        value = self._values.get(key)
        if value is not None:
            self._values.move_to_end(key)
        return value

    def put(self, key: bytes, value: bool | float) -> None:
        if self._most:
            self._values[key] = value
            self._values.move_to_end(key)
            if len(self._values) > self._most:
                self._values.popitem(last=False)

    def __len__(self) -> int:
        return len(self._values)


CAPACITY = 1024  # jobs that wait; beyond it `submit` itself waits
CAPACITY_BYTES = 64 << 20  # and of their texts, unless one alone has more
BATCH = 64  # jobs in one frame at most
BATCH_BYTES = 4 << 20  # and of their texts, unless one alone has more
BATCH_SECONDS = 0.02  # what a batch should take: long beside the pipe's latency, short for those behind it
FIRST_PACE = 0.001  # seconds that a task is expected to take before one was run


class KillablePool:
    """`workers` processes for the rules named `rules`, started at `start` or at the first task.

    The last `cache_entries` values are kept, and equal tasks that wait at the same time are evaluated once. `variables`: what
    the rules get of this process's environment besides what every program needs. All methods belong to one event loop.
    """

    def __init__(
        self, rules: Sequence[str], workers: int, limits: Limits, cache_entries: int = 0, variables: Container[str] = ()
    ):
        self.lost = 0  # workers killed at a limit or found dead
        self._rules = tuple(rules)
        self._workers = workers
        self._limits = limits
        self._variables = variables
        self._cache = OutcomeCache(cache_entries)
        self._pace = FIRST_PACE  # seconds that a task takes, lately
        self._jobs: dict[bytes, WorkerTask] = {}  # by key: those that wait, and those that are being worked on
        self._waiting: deque[WorkerTask] = deque()
        self._waiting_bytes = 0
        self._work = asyncio.Event()  # jobs wait
        self._room = asyncio.Event()  # the queue is not full, or the pool has ended
        self._slots: list[asyncio.Task[None]] = []
        self._alive: set[WorkerProcess] = set()  # processes that are not reaped yet
        self._ended: Exception | None = None  # why the pool takes no more tasks

    def start(self) -> None:
        """Start the workers in the background; returns at once."""
        if not self._slots:
            self._slots = [asyncio.create_task(self._slot(), name=f"reward-worker-{i}") for i in range(self._workers)]
            for slot in self._slots:
                slot.add_done_callback(self._slot_ended)

    async def submit(self, task: Task) -> asyncio.Future[Verdict]:
        """The future of the task's verdict; cancel it when it is no longer wanted. Waits for room while the queue is full.

        Here and from the future: ServiceFault when no worker can be started, Cancelled when the pool is closed.
        """
        self._check()
        self.start()
        message = encoded(task)
        key = digest(message)
        future: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        value = self._cache.get(key)
        if value is not None:
            future.set_result(Verdict(RuleOutcome(value)))
            return future
        while self._full():
            self._room.clear()
            await self._room.wait()
            self._check()
        job = self._jobs.get(key)
        if job is None:
            job = self._jobs[key] = WorkerTask(message, key, task.rule)
            self._enqueue(job)
        job.waiters.append(future)
        return future

    async def run(self, tasks: Sequence[Task]) -> list[RuleOutcome]:
        """The outcomes of `tasks`, in their order. Raises as `submit` does."""
        futures: list[asyncio.Future[Verdict]] = []
        try:
            for task in tasks:
                futures.append(await self.submit(task))  # noqa: PERF401 - those before one that fails must be withdrawn
            return [verdict.outcome for verdict in await asyncio.gather(*futures)]
        finally:
            withdraw(futures)

    async def close(self) -> None:
        """Kill the workers; `submit` and `run` calls under way raise Cancelled."""
        self._end(Cancelled("the reward pool is closed"))
        for slot in self._slots:
            slot.cancel()
        await asyncio.gather(*self._slots, return_exceptions=True)
        # A slot that was cancelled while it reaped its worker has left that to this method.
        await asyncio.gather(*(worker.kill() for worker in self._alive))

    def settle(self, job: WorkerTask, verdict: Verdict) -> None:
        """As `PoolCallbacks` says."""
        self._pace += (verdict.seconds - self._pace) / BATCH
        if verdict.outcome.value is not None:
            self._cache.put(job.key, verdict.outcome.value)
        self._forget(job)
        job.settle(verdict)

    def take_back(self, jobs: Sequence[WorkerTask]) -> bool:
        """As `PoolCallbacks` says."""
        if self._workers > 1:
            self._first(jobs)
        return self._workers > 1

    def _forget(self, job: WorkerTask) -> None:
        if self._jobs.get(job.key) is job:
            del self._jobs[job.key]

    def _full(self) -> bool:
        return len(self._waiting) >= CAPACITY or self._waiting_bytes >= CAPACITY_BYTES

    def _enqueue(self, job: WorkerTask, *, first: bool = False) -> None:
        (self._waiting.appendleft if first else self._waiting.append)(job)
        self._waiting_bytes += len(job.task)
        self._work.set()

    def _slot_ended(self, slot: asyncio.Task[None]) -> None:
        """A slot ends by `close` alone. Should one fail (a worker that cannot even be killed), nobody may wait for it."""
        error = None if slot.cancelled() else slot.exception()
        if error is not None:
            self._end(ServiceFault("reward", "keep a worker", f"{type(error).__name__}: {error}"))

    def _end(self, why: Exception) -> None:
        self._ended = self._ended or why
        self._room.set()
        self._waiting.clear()
        self._waiting_bytes = 0
        for job in self._jobs.values():
            job.fail(self._ended)
        self._jobs.clear()

    def _check(self) -> None:
        if self._ended is not None:
            raise self._ended

    async def _slot(self) -> None:
        """Employ one worker after the other, for ever."""
        while True:
            fault = await self._employ()
            if fault is not None:  # reported to whoever needs a worker next; then tried again
                for job in await self._take():
                    self._forget(job)
                    job.fail(fault)

    async def _employ(self) -> ServiceFault | None:
        """Run one worker until it is lost; returns the fault when it did not even start."""
        try:
            worker = await self._hire()
        except OSError as error:
            return ServiceFault("reward", "start a worker", str(error))
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

    async def _hire(self) -> WorkerProcess:
        """Start a process. Cancelled half-way it would be left behind: it is among `_alive` however this ends."""
        starting = asyncio.ensure_future(WorkerProcess.start(self._rules, self._limits, self, self._variables))
        try:
            return await asyncio.shield(starting)
        finally:
            self._alive.add(await starting)

    async def _feed(self, worker: WorkerProcess) -> bool:
        """Run one batch. False when the worker is lost: the job that it was at is settled, the rest is queued again."""
        jobs = await self._take()
        began = time.monotonic()
        done = await worker.work(jobs)
        _trace(worker, jobs, began)
        if done:
            return True
        self.lost += 1
        self._first(worker.jobs)
        return False

    def _first(self, jobs: Sequence[WorkerTask]) -> None:
        for job in reversed(jobs):
            self._enqueue(job, first=True)

    async def _take(self) -> list[WorkerTask]:
        """Wait for jobs and take one worker's share of them."""
        while True:
            self._check()
            while not self._waiting:
                self._work.clear()
                await self._work.wait()
            share = min(BATCH, int(BATCH_SECONDS / self._pace), -(-len(self._waiting) // self._workers))
            taken: list[WorkerTask] = []
            size = 0
            while self._waiting and len(taken) < max(share, 1):
                job = self._waiting[0]
                if taken and size + len(job.task) > BATCH_BYTES:
                    break
                self._waiting.popleft()
                self._waiting_bytes -= len(job.task)
                if job.unwanted:
                    self._forget(job)
                else:
                    taken.append(job)
                    size += len(job.task)
            self._room.set()
            if taken:
                return taken


def _trace(worker: WorkerProcess, jobs: Sequence[WorkerTask], began: float) -> None:
    """A span for each rule of a batch, as long as its tasks took together."""
    seconds: dict[str, float] = {}
    for job in jobs:
        seconds[job.rule] = seconds.get(job.rule, 0.0) + job.seconds
    for rule, took in seconds.items():
        end = min(began + took, time.monotonic())  # what another worker took over was at the same time
        spans.log.add(f"rule {rule.rpartition(':')[2]}", began, end, f"worker {worker.pid}")
        began = end
