"""The parent's end of one worker process: it hands over batches of jobs, settles each as its verdict arrives, and kills."""

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
    """What the code of rules gets of this process's environment, in which there may be secrets: what programs in general need,
    and the variables `named`, but none of Sluice's own, save the one by which what it leaves behind is found."""
    wanted = (name for name in os.environ if _INHERITED.fullmatch(name) or (name in named and not name.startswith("SLUICE_")))
    modules = os.pathsep.join(path for path in sys.path if path)
    return {name: os.environ[name] for name in wanted} | {"PYTHONPATH": modules}


def withdraw(futures: Iterable[asyncio.Future[Verdict]]) -> None:
    """Nobody waits for these any more; an error that one has is taken as seen."""
    for future in futures:
        if not future.cancel() and not future.cancelled():
            future.exception()


class Limits(msgspec.Struct, frozen=True):
    """What one task may take: `seconds` by the clock, `cpu_seconds` of its worker; and what a worker may allocate in all.
    `sandbox`: of the programs that it runs."""

    seconds: float
    cpu_seconds: float
    memory_bytes: int
    sandbox: Sandbox = Sandbox()


class WorkerTask:
    """An encoded task of `rule`, and the futures of whoever waits for its verdict. `seconds`: what that says, once there."""

    __slots__ = ("key", "rule", "seconds", "task", "waiters")

    def __init__(self, task: bytes, key: bytes, rule: str):
        self.task = task
        self.key = key
        self.rule = rule
        self.seconds = 0.0
        self.waiters: list[asyncio.Future[Verdict]] = []

    @property
    def unwanted(self) -> bool:
        """Nobody waits any more."""
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
    """The task in msgpack. Half of a surrogate pair, which UTF-8 cannot carry, becomes U+FFFD."""
    try:
        return msgspec.msgpack.encode(task)
    except UnicodeEncodeError:
        return msgspec.msgpack.encode(_whole(msgspec.to_builtins(task)))


def _whole(value: Any) -> Any:
    """`value` of lists, mappings and texts, with whole characters alone."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_whole(key): _whole(each) for key, each in value.items()}
    return [_whole(each) for each in value] if isinstance(value, list | tuple) else value


class PoolCallbacks(Protocol):
    """Whom a worker reports to."""

    def settle(self, job: WorkerTask, verdict: Verdict) -> None:
        """The job is done, or has failed. A job that was taken back may be settled twice; the first verdict counts."""

    def take_back(self, jobs: Sequence[WorkerTask]) -> bool:
        """The worker is busy with another task: may others do these, unless it gets to them first? Called once a batch."""


class WorkerProcess(asyncio.SubprocessProtocol):
    """One process. `jobs` are those of its batch that have no verdict yet, in the order in which it takes them.

    The clock of a task starts when its predecessor's verdict arrived, so no task pays for those before it in its batch.
    """

    def __init__(self, limits: Limits, employer: PoolCallbacks):
        self._loop = asyncio.get_running_loop()
        self._limits = limits
        self._employer = employer
        self._transport: asyncio.SubprocessTransport
        self._received = bytearray()
        self._imported: asyncio.Future[None] = self._loop.create_future()  # fails when the process ends before
        self._done: asyncio.Future[None] = self._loop.create_future()  # the batch is answered, or the process has ended
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._watch: asyncio.TimerHandle | None = None
        self._begun = 0.0  # when the task that it is at did
        self._suspect = False  # that task's time has run out, at the first look
        self._overdue = False  # it was killed for that
        self._spent = False  # it was killed between two tasks
        self._unheard = False  # it was killed, and whatever it still says does not count
        self._offered = self._shared = False  # what is behind that task may be done by others
        self.jobs: deque[WorkerTask] = deque()

    @property
    def pid(self) -> int:
        return self._transport.get_pid()

    @classmethod
    async def start(
        cls, rules: Sequence[str], limits: Limits, employer: PoolCallbacks, variables: Container[str] = ()
    ) -> WorkerProcess:
        """Start a process that finds modules where this one does, with `variables` of its environment. Raises OSError when the
        system gives none."""
        _, worker = await asyncio.get_running_loop().subprocess_exec(
            lambda: cls(limits, employer),
            *start.command("runtime.rewards.worker", str(os.getpid())),
            *(repr(limits.cpu_seconds), str(limits.memory_bytes), msgspec.json.encode(limits.sandbox).decode(), *rules),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=None,
            env=worker_environment(variables),
            start_new_session=True,  # a group of its own: killed whole, and Ctrl-C on the terminal passes it by
        )
        return worker

    async def ready(self) -> None:
        """Wait until the rules are imported. Raises ServiceFault when they are not within timeouts.REWARD_WORKER_START."""
        try:
            await asyncio.wait_for(self._imported, timeouts.REWARD_WORKER_START)
        except TimeoutError as error:
            raise ServiceFault(
                "reward", "start a worker", "its rules are still not imported", timeouts.REWARD_WORKER_START
            ) from error

    async def work(self, jobs: Sequence[WorkerTask]) -> bool:
        """Hand over `jobs`, and wait until each has its verdict.

        False when the worker is lost: the task that it was at has failed, and `self.jobs` are those that it did not come to.
        """
        self.jobs.extend(jobs)
        if self._ended.done():
            return False
        self._done = self._loop.create_future()
        self._offered = self._shared = False
        self._begin()
        self._look()
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
        """End the process and what it started; returns when it is reaped. Raises asyncio.TimeoutError when it is not."""
        if not self._ended.done():
            self._kill_group()
        await asyncio.wait_for(asyncio.shield(self._ended), timeouts.REWARD_WORKER_REAP)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.SubprocessTransport", transport)  # uvloop's is no subclass of it

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
        self._kill_group()  # what it has started goes with it, and with that the last hold on the pipe
        self._loop.call_later(timeouts.REWARD_LAST_OUTPUT, self._end)

    def connection_lost(self, error: Exception | None) -> None:
        self._end()

    def _message(self, message: bytes) -> None:
        if not message:
            if not self._imported.done():
                self._imported.set_result(None)
            return
        if self._unheard or not self.jobs:
            return
        try:
            verdict = _decode(message)
        except msgspec.DecodeError:  # a rule has got hold of the pipe: nothing more that comes out of it is to be believed
            self._unheard = True
            self._kill_group()
            return
        self._employer.settle(self.jobs.popleft(), verdict)
        self._begin()
        if verdict.outcome.error == "memory":  # what is left of the process is not to be trusted with another task
            self._spent = self._unheard = True
            self._kill_group()
        elif not self.jobs:
            self._rest()

    def _begin(self) -> None:
        """A task begins: it has the whole time to itself."""
        self._begun = self._loop.time()
        self._suspect = False

    def _look(self) -> None:
        """Of a task that takes long: let others have its batch, and, at the second look beyond the limit, kill the worker."""
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
        self._watch = self._loop.call_later(wait, self._look)

    def _rest(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if not self._done.done():
            self._done.set_result(None)

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._transport.get_pid(), signal.SIGKILL)

    def _end(self) -> None:
        if self._ended.done():
            return
        self._ended.set_result(None)
        self._rest()
        if not self._imported.done():
            self._imported.set_exception(
                ServiceFault("reward", "start a worker", "it ended early; its standard error says why")
            )
            self._imported.exception()  # nobody may be waiting for it
        self._transport.close()
