"""How model services carry out commands: ranks of a group, processes around a frozen model, and actors such as rollouts.

the coordinator's session to this rank ──► event loop ──► the engine's thread, one command after the other"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.commands import Apply, Export, Priority, Restore, Save
from runtime.config import Config, Spread
from runtime.errors import BlobLost, Cancelled, Forbidden, ServiceFault, UserError
from runtime.process import os_process, spans
from runtime.status import Profile
from runtime.types import PolicyVersion
from services import process, profiles
from services.rpc import contract
from services.rpc.server import Handler

if TYPE_CHECKING:
    from runtime.trainer.rank import GroupRank


# Commands that wait only for their own ranks, not for a disk and not for receivers of weights.
COMPUTING = {row.command for row in contract.METHODS.values() if row.deadline in ("deadlines.train", "deadlines.score")}

MAKE_STEPS = ("trainer", "critic")

log = logging.getLogger("sluice")


class SpmdService(process.Service):
    """One rank of a group, or the only one, with its engine in a thread. Every rank gets every command, in the same order, and
    carries it out on its share of the data, even if the caller withdraws it. If a communicator or the device becomes unusable,
    the process ends at once without an answer, and comes back like a killed process."""

    def __init__(self, role: str, make_rank: Callable[[Config, int, int], GroupRank], config: Config, name: str, rank: int):
        """Create the service. `make_rank(config, rank, world_size)` builds the engine, in the engine's thread."""
        super().__init__(config, f"{name.rpartition('-')[0]}-{rank}" if rank else name, rank)
        self.role = role
        self.profiled_for = "steps" if role in MAKE_STEPS else "seconds"
        spread: Spread = getattr(config.services, role)
        self.libraries = process.TRANSFORMERS if spread.engine == "torch" else process.TORCH
        self._make_rank = make_rank
        self._thread = self.torch_thread = ThreadPoolExecutor(1, "engine")
        self._worker: GroupRank
        self._busy_seconds = 0.0
        self._commands = 0  # commands queued so far
        self._ordered = 0  # the version that the newest Apply makes, done or not
        self._ordering = asyncio.Event()  # set at each Apply

    def load(self) -> None:
        # The engine is made in its own thread, as some of torch's state belongs to the thread.
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        self._worker = self._thread.submit(self._make_rank, self.config, self.rank, ranks).result()

    async def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    @property
    def version(self) -> PolicyVersion:
        return self._worker.version

    async def profile(self, asked: Profile) -> list[Path]:
        if self.profiled_for == "seconds":
            return await super().profile(asked)
        first = max(asked.step, self._ordered) + 1
        if asked.steps > (left := max(0, self.config.training.steps - first)):
            raise UserError(f"--steps: {asked.steps}; only {left} are left after the current step")
        await self._until_ordered(first - 1)
        path, end = profiles.stem(self.config, self.name, self.rank, first), self._until_ordered(first + asked.steps - 1)
        return await profiles.of_thread(self._thread, path, asked.memory, end)

    async def _until_ordered(self, step: int) -> None:
        while self._ordered <= step:
            await self._ordering.wait()

    def gauges(self) -> dict[str, float]:
        return {
            "busy_seconds_total": self._busy_seconds,
            "steps_total": self._worker.version.step,
            "commands": self._commands,
            "ordered": max(self._ordered, self._worker.version.step),
        }

    def handler(self, method: contract.Method) -> Handler:
        """Return the handler: the service answers control beside the engine, the rank carries out all else in order."""
        return super().handler(method) if method.priority is Priority.CONTROL else self.execute

    def execute(self, command: Any) -> asyncio.Future[Any]:
        """Queue the command now. Returns the engine's answer; if the engine goes on beside later commands, its final result."""
        loop = asyncio.get_running_loop()
        self._require_own_folder(command)
        self._commands += 1
        if isinstance(command, Apply):
            self._ordered = command.step + 1
            self._ordering.set()
            self._ordering.clear()
        return loop.create_task(self._answer(loop.run_in_executor(self._thread, self._carry_out, command)))

    def _require_own_folder(self, command: Any) -> None:
        """Check that a command's folder is in the run's folder, or what the run resumed from. Raises Forbidden otherwise."""
        run = self.config.run
        known = [run.dir, run.resume] if isinstance(command, Restore) else [run.dir]
        if isinstance(command, (Save, Export, Restore)):
            # The paths as written: the user may have put a link into the folder, to another disk for example.
            folder, *allowed = (Path(os.path.abspath(each)) for each in (command.folder, *known) if each)  # noqa: PTH100
            if not any(path in (folder, *folder.parents) for path in allowed):
                raise Forbidden(f"{self.name}: {type(command).__name__}: {command.folder} is not below run.dir, {run.dir}")

    async def _answer(self, carried_out: asyncio.Future[Any]) -> Any:
        try:
            answer = await asyncio.shield(carried_out)
        except RuntimeError as error:
            _end_if_beyond_use(self.name, error)
            raise
        except BlobLost as error:  # other ranks wait for this one in a collective
            os_process.end_at_once(str(error))
        return await asyncio.shield(asyncio.wrap_future(answer)) if isinstance(answer, Future) else answer

    def _carry_out(self, command: Any) -> Any:
        before = time.monotonic()
        try:
            if type(command) not in COMPUTING:
                return self._worker.execute(command)
            with spans.work.at("command", type(command).__name__):
                return self._worker.execute(command)
        finally:
            self._busy_seconds += time.monotonic() - before


