"""A run as far as publication goes: processes, the real publisher over real gRPC, and what starts whoever was lost again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from runtime import config as settings
from runtime.commands import AbortWeights, CommitWeights, HostWeights, JoinWeights, ResendWeights, SendWeights
from runtime.coordinator.pools import RolloutPool
from runtime.coordinator.register import Register, Unit, UnitChange
from runtime.coordinator.weight_sync import WeightPublisher
from runtime.status import Registration
from services.rpc.client import GroupClient, RoleClient
from services.rpc.server import Server
from services.rpc.session import Session
from tests.loopback.publisher_cases import come

T = TypeVar("T")

TRAINER = "trainer-0"
ROOT = Path(__file__).parents[2]
START = 60.0  # seconds until a process that was forked is there
HOST = "127.0.0.1"
PUBLICATION = {
    "backend": "gloo",
    "bucket_bytes": 512 << 10,
    "join_timeout": 10.0,
    "transfer_timeout": 4.0,
    "commit_timeout": 4.0,
    "abort_timeout": 4.0,
}
SLOTS = 4
# torch's store looks up the name of every address that it connects to, which takes 5 s when a name server is silent.
TORCH = {"TORCH_CPP_LOG_LEVEL": "ERROR", "RES_OPTIONS": "timeout:1 attempts:1"}
PHASES = ("rendezvous", "transfer", "commit", "abort")
GRPC = ("event_engine", "grpc_global_tim", "lifeguard")  # its threads


def configuration(folder: Path, transport: str) -> settings.Config:
    """That of all processes. `folder`/model is the model."""
    shared = str(folder / "weights") if transport == "files" else ""
    return settings.Config(
        run=settings.Run(name="faults", dir=str(folder)),
        model=settings.Model(path=str(folder / "model")),
        data=settings.Data(max_prompt_tokens=16),
        sampling=settings.Sampling(max_new_tokens=32),
        evaluation=settings.Evaluation(max_new_tokens=32),
        services=settings.Services(rollout=settings.Rollout(replicas=8, slots=SLOTS)),
        publication=msgspec.convert(PUBLICATION | {"transport": transport, "folder": shared}, settings.Publication),
    )


@dataclass
class Moments:
    """What the publication that is under way has come to, and how often."""

    reached: dict[str, asyncio.Event] = field(default_factory=lambda: {phase: asyncio.Event() for phase in PHASES})
    calls: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))

    def reach(self, phase: str) -> None:
        self.reached[phase].set()
        self.calls[phase] += 1


class Trainer(GroupClient):
    fleet: Fleet

    def post(self, command: Any) -> Coroutine[Any, Any, Any]:
        answer = super().post(command)
        if isinstance(command, SendWeights | ResendWeights):
            self.fleet.moments.reach("transfer")
        return self._hosted(command, answer) if isinstance(command, HostWeights) else answer

    async def _hosted(self, command: HostWeights, answer: Coroutine[Any, Any, Any]) -> Any:
        self.fleet.opening = time.monotonic()
        hosted = await answer
        self.fleet.moments.reach("rendezvous")
        self.fleet.joining = len(command.names) - 1
        return hosted


class Rollout(RoleClient):
    fleet: Fleet

    def post(self, command: Any) -> Coroutine[Any, Any, Any]:
        for kind, phase in ((CommitWeights, "commit"), (AbortWeights, "abort")):
            if isinstance(command, kind):
                self.fleet.moments.reach(phase)
        answer = super().post(command)
        return self._joined(answer) if isinstance(command, JoinWeights) else answer

    async def _joined(self, answer: Coroutine[Any, Any, Any]) -> None:
        await answer
        self.fleet.joined()


class Process:
    """One forked process: its session, and the socket over which faults are put into it."""

    def __init__(self, name: str, incarnation: int, pid: int):
        self.name = name
        self.incarnation = incarnation
        self.pid = pid
        self.stopped = False  # under SIGSTOP
        self.killed = False
        self.leaves = False  # nobody comes in its place
        self.session: Session
        self.port: Any
        self.lines: tuple[asyncio.StreamReader, asyncio.StreamWriter]

    def signal(self, number: int) -> None:
        self.killed = self.killed or number == signal.SIGKILL
        self.stopped = number == signal.SIGSTOP or (self.stopped and number != signal.SIGCONT)
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    @property
    def answers(self) -> bool:
        """Whether it should."""
        return not (self.stopped or self.killed)

    async def ask(self, do: str, **values: Any) -> dict[str, Any]:
        """Have it do what `Faulty` offers; what it holds afterwards. Raises ConnectionError when it is gone."""
        self.lines[1].write(json.dumps({"do": do} | values).encode() + b"\n")
        line = await asyncio.wait_for(self.lines[0].readline(), START)
        if not line:
            raise ConnectionError(f"{self.name} is gone")
        return json.loads(line)

    async def close(self) -> None:
        self.lines[1].close()
        await self.session.close()


class Fleet:
    """A trainer and `size` rollouts. Who is lost is ended, as a launcher would, and another is started in its place."""

    def __init__(self, config: settings.Config, folder: Path):
        self.config = config
        self.processes: dict[str, Process] = {}  # the newest of each name
        self.moments = Moments()
        self.opening = 0.0  # when the newest rendezvous was opened
        self.joining = 0  # who is awaited there
        self.lost_at: float | None = None  # while the epoch without, or with, somebody is not connected yet
        self.losses: list[Unit] = []
        self.met: list[float] = []  # seconds of each rendezvous that succeeded
        self.rebuilt: list[float] = []  # seconds from each loss until the living were connected
        self.failures: list[BaseException] = []  # of what starts others in the place of those that were lost
        self._folder = folder
        self._expected: dict[tuple[str, int], tuple[asyncio.Future[Registration], asyncio.Future[Any]]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._forking = asyncio.Lock()

    async def start(self, size: int) -> None:
        self._server = Server({"Coordinator": {"Register": self._register}}, {})
        self._address = self._server.bind(HOST, 0)
        await self._server.start()
        self._control = self._folder / "control"
        self._listener = await asyncio.start_unix_server(self._connected, self._control)
        described = self._folder / "config.json"
        described.write_bytes(msgspec.json.encode(self.config))
        command = [sys.executable, "-m", "tests.system.publication_members", str(described), str(self._folder)]
        env = os.environ | {"OMP_NUM_THREADS": "1", "GRPC_ENABLE_FORK_SUPPORT": "0"} | TORCH
        pipe = asyncio.subprocess.PIPE
        self._forks = await asyncio.create_subprocess_exec(*command, cwd=ROOT, env=env, stdin=pipe, stdout=pipe)
        names = [TRAINER, *(f"rollout-{index}" for index in range(size))]
        trainer, *rollouts = await asyncio.gather(*(self.process(name) for name in names))
        names = [f"rollout-{index}" for index in range(8)]
        self.pool = RolloutPool(Register(), dict.fromkeys(names, SLOTS), START)
        self.pool.register.subscribe(self._look)
        for one in rollouts:
            self.arrive(one)
        self.publisher = WeightPublisher(trainer.port, self.pool, self.config.publication, START)
        self.renewing = asyncio.create_task(self.publisher.run())

    async def close(self) -> None:
        """Everything ends; nothing is left behind."""
        for task in (self.renewing, *self._tasks):
            task.cancel()
        await asyncio.gather(self.renewing, *self._tasks, return_exceptions=True)
        for process in self.processes.values():
            process.signal(signal.SIGKILL)
            await process.close()
        self._forks.stdin.close()  # type: ignore[union-attr]
        await self._forks.wait()
        self._listener.close()
        await self._server.stop(grace=0.0)

    async def process(self, name: str, incarnation: int = 0) -> Process:
        """Another process, which has loaded and is connected."""
        loop, key = asyncio.get_running_loop(), (name, incarnation)
        registered, connected = self._expected[key] = (loop.create_future(), loop.create_future())
        async with self._forking:
            words = [name, incarnation, self._address, str(self._control)]
            self._forks.stdin.write(json.dumps(words).encode() + b"\n")  # type: ignore[union-attr]
            pid = int(await self._forks.stdout.readline())  # type: ignore[union-attr]
        process = Process(name, incarnation, pid)
        process.lines = await asyncio.wait_for(connected, START)
        registration = await asyncio.wait_for(registered, START)
        del self._expected[key]
        trains = name == TRAINER
        process.session = Session(registration.address, name, "Trainer" if trains else "Rollout", registration.machine)
        await process.session.open(START)
        if trains:
            process.port = Trainer("Trainer", [process.session], self.config, [0])
        else:
            process.port = Rollout("Rollout", process.session, self.config, incarnation)
        process.port.fleet = self
        self.processes[name] = process
        return process

    @property
    def rollouts(self) -> list[Process]:
        """Those that the publisher counts on."""
        return [self.processes[member.name] for member in self.pool.membership.living]

    def arrive(self, process: Process) -> None:
        come(self.pool, process.port)

    def joined(self) -> None:
        self.joining -= 1
        if self.joining:
            return
        now = time.monotonic()
        self.met.append(now - self.opening)
        if self.lost_at is not None:
            self.rebuilt.append(now - self.lost_at)
            self.lost_at = None

    def _look(self, change: UnitChange) -> None:
        if not change.lost:
            return
        self.losses.append(change.unit)
        self.lost_at = time.monotonic()
        process = self.processes[change.unit.name]
        process.signal(signal.SIGKILL)
        self._later(self._replace(process))

    async def _replace(self, process: Process) -> None:
        await process.close()
        if process.leaves:
            del self.processes[process.name]
        else:
            self.arrive(await self.process(process.name, process.incarnation + 1))

    def _later(self, work: Awaitable[Any]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self.failures.append(error)

    async def _register(self, registration: Registration) -> None:
        self._expected[registration.name, registration.incarnation][0].set_result(registration)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = json.loads(await reader.readline())
        self._expected[hello["name"], hello["incarnation"]][1].set_result((reader, writer))

    async def settled(self, size: int, seconds: float) -> None:
        """Until `size` rollouts serve in an epoch of exactly them. Raises TimeoutError."""
        await until(lambda: len(self.pool.serving) == size and not self.pool.membership.stale and not self._tasks, seconds)


def threads_and_files() -> list[int]:
    """Of this process, but for the threads of gRPC's pools, which grow and shrink as gRPC sees fit."""
    threads = 0
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has just ended
            threads += thread.joinpath("comm").read_text().strip() not in GRPC
    return [threads, len(list(Path("/proc/self/fd").iterdir()))]


async def until(holds: Callable[[], bool], seconds: float) -> None:
    """Raises TimeoutError."""
    give_up = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > give_up:
            raise TimeoutError(f"not within {seconds:g} s")
        await asyncio.sleep(0.002)


@asynccontextmanager
async def fleet(folder: Path, transport: str, size: int) -> AsyncIterator[Fleet]:
    here = Fleet(configuration(folder, transport), folder)
    await here.start(size)
    try:
        yield here
    finally:
        await here.close()
