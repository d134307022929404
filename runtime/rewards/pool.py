"""A pool of worker processes that can be killed: a task that hangs or crashes costs only its own sample.

Each slot of the pool is an asyncio task that owns one worker. It takes a few jobs and sends them as one frame; each job is
settled when its verdict arrives. A worker that exceeds a limit or dies is killed with its process group and replaced. The job
that it worked on gets the error; the jobs behind it return to the front of the queue."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import signal
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from typing import cast

import msgspec

from runtime import timeouts
from runtime.errors import Cancelled, ServiceFault
from runtime.process import os_process, spans
from runtime.rewards.rules import RuleOutcome
from runtime.rewards.worker import LENGTH, Limits, Task, Verdict, frame
from sluice import start

_decode = msgspec.msgpack.Decoder(Verdict).decode
_INHERITED = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|LC_\w+|TZ|TMPDIR|VIRTUAL_ENV|PYTHON\w*|LD_LIBRARY_PATH|LD_PRELOAD|"
    rf"\w+_NUM_THREADS|\w+_VISIBLE_DEVICES|{os_process.AGENTS}"
)


def worker_environment(named: Container[str]) -> dict[str, str]:
    """Return the environment for the code of rules: of this process's variables those that programs need in general, and those
    `named`. The rest may hold secrets. Sluice's own are left out, except the mark of left-over processes."""
    wanted = (name for name in os.environ if _INHERITED.fullmatch(name) or (name in named and not name.startswith("SLUICE_")))
    modules = os.pathsep.join(path for path in sys.path if path)
    return {name: os.environ[name] for name in wanted} | {"PYTHONPATH": modules}


def withdraw(futures: Iterable[asyncio.Future[Verdict]]) -> None:
    """Cancel futures that have no waiter any more, and mark their errors as seen."""
    for future in futures:
        if not future.cancel() and not future.cancelled():
            future.exception()


class WorkerTask(msgspec.Struct, eq=False):
    """An encoded task of `rule`, and the futures that wait for its verdict. `seconds`: from the verdict."""

    task: bytes
    key: bytes
    rule: str
    seconds: float = 0.0
    waiters: list[asyncio.Future[Verdict]] = []

    def settle(self, verdict: Verdict) -> None:
        self.seconds = verdict.seconds
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(verdict)

    def fail(self, error: Exception) -> None:
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_exception(error)