def _end_if_beyond_use(name: str, error: Exception) -> None:
    """End the process `name` if `error` shows that its communicator or device is unusable."""
    from runtime.process import platform

    if platform.is_beyond_use(error):
        log.error("%s cannot go on", name, exc_info=error)
        os_process.end_at_once(str(ServiceFault(name, "run", f"{type(error).__name__}: {error}")))


# ---- An actor: one task that alone touches what it owns, and the requests that wait for it.
# Senders get a future per request. The task hands requests to the behaviour: control before data, otherwise in order of
# arrival. Between requests the behaviour advances its own work, such as a decode step, and returns early once a request waits.
# A request that is withdrawn while it waits is never handed over. A behaviour may keep a request and reply later.
# Invariant: every accepted request is answered exactly once, with a value or an exception; a late answer is dropped.


class Request:
    """A message on its way through an actor."""

    __slots__ = ("future", "message")

    def __init__(self, message: Any):
        self.message = message
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def reply(self, value: Any = None) -> None:
        if not self.future.done():
            self.future.set_result(value)

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)

    async def answer(self, work: Awaitable[Any]) -> None:
        """Reply with the result of `work`, or fail with its error. For work beside the actor."""
        try:
            self.reply(await work)
        except Exception as error:  # noqa: BLE001 - the error goes to the sender of the request
            self.fail(error)

    @property
    def abandoned(self) -> bool:
        """True once no caller waits for the answer."""
        return self.future.done()


