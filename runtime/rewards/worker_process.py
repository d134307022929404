"""The parent's end of a worker process: it sends batches of jobs, settles each when its verdict arrives, and kills."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections import deque
from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol, cast

import msgspec

from runtime import timeouts
from runtime.config.sandbox import Sandbox
from runtime.errors import ServiceFault
from runtime.process import os_process
from runtime.rewards.rules import RuleOutcome
from runtime.rewards.worker import LENGTH, Task, Verdict, frame
from sluice import start

_decode = msgspec.msgpack.Decoder(Verdict).decode
_INHERITED = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|LC_\w+|TZ|TMPDIR|VIRTUAL_ENV|PYTHON\w*|LD_LIBRARY_PATH|LD_PRELOAD|"
    rf"\w+_NUM_THREADS|\w+_VISIBLE_DEVICES|{os_process.AGENTS}"
)


def worker_environment(named: Container[str]) -> dict[str, str]:
    """Return the part of this process's environment that the code of rules gets; the rest may hold secrets. It has variables
    that programs need in general, and the variables `named`. Sluice's own are left out, except the mark of left-over
    processes."""
    wanted = (name for name in os.environ if _INHERITED.fullmatch(name) or (name in named and not name.startswith("SLUICE_")))
    modules = os.pathsep.join(path for path in sys.path if path)
    return {name: os.environ[name] for name in wanted} | {"PYTHONPATH": modules}


def withdraw(futures: Iterable[asyncio.Future[Verdict]]) -> None:
    """Cancel futures that have no waiter any more, and mark their errors as seen."""
    for future in futures:
        if not future.cancel() and not future.cancelled():
            future.exception()


class Limits(msgspec.Struct, frozen=True):
    """Limits of one task: `seconds` by the clock, `cpu_seconds` of its worker. `memory_bytes`: that a worker may allocate in
    all. `sandbox`: of the programs that the worker runs."""

    seconds: float
    cpu_seconds: float
    memory_bytes: int
    sandbox: Sandbox = Sandbox()


class WorkerTask:
    """An encoded task of `rule`, and the futures that wait for its verdict. `seconds`: from the verdict."""

    __slots__ = ("key", "rule", "seconds", "task", "waiters")

    def __init__(self, task: bytes, key: bytes, rule: str):
        self.task = task
        self.key = key
        self.rule = rule
        self.seconds = 0.0
        self.waiters: list[asyncio.Future[Verdict]] = []

    @property
    def unwanted(self) -> bool:
        """True if no future waits any more."""
        return all(waiter.done() for waiter in self.waiters)

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
        return msgspec.msgpack.encode(_without_surrogates(msgspec.to_builtins(task)))


def _without_surrogates(value: Any) -> Any:
    """Replace unpaired surrogates in a value of lists, mappings and texts."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(each) for key, each in value.items()}
    return [_without_surrogates(each) for each in value] if isinstance(value, list | tuple) else value


class PoolCallbacks(Protocol):
    """The pool, as a worker sees it."""

    def settle(self, job: WorkerTask, verdict: Verdict) -> None:
        """Settle a finished or failed job. A job that was taken back may be settled twice; the first verdict counts."""

    def take_back(self, jobs: Sequence[WorkerTask]) -> bool:
        """Offer jobs to other workers while this worker is busy. Return whether others may do them. Called once per batch."""