def encoded(task: Task) -> bytes:
    """Return the task in msgpack. Unpaired surrogates, which UTF-8 cannot encode, become U+FFFD."""
    try:
        return msgspec.msgpack.encode(task)
    except UnicodeEncodeError:
        text = json.dumps(msgspec.to_builtins(task), ensure_ascii=False)
        return msgspec.msgpack.encode(json.loads(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")))


class WorkerProcess(asyncio.SubprocessProtocol):
    """One process, with the `jobs` of its batch that have no verdict. A task's clock starts at the verdict before it."""

    def __init__(self, employer: KillablePool):
        self._loop = asyncio.get_running_loop()
        self._employer = employer
        self._transport: asyncio.SubprocessTransport
        self._received = bytearray()
        self._news = asyncio.Event()  # set when output arrives, or the process has ended
        self._ended = asyncio.Event()
        self._watch: asyncio.TimerHandle
        self._begun = 0.0  # when the current task began
        self._suspect = False  # the current task's time had run out at the first look
        self._overdue = False  # the process was killed for that
        self._lost = False  # the process takes no further task
        self._offered = self._shared = False  # the jobs behind the current task were offered; others may do them
        self.jobs: deque[WorkerTask] = deque()

    @property
    def pid(self) -> int:
        return self._transport.get_pid()

    async def start(self) -> WorkerProcess:
        """Start the process, with this process's module paths. Raises OSError if the system cannot start one."""
        limits = msgspec.json.encode(self._employer.limits).decode()
        await self._loop.subprocess_exec(
            lambda: self,
            *start.command("runtime.rewards.worker", str(os.getpid()), limits, *self._employer.rules),
            stderr=None,
            env=worker_environment(self._employer.variables),
            start_new_session=True,  # a process group of its own, to kill as a whole; Ctrl-C does not reach it
        )
        return self

    async def ready(self) -> None:
        """Wait for the first message: the rules are imported. Raises ServiceFault after timeouts.REWARD_WORKER_START."""
        seconds = timeouts.REWARD_WORKER_START
        try:
            if await asyncio.wait_for(self._message(), seconds) is None:
                raise ServiceFault("reward", "start a worker", "the worker ended early; see the service's log")
        except TimeoutError as error:
            raise ServiceFault("reward", "start a worker", "the rules are not imported", seconds) from error

    async def work(self, jobs: Sequence[WorkerTask]) -> bool:
        """Send `jobs` and wait for their verdicts. Return False if the worker is lost: `self.jobs` were not begun."""
        self.jobs.extend(jobs)
        if self._ended.is_set():
            return False
        self._received.clear()
        self._offered = self._shared = self._suspect = False
        self._begun = self._loop.time()
        self._check_clock()
        requests = cast("asyncio.WriteTransport", self._transport.get_pipe_transport(0))
        requests.write(frame(msgspec.msgpack.encode([msgspec.Raw(job.task) for job in jobs])))
        try:
            while self.jobs and await self._verdict():  # waits for the verdict of the current task
                pass
        finally:
            self._watch.cancel()
        if self._lost and self._shared:
            self.jobs.clear()
        return not self._lost

    async def kill(self) -> None:
        """Kill the process group, and return when the process is reaped. Raises asyncio.TimeoutError if it is not."""
        if not self._ended.is_set():
            self._kill_group()
        await asyncio.wait_for(self._ended.wait(), timeouts.REWARD_WORKER_REAP)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.SubprocessTransport", transport)  # uvloop's class is not a subclass

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self._received += data
        self._news.set()

    def process_exited(self) -> None:
        self._kill_group()  # also kills child processes, which hold the pipe open
        self._loop.call_later(timeouts.REWARD_LAST_OUTPUT, self.connection_lost)

    def connection_lost(self, error: Exception | None = None) -> None:
        if not self._ended.is_set():
            self._ended.set()
            self._news.set()
            self._transport.close()

    async def _message(self) -> bytes | None:
        """Return the next message of the process; None once it has ended."""
        while True:
            end = LENGTH.size + int.from_bytes(self._received[: LENGTH.size], "little")
            if len(self._received) >= end:
                message = bytes(self._received[LENGTH.size : end])
                del self._received[:end]
                return message
            if self._ended.is_set():
                return None
            self._news.clear()
            await self._news.wait()

    async def _verdict(self) -> bool:
        """Settle the current task by its verdict, or as failed. Return False if the worker takes no further task."""
        message = await self._message()
        try:
            verdict = None if message is None else _decode(message)
        except msgspec.DecodeError:  # a rule writes to the pipe: trust no further output
            verdict = None
        if verdict is None:
            await self.kill()
            overdue = self._overdue or self._transport.get_returncode() == -signal.SIGPROF
            failed = RuleOutcome(error="timeout" if overdue else "crash")
            verdict = Verdict(failed, self._loop.time() - self._begun)
            self._lost = True
        self._lost = self._lost or verdict.outcome.error == "memory"  # do not trust the process with another task
        self._employer.settle(self.jobs.popleft(), verdict)
        self._begun, self._suspect = self._loop.time(), False  # of the next task
        return not self._lost

    def _check_clock(self) -> None:
        """Watch a slow task: offer its batch to other workers; at the second look beyond the limit, kill this worker."""
        taken = self._loop.time() - self._begun
        left = self._employer.limits.seconds - taken
        patience = timeouts.REWARD_TASK_PATIENCE - taken
        if patience <= 0 and not self._offered:
            self._offered = True
            self._shared = self._employer.take_back(list(self.jobs)[1:])
        if left <= 0 and self._suspect:
            self._overdue = True
            self._kill_group()
            return
        self._suspect = left <= 0
        wait = timeouts.REWARD_SECOND_LOOK if self._suspect else min(left, patience) if patience > 0 else left
        self._watch = self._loop.call_later(wait, self._check_clock)

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._transport.get_pid(), signal.SIGKILL)


BATCH = 64  # jobs in one frame at most
BATCH_BYTES = 4 << 20  # bytes of their texts; a single longer job is allowed
BATCH_SECONDS = 0.02  # intended time of a batch: long beside the pipe's latency, short for the jobs behind it
FIRST_PACE = 0.001  # expected seconds of a task before the first has run


class KillablePool:
    """`workers` processes for `rules`; they start at `start` or at the first task. The last `cache_entries` values are kept.
    Equal tasks that wait are evaluated once. `variables`: as in `worker_environment`. All methods belong to one event loop."""

    def __init__(
        self, rules: Sequence[str], workers: int, limits: Limits, cache_entries: int = 0, variables: Container[str] = ()
    ):
        self.lost = 0  # workers that were killed at a limit or died
        self.rules = tuple(rules)
        self._workers = workers
        self.limits = limits
        self.variables = variables
        self._cache: OrderedDict[bytes, bool | float] = OrderedDict()  # values by the digest of a task; the oldest first
        self._cache_entries = cache_entries
        self._pace = FIRST_PACE  # moving average of a task's seconds
        self._jobs: dict[bytes, WorkerTask] = {}  # waiting and running jobs, by key
        self._waiting: deque[WorkerTask] = deque()
        self._work = asyncio.Event()  # set when jobs wait
        self._slots: list[asyncio.Task[None]] = []
        self._alive: set[WorkerProcess] = set()  # processes that are not reaped
        self._ended: Exception | None = None  # why the pool takes no more tasks

    def start(self) -> None:
        """Start the workers in the background and return at once."""
        if not self._slots:
            self._slots = [asyncio.create_task(self._slot(), name=f"reward-worker-{i}") for i in range(self._workers)]
            for slot in self._slots:
                slot.add_done_callback(self._slot_ended)

    def submit(self, task: Task) -> asyncio.Future[Verdict]:
        """Return the future of the task's verdict; cancel it if it is no longer needed. Callers bound how many wait.

        This method and the future raise ServiceFault if no worker can be started, Cancelled if the pool is closed."""
        if self._ended is not None:
            raise self._ended
        self.start()
        message = encoded(task)
        key = hashlib.blake2b(message, digest_size=16).digest()  # cryptographic, because a model writes the text
        future: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        value = self._cache.get(key)
        if value is not None:
            self._cache.move_to_end(key)
            future.set_result(Verdict(RuleOutcome(value)))
            return future
        job = self._jobs.get(key)
        if job is None:
            job = self._jobs[key] = WorkerTask(message, key, task.rule)
            self._waiting.append(job)
            self._work.set()
        job.waiters.append(future)
        return future

    async def run(self, tasks: Sequence[Task]) -> list[RuleOutcome]:
        """Return the outcomes of `tasks` in their order. Raises the errors of `submit`."""
        futures = [self.submit(task) for task in tasks]
        try:
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
        """Deliver and cache the verdict of a job. A job that was taken back may be settled twice; the first verdict counts."""
        self._pace += (verdict.seconds - self._pace) / BATCH
        if verdict.outcome.value is not None:  # a task without a value, e.g. after a timeout, may succeed later
            self._cache[job.key] = verdict.outcome.value
            if len(self._cache) > self._cache_entries:
                self._cache.popitem(last=False)
        self._forget(job)
        job.settle(verdict)

    def take_back(self, jobs: Sequence[WorkerTask]) -> bool:
        """Queue jobs of a busy worker again for other workers. Return whether there are others. Called once per batch."""
        if self._workers > 1:
            self._requeue(jobs)
        return self._workers > 1

    def _forget(self, job: WorkerTask) -> None:
        if self._jobs.get(job.key) is job:
            del self._jobs[job.key]

    def _slot_ended(self, slot: asyncio.Task[None]) -> None:
        """End the pool if a slot fails, e.g. if a worker cannot be killed. Otherwise only `close` ends a slot."""
        error = None if slot.cancelled() else slot.exception()
        if error is not None:
            self._end(ServiceFault("reward", "keep a worker", f"{type(error).__name__}: {error}"))

    def _end(self, why: Exception) -> None:
        self._ended = self._ended or why
        self._waiting.clear()
        for job in self._jobs.values():
            job.fail(self._ended)
        self._jobs.clear()

    async def _slot(self) -> None:
        """Employ one worker after another, forever. If one does not start, report it to the next jobs, then try again."""
        while True:
            try:
                await self._run_worker()
            except ServiceFault as fault:
                for job in await self._take():
                    self._forget(job)
                    job.fail(fault)

    async def _run_worker(self) -> None:
        """Run one worker until it is lost, then queue what it did not begin. Raises ServiceFault if it does not start."""
        try:
            worker = await self._start_worker()
        except OSError as error:
            raise ServiceFault("reward", "start a worker", str(error)) from error
        try:
            await worker.ready()  # the rules are imported, or REWARD_WORKER_START has passed
            done = True
            while done:
                jobs = await self._take()  # jobs wait
                began = time.monotonic()
                done = await worker.work(jobs)  # one batch has its verdicts
                _trace(worker, jobs, began)
            self.lost += 1
            self._requeue(worker.jobs)
        finally:  # also if the slot is cancelled: no process may stay
            await worker.kill()
            self._alive.discard(worker)

    async def _start_worker(self) -> WorkerProcess:
        """Start a process. Even if this task is cancelled, the process joins `_alive`, so that `close` reaps it."""
        starting = asyncio.ensure_future(WorkerProcess(self).start())
        try:
            return await asyncio.shield(starting)
        finally:
            self._alive.add(await starting)

    def _requeue(self, jobs: Iterable[WorkerTask]) -> None:
        self._waiting.extendleft(reversed([*jobs]))
        self._work.set()

    async def _take(self) -> list[WorkerTask]:
        """Wait for jobs, and take one worker's share of them."""
        taken: list[WorkerTask] = []
        while not taken:
            if self._ended is not None:  # `asyncio.wait_for` may have swallowed the cancellation of this slot
                raise self._ended
            while not self._waiting:
                self._work.clear()
                await self._work.wait()
            share = min(BATCH, int(BATCH_SECONDS / self._pace), -(-len(self._waiting) // self._workers))
            room = BATCH_BYTES
            while self._waiting and len(taken) < max(share, 1) and (not taken or len(self._waiting[0].task) <= room):
                job = self._waiting.popleft()
                if all(waiter.done() for waiter in job.waiters):  # none waits any more
                    self._forget(job)
                else:
                    taken.append(job)
                    room -= len(job.task)
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