class Actor:
    """Runs `behaviour` behind its requests, up to `batch` of data at once. An exception of `advance` ends it and them all."""

    def __init__(self, name: str, behaviour: ActorService, *, batch: int = 1):
        self.name = name
        self._behaviour = behaviour
        self._batch = batch
        self._lanes: tuple[deque[Request], deque[Request]] = (deque(), deque())
        self._mail = asyncio.Event()
        self._open: set[Request] = set()
        self._end: Exception | None = None  # why no more requests are accepted

    def send(self, message: Any, priority: Priority = Priority.DATA) -> asyncio.Future[Any]:
        """Queue a message. Cancelling the future, its answer, withdraws it. Raises ServiceFault once the actor has ended."""
        if self._end is not None:
            raise ServiceFault(self.name, "receive", f"has ended: {self._end}")
        request = Request(message)
        self._open.add(request)
        request.future.add_done_callback(lambda _: self._forget(request))
        self._lanes[priority].append(request)
        self._mail.set()
        return request.future

    def interrupted(self) -> bool:
        """Return whether a request waits. Only reads, so an engine's thread may call it between two steps."""
        return any(self._lanes)

    async def run(self) -> None:
        """Serve until cancelled. Requests still unanswered then fail with Cancelled."""
        end: Exception = Cancelled(f"{self.name} was stopped")
        try:
            while True:
                await self._serve_mail()
                if self._behaviour.busy:
                    await self._behaviour.advance(self.interrupted)
                elif not self.interrupted():
                    self._mail.clear()
                    await self._mail.wait()
        except Exception as error:
            end = error
            raise
        finally:
            self._end = end
            for request in list(self._open):
                request.fail(end)

    async def _serve_mail(self) -> None:
        while requests := self._take():
            try:
                await self._behaviour.receive(requests)
            except Exception as error:  # noqa: BLE001 - the error goes to the senders of the requests
                for request in requests:
                    request.fail(error)

    def _take(self) -> list[Request]:
        """Take the next requests: one of control, or up to a batch of data."""
        for lane, most in zip(self._lanes, (1, self._batch), strict=True):
            taken: list[Request] = []
            while lane and len(taken) < most:
                request = lane.popleft()
                if not request.abandoned:
                    taken.append(request)
            if taken:
                return taken
        return []

    def _forget(self, request: Request) -> None:
        if not request.future.cancelled():
            request.future.exception()  # marks the error as seen: the caller may be gone
        self._open.discard(request)


class ActorService(process.Service):
    """A role whose actor, a task beside the handlers, takes the requests. `batch`: as in `Actor`."""

    batch = 1024

    def __init__(self, config: Config, name: str, rank: int):
        super().__init__(config, name, rank)
        self._actor = Actor(name, self, batch=self.batch)

    async def start(self) -> None:
        self.background = asyncio.create_task(self._actor.run())

    async def close(self) -> None:
        if self.background is not None:
            self.background.cancel()
            await asyncio.gather(self.background, return_exceptions=True)

    def handler(self, method: contract.Method) -> Handler:
        return partial(self._actor.send, priority=method.priority)

    @property
    def busy(self) -> bool:
        """True while `advance` has something to do."""
        return False

    @abstractmethod
    async def receive(self, requests: Sequence[Request]) -> None:
        """Take requests of one priority; answer each now or later. An exception fails the requests not yet answered."""

    async def advance(self, interrupted: Callable[[], bool]) -> None:
        """Do a piece of the actor's own work. Return soon once `interrupted()`, which any thread may call."""


class FrozenModelService(ActorService):
    """A frozen model, forward only, in a thread. Requests that arrive while it computes are its next batch."""

    batch = 256

    answers: Callable[[Sequence[Any]], Sequence[Any]]
    """Computes the reply to each request, a group each; an exception is the error of one request. `load` sets it."""

    def __init__(self, config: Config, name: str, rank: int):
        super().__init__(config, name, rank)
        self._thread = self.torch_thread = ThreadPoolExecutor(1, "model")

    async def close(self) -> None:
        await super().close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def receive(self, requests: Sequence[Request]) -> None:
        loop, messages = asyncio.get_running_loop(), [request.message for request in requests]
        try:
            answers = await loop.run_in_executor(self._thread, self._compute, messages)
        except BlobLost as error:
            for request in requests:  # of one group
                if len(requests) > 1:
                    await self.receive([request])
                else:
                    request.fail(error)
            return
        except Exception as error:
            _end_if_beyond_use(self.name, error)
            raise
        for request, answer in zip(requests, answers, strict=True):
            if isinstance(answer, Exception):
                request.fail(answer)
            else:
                request.reply(answer)

    def _compute(self, requests: Sequence[Any]) -> Sequence[Any]:
        with spans.work.at("forward", f"{len(requests)} requests"):
            return self.answers(requests)
