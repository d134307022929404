"""The processes of `sluice bench weight_sync`, seen from the bench: a trainer and rollouts as the publisher reaches them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import Any, TypeVar, cast, get_args, get_type_hints

import msgspec

from runtime.commands import RolePort
from runtime.config import WeightSyncConfig
from runtime.coordinator.pools import RolloutPool
from runtime.coordinator.register import ROLLOUT, Register
from runtime.coordinator.weight_sync import WeightPublisher
from runtime.errors import DeadlineExceeded, ServiceFault
from runtime.process import os_process
from runtime.types import Command, answer_of
from services.rpc.contract import method_of
from sluice import start

DEADLINE = 600.0  # seconds for any answer
STEP = 60.0  # seconds that the trainer may take for a step
LINE = 16 << 20  # bytes: a manifest is one

# Those that a run can be told to take, and what the collective makes of deltas: settings by name.
TRANSPORTS: dict[str, dict[str, Any]] = {
    **{name: {"transport": name} for name in get_args(get_type_hints(WeightSyncConfig)["transport"]) if name != "auto"},
    "delta": {"transport": "collective", "encoding": "delta"},
}

R = TypeVar("R")
P = TypeVar("P", bound="BenchPeer")


class BenchPeer:
    """A process that answers orders, several at a time."""

    incarnation = 0
    machine = os_process.machine()

    def __init__(self, name: str, process: asyncio.subprocess.Process):
        self.name = name
        self._process = process
        self._numbers = count()
        self._open: dict[int, asyncio.Future[Any]] = {}
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    @asynccontextmanager
    async def started(cls: type[P], name: str, module: str, *arguments: str, core: int | None = None) -> AsyncIterator[P]:
        """A process that computes with one thread, on `core` alone when there is one; it ends with the block, and with it all
        that it started."""
        # Plain gloo binds to the address that the machine's name has, which need not lead anywhere.
        env = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        process = await asyncio.create_subprocess_exec(
            *start.command(module, *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=env,
            start_new_session=True,
            limit=LINE,
        )
        if core is not None:
            os.sched_setaffinity(process.pid, {core})  # before it has other threads
        peer = cls(name, process)
        try:
            yield peer
        finally:
            peer._listening.cancel()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    async def ask(self, what: str, **arguments: Any) -> Any:
        """What the process answers. Raises ServiceFault when it failed, or ended."""
        number = next(self._numbers)
        answer = self._open[number] = asyncio.get_running_loop().create_future()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"id": number, "what": what, **arguments}).encode() + b"\n")
        if self._listening.done():
            raise self._gone(what)
        try:
            said = await asyncio.wait_for(answer, DEADLINE)
        except TimeoutError:
            raise DeadlineExceeded(self.name, what, "did not answer", DEADLINE) from None
        if said is None:
            raise self._gone(what)
        if "error" in said:
            raise ServiceFault(self.name, what, said["error"])
        return said["answer"]

    def _gone(self, what: str) -> ServiceFault:
        return ServiceFault(self.name, what, "ended without an answer; its standard error says why")

    async def _listen(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            said = json.loads(line)
            answer = self._open.pop(said["id"])
            if not answer.done():
                answer.set_result(said)
        for answer in self._open.values():
            if not answer.done():
                answer.set_result(None)


class PeerMember(BenchPeer):
    """Of the weight sync's group: a trainer or a rollout, by its `service`."""

    service: str

    def __init__(self, name: str, process: asyncio.subprocess.Process):
        super().__init__(name, process)
        self.machines = {name: self.machine}

    async def call(self, command: Command[R]) -> R:
        method = method_of(self.service, command).name
        said = await self.ask("call", method=method, command=msgspec.to_builtins(command))
        answer: R = msgspec.convert(said, answer_of(type(command)))
        return answer

    post = call

    def when_lost(self, tell: Callable[[str], None]) -> None:
        """A process that ends fails the call that is under way, which ends the bench."""

    def acknowledge(self, command: Any) -> None:
        """It keeps no answers."""

    def give_up(self, reason: str) -> None:
        """As of `when_lost`."""


class TrainerPeer(PeerMember):
    service = "Trainer"


class RolloutPeer(PeerMember):
    service = "Rollout"


def publisher(trainer: TrainerPeer, rollouts: Sequence[RolloutPeer], settings: WeightSyncConfig) -> WeightPublisher:
    register = Register()
    for rollout in rollouts:
        register.add(ROLLOUT, rollout)
        register.join(rollout)
    pool = RolloutPool(register, {rollout.name: 1 for rollout in rollouts}, DEADLINE)
    return WeightPublisher(cast(RolePort, trainer), pool, settings, STEP)
