"""Publications under random faults: that each ends in a commit, in time, with everybody who lives on the same weights.

`Fleet` is a run as far as publication goes: processes (`publication_members`), the real publisher over real gRPC, and what
starts whoever was lost again. `python -m tests.system.publication_faults --publications 1000 --seed 0 [--transport NAME]` prints
what became of them, by fault; `--aborts 1000` counts the threads and files that as many aborted transfers leave in one process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import uvloop

from runtime import config as settings
from runtime.commands import AbortWeights, CommitWeights, HostWeights, ResendWeights, SendWeights
from runtime.coordinator.pools import RolloutPool
from runtime.coordinator.register import Register, Unit, UnitChange
from runtime.coordinator.weight_sync import WeightPublisher
from runtime.status import Registration
from runtime.telemetry.metrics import PublicationFigures
from runtime.types import GroupRequest, PolicyVersion, SamplingParams
from services.rpc.client import GroupClient, RoleClient
from services.rpc.server import Server
from services.rpc.session import Session
from tests.loopback import weight_cases
from tests.loopback.weight_cases import Aborts, come, settles

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
        return self._hosted(answer) if isinstance(command, HostWeights) else answer

    async def _hosted(self, answer: Coroutine[Any, Any, Any]) -> Any:
        hosted = await answer
        self.fleet.moments.reach("rendezvous")
        return hosted


class Rollout(RoleClient):
    fleet: Fleet

    def post(self, command: Any) -> Coroutine[Any, Any, Any]:
        for kind, phase in ((CommitWeights, "commit"), (AbortWeights, "abort")):
            if isinstance(command, kind):
                self.fleet.moments.reach(phase)
        return super().post(command)


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
        self.losses: list[Unit] = []
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

    def _look(self, change: UnitChange) -> None:
        if not change.lost:
            return
        self.losses.append(change.unit)
        process = self.processes[change.unit.name]
        process.signal(signal.SIGKILL)
        task = asyncio.ensure_future(self._replace(process))
        self._tasks.add(task)
        task.add_done_callback(self._done)

    async def _replace(self, process: Process) -> None:
        await process.close()
        if process.leaves:
            del self.processes[process.name]
        else:
            self.arrive(await self.process(process.name, process.incarnation + 1))

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


# ------------------------------------------------------------------------------------------------ the trial

SIZE = 3  # rollouts
STATUS = 30.0  # seconds in which every living process answers, on however busy a machine
RECOVERY = 60.0  # seconds until everybody is back; not a deadline of the system's
SLACK = 60.0  # seconds that a busy machine may add to the sum of the deadlines
MAY_GROW = (0, 4, 0, 4)  # threads and files, here and of the sender: up to 3 files more were seen, of an unknown owner
SETTLE = 20.0  # seconds until threads that are just ending are gone
WARM = 12  # publications before threads and files are counted: each kind of fault was seen
JOINER = "rollout-7"

NONE, KILL, STOP, PAUSE, RAISE, RECEIVED, SENT, JOIN, CUT = (
    "none",
    "SIGKILL",
    "SIGSTOP",
    "SIGSTOP for 0.5 s",
    "reception raises",
    "corrupt byte, one receiver",
    "corrupt byte, at the sender",
    "joiner",
    "cut link",
)
AT_A_MOMENT = (KILL, STOP, PAUSE, JOIN, CUT)
FAULTS = (*AT_A_MOMENT, RAISE, RECEIVED, SENT)
MOMENTS = ("before", *PHASES)
# What the aborts of a publication say of the fault in one of them: the reason is that of whoever was heard first.
SAID = {RAISE: ("on purpose",), RECEIVED: ("checksum",), SENT: ("checksum", "has changed in memory")}
SHARE = 1 / 3  # of publications with a fault


@dataclass
class Outcome:
    fault: str
    moment: str
    aborts: int
    lost: int
    seconds: float

    @property
    def ended(self) -> str:
        return "COMMIT" if not self.aborts else "ABORT, then COMMIT"


@dataclass
class Record:
    """What a run of publications came to. `violations` is empty when every promise was kept."""

    outcomes: list[Outcome] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    waits: dict[str, float] = field(default_factory=dict)
    """The longest, in seconds, by what was waited for."""
    counts: dict[str, list[int]] = field(default_factory=dict)
    """Threads and files, after warm-up and at the end."""
    groups: int = 0
    """Groups that were generated meanwhile."""

    def waited(self, what: str, seconds: float) -> None:
        self.waits[what] = max(self.waits.get(what, 0.0), seconds)

    def check(self, holds: bool, what: str) -> None:
        if not holds:
            self.violations.append(f"publication {len(self.outcomes) + 1}: {what}")


@contextmanager
def logged_aborts() -> Iterator[list[str]]:
    """The reasons of all aborts meanwhile: a publication that is aborted twice keeps only its last."""
    reasons: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: reasons.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("sluice")
    logger.addHandler(handler)
    try:
        yield reasons
    finally:
        logger.removeHandler(handler)


class Trial:
    """Publications over one fleet, one after the other, about a third of them with one fault."""

    def __init__(self, here: Fleet, seed: int):
        self._fleet = here
        self._random = random.Random(seed)
        self._span = 0.03  # seconds that a publication without a fault takes, a moving mean
        self._history: dict[tuple[str, int], int] = {}  # the newest version that each process was seen to serve
        self._joiners = 0
        self._planned: deque[str] = deque()  # faults that are due
        self._step = 0
        self._named: set[str] = set()  # the faults of `SAID` that were aborted for what was done
        self.record = Record()

    def plan(self, publications: int) -> list[str]:
        """The faults in random order, each of them before any is repeated, and within warm-up too."""
        chosen = [NONE] * publications
        places = sorted(self._random.sample(range(1, publications), max(len(FAULTS), round(publications * SHARE))))
        for start in range(0, len(places), len(FAULTS)):
            batch = places[start : start + len(FAULTS)]
            for place, fault in zip(batch, self._random.sample(FAULTS, len(batch)), strict=True):
                chosen[place] = fault
        return chosen

    async def run(self, publications: int) -> Record:
        here, record = self._fleet, self.record
        generating = asyncio.create_task(self._generate())
        await self._publish(NONE)  # there are weights to generate with
        for number, fault in enumerate(self.plan(publications - 1), start=1):
            await self._publish(fault)
            if number == min(WARM, publications // 2):
                await self._settle()
                await asyncio.sleep(here.config.publication.transfer_timeout)  # as long as gloo may hold a thread
                record.counts["after warm-up"] = await self._counts()
        for process in here.rollouts:
            if process.stopped:  # there is no publication left that would find out
                process.signal(signal.SIGKILL)
        await self._settle()
        record.check(not generating.done(), "generation has ended")
        unnamed = SAID.keys() & {outcome.fault for outcome in record.outcomes} - self._named
        record.check(not unnamed, f"no abort says what was done: {unnamed}")
        generating.cancel()
        before = record.counts["after warm-up"]
        try:
            await self._until_at_most([count + slack for count, slack in zip(before, MAY_GROW, strict=True)])
        except TimeoutError:
            record.check(False, f"threads and files (here, sender): {await self._counts()} after {before}")
        record.counts["at the end"] = await self._counts()
        record.violations += [f"start: {failure!r}" for failure in here.failures]
        return record

    async def _until_at_most(self, most: list[int]) -> None:
        give_up = time.monotonic() + SETTLE
        while any(count > limit for count, limit in zip(await self._counts(), most, strict=True)):
            if time.monotonic() > give_up:
                raise TimeoutError
            await asyncio.sleep(0.1)

    async def _counts(self) -> list[int]:
        sender = await self._fleet.processes[TRAINER].ask("report")
        return [*threads_and_files(), sender["threads"], sender["files"]]

    # ------------------------------------------------------------------------------------------ one publication

    async def _publish(self, fault: str) -> None:
        here, record = self._fleet, self.record
        if fault != NONE:
            self._planned.append(fault)
        stopped = [process for process in here.rollouts if process.stopped]
        if stopped:  # since the end of the publication before
            fault, moment = STOP, "between publications"
        else:
            fault = self._planned.popleft() if self._planned else NONE
            moment = self._random.choice(MOMENTS) if fault in AT_A_MOMENT else "transfer"
        if fault in SAID:  # one that was killed just now would be the first to be heard of
            await self._settle()
        self._step += 1
        version = PolicyVersion(0, self._step)
        due = await self._prepare(fault, moment) if not stopped else None
        here.moments = Moments()
        losses = len(here.losses)
        began = time.monotonic()
        publishing = asyncio.create_task(here.publisher.publish(version))
        injecting = asyncio.create_task(self._inject(due, moment, publishing)) if due else None
        try:
            with logged_aborts() as aborts:
                figures: PublicationFigures = await asyncio.wait_for(publishing, SLACK + self._allowed())
        except Exception as error:
            record.violations.append(f"version {version}: {fault} ({moment}): {error!r}")
            raise
        seconds = time.monotonic() - began
        if injecting is not None:
            await injecting
        record.waited("publication", seconds)
        if fault == NONE:
            self._span += 0.1 * (figures.seconds - self._span)
        record.check(here.publisher.committed == version, f"committed is {here.publisher.committed}, published {version}")
        if here.renewing.done():
            here.renewing.result()
        if any(words in abort for words in SAID.get(fault, ()) for abort in aborts):
            self._named.add(fault)
        lost = len(here.losses) - losses
        record.outcomes.append(Outcome(fault, moment, figures.aborts, lost, seconds))
        await self._verify()
        if fault == JOIN or self._random.random() < 0.5 or here.pool.membership.serving == ():
            await self._settle()

    def _allowed(self) -> float:
        """The sum of the deadlines of what was begun so far: rendezvous, transfers, commit, aborts."""
        limits, calls = self._fleet.config.publication, self._fleet.moments.calls
        rendezvous = calls["rendezvous"] * (limits.join_timeout + limits.abort_timeout)
        attempts = max(calls["transfer"], 1) * (2 * limits.transfer_timeout + limits.abort_timeout)
        return rendezvous + attempts + limits.commit_timeout

    async def _prepare(self, fault: str, moment: str) -> Callable[[], Awaitable[Any]] | None:
        """Arm what goes wrong by itself, and return what is to be done within the phase `moment`, if anything is."""
        here, where = self._fleet, self._random.random()
        if fault == NONE:
            return None
        victim = self._random.choice([process for process in here.rollouts if process.answers])
        joiner = await self._spare() if fault == JOIN else None
        if fault == SENT:
            await here.processes[TRAINER].ask("corrupt", where=where)
        elif fault in (RAISE, RECEIVED) or moment == "abort":
            await victim.ask("raise" if fault == RAISE else "corrupt", where=where)
        if moment == "rendezvous":
            here.pool.membership.break_up(here.pool.membership.epoch.number)  # so that there is one
        return partial(self._do, fault, victim, joiner) if fault in AT_A_MOMENT else None

    async def _inject(self, do: Callable[[], Awaitable[Any]], moment: str, publishing: asyncio.Task[Any]) -> None:
        """Somewhere in the phase `moment` of the publication that is beginning."""
        here = self._fleet
        if moment in PHASES:
            reached = asyncio.create_task(here.moments.reached[moment].wait())
            await asyncio.wait({reached, publishing}, return_when=asyncio.FIRST_COMPLETED)
            reached.cancel()
        await asyncio.sleep(self._random.uniform(0, self._span))
        with suppress(ConnectionError):  # the victim is lost already
            await do()

    async def _do(self, fault: str, victim: Process, joiner: Process | None) -> None:
        if fault == KILL:
            victim.signal(signal.SIGKILL)
        elif fault in (STOP, PAUSE):
            victim.signal(signal.SIGSTOP)
            if fault == PAUSE:
                await asyncio.sleep(0.5)
                victim.signal(signal.SIGCONT)
        elif fault == CUT:
            await victim.ask("cut")
        elif joiner is not None:
            self._fleet.arrive(joiner)

    async def _spare(self) -> Process:
        """A rollout that has loaded, and of which nobody knows yet."""
        process = await self._fleet.process(JOINER, self._joiners)
        self._joiners += 1
        process.leaves = True
        return process

    # ------------------------------------------------------------------------------------------ what has to hold

    async def _settle(self) -> None:
        """Everybody is back, and right."""
        here, began = self._fleet, time.monotonic()
        if any(process.stopped for process in here.rollouts):
            return  # the next publication finds out
        size = SIZE + (JOINER in here.processes)
        try:
            await until(lambda: not any(process.killed for process in here.rollouts), RECOVERY)
            await here.settled(size, RECOVERY)
        except TimeoutError:
            self.record.check(False, f"not everybody is back within {RECOVERY:g} s: {here.pool}")
            raise
        self.record.waited("everybody's return", time.monotonic() - began)
        await self._verify()
        if JOINER in here.processes:
            here.processes[JOINER].signal(signal.SIGKILL)
            await here.settled(SIZE, RECOVERY)

    async def _verify(self) -> None:
        """Every process answers, and whoever serves has exactly the committed weights."""
        here = self._fleet
        trainer = here.processes[TRAINER]
        awake = [process for process in here.rollouts if process.answers]
        began = time.monotonic()
        await asyncio.gather(*(self._answers(process) for process in (trainer, *awake)))
        self.record.waited("status", time.monotonic() - began)
        serving = [process for process in awake if process.port in here.pool.serving]
        committed = here.publisher.committed
        sender = await trainer.ask("report")
        for process in serving:
            with suppress(ConnectionError):  # it was killed just now
                held = await process.ask("report")
                self._compare(process, held, sender["digest"], committed)

    def _compare(self, process: Process, held: dict[str, Any], digest: str, committed: PolicyVersion | None) -> None:
        check, name = self.record.check, f"{process.name} ({process.incarnation})"
        assert committed is not None
        check(held["version"] == committed.pack(), f"{name} serves {held['version']}, committed is {committed.pack()}")
        check(held["digest"] == digest, f"{name}: the weights of version {committed} differ from the sender's")
        check(held["swapped"] == sorted(set(held["swapped"])), f"{name}: versions went back: {held['swapped']}")
        key = process.name, process.incarnation
        check(held["version"] >= self._history.get(key, 0), f"{name} went back to {held['version']}")
        self._history[key] = held["version"]

    async def _answers(self, process: Process) -> None:
        try:
            await asyncio.wait_for(process.port.status(), STATUS)
        except Exception as error:  # noqa: BLE001
            self.record.check(not process.answers, f"{process.name} ({process.incarnation}) does not answer: {error!r}")

    async def _generate(self) -> None:
        """Groups, one after the other, as in a run: until cancelled."""
        here, prompt = self._fleet, np.arange(8, dtype=np.int32)
        await until(lambda: bool(here.pool.serving), RECOVERY)
        sampling = SamplingParams(max_new_tokens=16)
        while True:
            request = GroupRequest(group_id=self.record.groups, prompt=prompt, n=2, seed=1, sampling=sampling)
            group = await here.pool.generate_anywhere(request)
            self.record.check(group.oldest <= group.newest, f"a group of versions {group.oldest} to {group.newest}")
            self.record.groups += 1
            await asyncio.sleep(0.02)


async def trial(publications: int, seed: int, transport: str, folder: Path) -> Record:
    """Raises what a publication ended with that did not end in a commit."""
    async with fleet(folder, transport, SIZE) as here:
        one = Trial(here, seed)
        try:
            return await one.run(publications)
        except Exception as error:
            for process in here.processes.values():
                process.signal(signal.SIGUSR1)  # every thread's stack goes to its log
            await asyncio.sleep(0.5)
            raise RuntimeError("; ".join(one.record.violations) or repr(error)) from error


def table(record: Record) -> str:
    """Rows of Markdown, and the other figures."""
    rows: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for outcome in record.outcomes:
        rows[outcome.fault, outcome.ended, outcome.lost].append(outcome.seconds)
    lines = ["| fault | outcome | lost | count | seconds: median | worst |", "| --- | --- | --- | --- | --- | --- |"]
    for (fault, ended, lost), seconds in sorted(rows.items()):
        figures = f"{statistics.median(seconds):.3f} | {max(seconds):.3f}"
        lines.append(f"| {fault} | {ended} | {lost} | {len(seconds)} | {figures} |")
    lines += ["", *(f"longest wait for {what}: {seconds:.3f} s" for what, seconds in record.waits.items())]
    lines += [f"threads and files here, of the sender, {when}: {counts}" for when, counts in record.counts.items()]
    return "\n".join([*lines, f"groups: {record.groups}", *(f"VIOLATION {line}" for line in record.violations)])


def abort(count: int, transport: str) -> str:
    """Threads and files before and after `count` aborts. Raises AssertionError when something is left."""
    aborts, began = Aborts(transport), time.monotonic()
    for _ in range(count):
        aborts.one()
    seconds = (time.monotonic() - began) / count
    assert settles(weight_cases.threads_and_files, aborts.warm), f"{weight_cases.threads_and_files()} after {aborts.warm}"
    return (
        f"{count} aborts of {seconds:.3f} s: threads and files {aborts.warm} before, {weight_cases.threads_and_files()} after"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--publications", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--transport", default="collective")
    parser.add_argument("--aborts", type=int, help="that many aborted transfers in one process, and nothing else")
    arguments = parser.parse_args()
    if arguments.aborts:
        os.environ.update(TORCH)
        print(abort(arguments.aborts, arguments.transport))
        return
    uvloop.install()
    with tempfile.TemporaryDirectory() as folder:
        record = asyncio.run(trial(arguments.publications, arguments.seed, arguments.transport, Path(folder)))
    print(table(record))
    sys.exit(1 if record.violations else 0)


if __name__ == "__main__":
    main()