class WorkerProcess(asyncio.SubprocessProtocol):
    """One process. `jobs`: the jobs of its batch without a verdict, in order.

    The clock of a task starts when the verdict before it arrives, so no task is charged for earlier tasks of its batch.
    """

    def __init__(self, limits: Limits, employer: PoolCallbacks):
        self._loop = asyncio.get_running_loop()
        self._limits = limits
        self._employer = employer
        self._transport: asyncio.SubprocessTransport
        self._received = bytearray()
        self._imported: asyncio.Future[None] = self._loop.create_future()  # fails if the process ends before
        self._done: asyncio.Future[None] = self._loop.create_future()  # the batch is answered, or the process has ended
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._watch: asyncio.TimerHandle | None = None
        self._begun = 0.0  # when the current task began
        self._suspect = False  # the current task's time had run out at the first look
        self._overdue = False  # the process was killed for that
        self._spent = False  # the process was killed between two tasks
        self._ignored = False  # the process was killed; ignore what it still writes
        self._offered = self._shared = False  # the jobs behind the current task were offered; others may do them
        self.jobs: deque[WorkerTask] = deque()

    @property
    def pid(self) -> int:
        return self._transport.get_pid()

    @classmethod
    async def start(
        cls, rules: Sequence[str], limits: Limits, employer: PoolCallbacks, variables: Container[str] = ()
    ) -> WorkerProcess:
        """Start a process with this process's module paths and the `variables` of its environment. Raises OSError if the system
        cannot start one."""
        _, worker = await asyncio.get_running_loop().subprocess_exec(
            lambda: cls(limits, employer),
            *start.command("runtime.rewards.worker", str(os.getpid())),
            *(repr(limits.cpu_seconds), str(limits.memory_bytes), msgspec.json.encode(limits.sandbox).decode(), *rules),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=None,
            env=worker_environment(variables),
            start_new_session=True,  # a process group of its own, to kill as a whole; Ctrl-C does not reach it
        )
        return worker

    async def ready(self) -> None:
        """Wait until the rules are imported. Raises ServiceFault after timeouts.REWARD_WORKER_START."""
        try:
            await asyncio.wait_for(self._imported, timeouts.REWARD_WORKER_START)
        except TimeoutError as error:
            raise ServiceFault(
                "reward", "start a worker", "the rules are not imported", timeouts.REWARD_WORKER_START
            ) from error

    async def work(self, jobs: Sequence[WorkerTask]) -> bool:
        """Send `jobs`, and wait until each has its verdict.

        Return False if the worker is lost. Its current task has failed then, and `self.jobs` are the tasks that it did not
        begin.
        """
        self.jobs.extend(jobs)
        if self._ended.done():
            return False
        self._done = self._loop.create_future()
        self._offered = self._shared = False
        self._start_clock()
        self._check_clock()
        requests = cast("asyncio.WriteTransport", self._transport.get_pipe_transport(0))
        requests.write(frame(msgspec.msgpack.encode([msgspec.Raw(job.task) for job in jobs])))
        await self._done
        if not self._ended.done():
            return True
        if self.jobs and not self._spent:
            overdue = self._overdue or self._transport.get_returncode() == -signal.SIGPROF
            reason = "timeout" if overdue else "crash"
            self._employer.settle(self.jobs.popleft(), Verdict(RuleOutcome(error=reason), self._loop.time() - self._begun))
        if self._shared:
            self.jobs.clear()
        return False

    async def kill(self) -> None:
        """Kill the process group, and return when the process is reaped. Raises asyncio.TimeoutError if it is not."""
        if not self._ended.done():
            self._kill_group()
        await asyncio.wait_for(asyncio.shield(self._ended), timeouts.REWARD_WORKER_REAP)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.SubprocessTransport", transport)  # uvloop's class is not a subclass

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self._received += data
        start = 0
        while len(self._received) >= start + LENGTH.size:
            (size,) = LENGTH.unpack_from(self._received, start)
            end = start + LENGTH.size + size
            if len(self._received) < end:
                break
            self._message(bytes(self._received[start + LENGTH.size : end]))
            start = end
        del self._received[:start]

    def process_exited(self) -> None:
        self._kill_group()  # also kills child processes, which hold the pipe open
        self._loop.call_later(timeouts.REWARD_LAST_OUTPUT, self._on_end)

    def connection_lost(self, error: Exception | None) -> None:
        self._on_end()

    def _message(self, message: bytes) -> None:
        if not message:
            if not self._imported.done():
                self._imported.set_result(None)
            return
        if self._ignored or not self.jobs:
            return
        try:
            verdict = _decode(message)
        except msgspec.DecodeError:  # a rule writes to the pipe: trust no further output
            self._ignored = True
            self._kill_group()
            return
        self._employer.settle(self.jobs.popleft(), verdict)
        self._start_clock()
        if verdict.outcome.error == "memory":  # do not trust the process with another task
            self._spent = self._ignored = True
            self._kill_group()
        elif not self.jobs:
            self._finish_batch()

    def _start_clock(self) -> None:
        """Start the clock of a task."""
        self._begun = self._loop.time()
        self._suspect = False

    def _check_clock(self) -> None:
        """Watch a slow task: offer its batch to other workers; at the second look beyond the limit, kill this worker."""
        taken = self._loop.time() - self._begun
        left = self._limits.seconds - taken
        patient = taken < timeouts.REWARD_TASK_PATIENCE
        if not patient and not self._offered:
            self._offered = True
            self._shared = self._employer.take_back(list(self.jobs)[1:])
        if left <= 0 and self._suspect:
            self._overdue = True
            self._kill_group()
            return
        self._suspect = left <= 0
        wait = (
            timeouts.REWARD_SECOND_LOOK
            if self._suspect
            else min(left, timeouts.REWARD_TASK_PATIENCE - taken)
            if patient
            else left
        )
        self._watch = self._loop.call_later(wait, self._check_clock)

    def _finish_batch(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if not self._done.done():
            self._done.set_result(None)

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._transport.get_pid(), signal.SIGKILL)

    def _on_end(self) -> None:
        if self._ended.done():
            return
        self._ended.set_result(None)
        self._finish_batch()
        if not self._imported.done():
            self._imported.set_exception(
                ServiceFault("reward", "start a worker", "the worker ended early; see the service's log")
            )
            self._imported.exception()  # marks it as seen if `ready` does not wait
        self._transport.close()
