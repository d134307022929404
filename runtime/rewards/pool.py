"""A pool of worker processes that can be killed: a task that hangs or crashes costs only its own sample.

Each slot of the pool is an asyncio task that owns one worker. It takes a few jobs and sends them as one frame; each job is
settled when its verdict arrives. A worker that exceeds a limit or dies is killed with its process group and replaced. The job
that it worked on gets the error; the jobs behind it return to the front of the queue.
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
    """Return the key of an encoded task. The digest is cryptographic because a model writes the text."""
    return hashlib.blake2b(task, digest_size=DIGEST_BYTES).digest()


class OutcomeCache:
    """Values by the digest of a task, at most `entries`. An entry takes about 200 bytes for a reply of any length.

    Only values are kept: a task that timed out once may succeed later.
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


CAPACITY = 1024  # waiting jobs; beyond this, `submit` waits
CAPACITY_BYTES = 64 << 20  # bytes of their texts; a single longer job is allowed
BATCH = 64  # jobs in one frame at most
BATCH_BYTES = 4 << 20  # bytes of their texts; a single longer job is allowed
BATCH_SECONDS = 0.02  # intended time of a batch: long beside the pipe's latency, short for the jobs behind it
FIRST_PACE = 0.001  # expected seconds of a task before the first has run


class KillablePool:
    """`workers` processes for the rules named `rules`; they start at `start` or at the first task.

    The last `cache_entries` values are kept. Equal tasks that wait at the same time are evaluated once. `variables`: variables
    of this process's environment that the rules get besides those that every program needs. All methods belong to one event
    loop.
    """

    def __init__(
        self, rules: Sequence[str], workers: int, limits: Limits, cache_entries: int = 0, variables: Container[str] = ()
    ):
        self.lost = 0  # workers that were killed at a limit or died
        self._rules = tuple(rules)
        self._workers = workers
        self._limits = limits
        self._variables = variables
        self._cache = OutcomeCache(cache_entries)
        self._pace = FIRST_PACE  # moving average of a task's seconds
        self._jobs: dict[bytes, WorkerTask] = {}  # waiting and running jobs, by key
        self._waiting: deque[WorkerTask] = deque()
        self._waiting_bytes = 0
        self._work = asyncio.Event()  # set when jobs wait
        self._room = asyncio.Event()  # set when the queue is not full, or the pool has ended
        self._slots: list[asyncio.Task[None]] = []
        self._alive: set[WorkerProcess] = set()  # processes that are not reaped
        self._ended: Exception | None = None  # why the pool takes no more tasks

    def start(self) -> None:
        """Start the workers in the background and return at once."""
        if not self._slots:
            self._slots = [asyncio.create_task(self._slot(), name=f"reward-worker-{i}") for i in range(self._workers)]
            for slot in self._slots:
                slot.add_done_callback(self._slot_ended)

    async def submit(self, task: Task) -> asyncio.Future[Verdict]:
        """Return the future of the task's verdict; cancel it if it is no longer needed. Wait while the queue is full.

        This method and the future raise ServiceFault if no worker can be started, Cancelled if the pool is closed.
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
        """Return the outcomes of `tasks` in their order. Raises the errors of `submit`."""
        futures: list[asyncio.Future[Verdict]] = []
        try:
            for task in tasks:
                futures.append(await self.submit(task))  # noqa: PERF401 - if one fails, the futures before it are withdrawn
            return [verdict.outcome for verdict in await asyncio.gather(*futures)]
        finally:
            withdraw(futures)

    async def close(self) -> None:
        """Kill the workers. Running calls of `submit` and `run` raise Cancelled."""
        self._end(Cancelled("the reward pool is closed"))
        for slot in self._slots:
            slot.cancel()
        await asyncio.gather(*self._slots, return_exceptions=True)
        # A slot cancelled while it reaped its worker leaves the worker to this method.
        await asyncio.gather(*(worker.kill() for worker in self._alive))

    def settle(self, job: WorkerTask, verdict: Verdict) -> None:
        """Deliver and cache the verdict, see `PoolCallbacks`."""
        self._pace += (verdict.seconds - self._pace) / BATCH
        if verdict.outcome.value is not None:
            self._cache.put(job.key, verdict.outcome.value)
        self._forget(job)
        job.settle(verdict)

    def take_back(self, jobs: Sequence[WorkerTask]) -> bool:
        """Queue the jobs again for other workers, see `PoolCallbacks`."""
        if self._workers > 1:
            self._requeue(jobs)
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
        """End the pool if a slot fails, e.g. if a worker cannot be killed. Otherwise only `close` ends a slot."""
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
        """Employ one worker after another, forever."""
        while True:
            fault = await self._run_worker()
            if fault is not None:  # report it to the next jobs, then try again
                for job in await self._take():
                    self._forget(job)
                    job.fail(fault)

    async def _run_worker(self) -> ServiceFault | None:
        """Run one worker until it is lost. Return the fault if it did not start."""
        try:
            worker = await self._start_worker()
        except OSError as error:
            return ServiceFault("reward", "start a worker", str(error))
        try:
            await worker.ready()  # the rules are imported, or REWARD_WORKER_START has passed
            while await self._run_batch(worker):  # waits for jobs, then for the verdicts of one batch
                pass
        except ServiceFault as fault:
            return fault
        finally:  # also if the slot is cancelled: no process may stay
            await worker.kill()
            self._alive.discard(worker)
        return None

    async def _start_worker(self) -> WorkerProcess:
        """Start a process. Even if this task is cancelled, the process joins `_alive`, so that `close` reaps it."""
        starting = asyncio.ensure_future(WorkerProcess.start(self._rules, self._limits, self, self._variables))
        try:
            return await asyncio.shield(starting)
        finally:
            self._alive.add(await starting)

    async def _run_batch(self, worker: WorkerProcess) -> bool:
        """Run one batch. Return False if the worker is lost; its current job is settled then, the others are queued again."""
        jobs = await self._take()
        began = time.monotonic()
        done = await worker.work(jobs)
        _trace(worker, jobs, began)
        if done:
            return True
        self.lost += 1
        self._requeue(worker.jobs)
        return False

    def _requeue(self, jobs: Sequence[WorkerTask]) -> None:
        for job in reversed(jobs):
            self._enqueue(job, first=True)

    async def _take(self) -> list[WorkerTask]:
        """Wait for jobs, and take one worker's share of them."""
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
    """Record a span for each rule of a batch, with the total time of its tasks."""
    seconds: dict[str, float] = {}
    for job in jobs:
        seconds[job.rule] = seconds.get(job.rule, 0.0) + job.seconds
    for rule, took in seconds.items():
        end = min(began + took, time.monotonic())  # tasks that another worker took over ran at the same time
        spans.log.add(f"rule {rule.rpartition(':')[2]}", began, end, f"worker {worker.pid}")
        began = end
