"""Publications under random faults: that each ends in a commit, in time, with everybody who lives on the same weights.

`Fleet` is a run as far as publication goes: processes (`publication_members`), the real publisher over real gRPC, and what
starts whoever was lost again.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from runtime import config as settings
from runtime.commands import AbortWeights, CommitWeights, HostWeights, ResendWeights, SendWeights
from runtime.coordinator.pools import RolloutPool
from runtime.coordinator.register import Register, Unit, UnitChange
from runtime.coordinator.weight_sync import WeightPublisher
from runtime.status import Registration
from runtime.types import GroupRequest, PolicyVersion, SamplingParams
from services.rpc.client import GroupClient, RoleClient
from services.rpc.server import Server
from services.rpc.session import Session
from tests.loopback.ranks import Helper
from tests.loopback.weight_cases import come
from tests.system.publication_members import TRAINER, serve
from tests.unit.training_cases import make_policy

START = 60.0  # seconds until a process that was forked is there
HOST = "127.0.0.1"
DEADLINES = {"join_timeout": 10.0, "transfer_timeout": 4.0, "commit_timeout": 4.0, "abort_timeout": 4.0}
SLOTS = 4
MODEL = {"hidden_size": 128, "intermediate_size": 512, "layers": 4, "vocab_size": 260}  # a million parameters
PHASES = ("rendezvous", "transfer", "commit", "abort")


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
        publication=settings.Publication(
            transport=transport, folder=shared, backend="gloo", bucket_bytes=512 << 10, **DEADLINES
        ),
    )


class Moments:
    """What the publication that is under way has come to, and how often."""

    def __init__(self) -> None:
        self.reached = {phase: asyncio.Event() for phase in PHASES}
        self.calls = Counter[str]()

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
    """One forked process: its session, and the connection over which faults are put into it."""

    session: Session
    port: Any

    def __init__(self, name: str, incarnation: int, helper: Helper):
        self.name, self.incarnation, self._helper = name, incarnation, helper
        self.stopped = self.killed = False
        self.leaves = False  # nobody comes in its place

    def signal(self, number: int) -> None:
        self.killed = self.killed or number == signal.SIGKILL
        self.stopped = number == signal.SIGSTOP or (self.stopped and number != signal.SIGCONT)
        with suppress(ProcessLookupError):
            os.kill(self._helper.process.pid, number)

    @property
    def answers(self) -> bool:
        """Whether it should."""
        return not (self.stopped or self.killed)

    async def ask(self, do: str, **values: Any) -> dict[str, Any]:
        """Have it do what `Faulty` offers; what it holds afterwards. Raises ConnectionError when it is gone."""
        try:
            self._helper.tell({"do": do} | values)
            return await asyncio.to_thread(self._helper.hear)
        except EOFError as error:
            raise ConnectionError(f"{self.name} is gone") from error

    async def close(self) -> None:
        self._helper.end()
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
        self._expected: dict[tuple[str, int], asyncio.Future[Registration]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self, size: int) -> None:
        self._server = Server({"Coordinator": {"Register": self._register}}, {})
        self._address = self._server.bind(HOST, 0)
        await self._server.start()
        make_policy(Path(self.config.model.path), **MODEL)
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
        await self._server.stop(grace=0.0)

    async def process(self, name: str, incarnation: int = 0) -> Process:
        """Another process, which has loaded and is connected."""
        registered = self._expected[name, incarnation] = asyncio.get_running_loop().create_future()
        helper = await asyncio.to_thread(Helper, serve)
        helper.connection.send((self.config, str(self._folder), name, incarnation, self._address))
        process = Process(name, incarnation, helper)
        registration = await asyncio.wait_for(registered, START)
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
        self._expected.pop((registration.name, registration.incarnation)).set_result(registration)

    async def settled(self, size: int, seconds: float) -> None:
        """Until `size` rollouts serve in an epoch of exactly them. Raises TimeoutError."""
        await until(lambda: len(self.pool.serving) == size and not self.pool.membership.stale and not self._tasks, seconds)


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
SPAN = 0.05  # seconds that a publication without a fault takes
JOINER = "rollout-7"
TRIES = 4  # publications with the same fault within a transfer, until one is aborted: some 1 in 40 is over before the fault

NONE, KILL, STOP, PAUSE, JOIN, CUT = "none", "SIGKILL", "SIGSTOP", "SIGSTOP for 0.5 s", "joiner", "cut link"
RAISE, RECEIVED, SENT = "reception raises", "corrupt byte, one receiver", "corrupt byte, at the sender"
AT_A_MOMENT, WITHIN = (KILL, STOP, PAUSE, JOIN, CUT), (RAISE, RECEIVED, SENT)
FAULTS = (*AT_A_MOMENT, *WITHIN)


class Trial:
    """Publications over one fleet, one after the other, a third of them with one fault, each of `FAULTS` in turn."""

    def __init__(self, here: Fleet, seed: int):
        self._fleet = here
        self._random = random.Random(seed)
        self._joiners = 0
        self.outcomes: list[tuple[str, int]] = []
        """The fault of each publication, and its aborts."""
        self.groups = 0
        """Groups that were generated meanwhile."""

    def _check(self, holds: bool, what: str) -> None:
        assert holds, f"publication {len(self.outcomes) + 1}: {what}"

    async def run(self, rounds: int) -> None:
        here, generating = self._fleet, asyncio.create_task(self._generate())
        for fault in [fault for _ in range(rounds) for fault in self._random.sample(FAULTS, len(FAULTS))]:
            await self._publish(NONE)  # which finds out who has stopped
            for _ in range(TRIES if fault in WITHIN else 1):
                await self._publish(fault)
                if self.outcomes[-1][1]:
                    break
            await self._publish(NONE)
        for process in here.rollouts:
            if process.stopped:  # there is no publication left that would find out
                process.signal(signal.SIGKILL)
        await self._settle()
        if generating.done():
            generating.result()
        generating.cancel()
        without = set(WITHIN) - {fault for fault, aborts in self.outcomes if aborts}
        self._check(not without, f"none was aborted for {without}")
        self._check(not here.failures, f"starts have failed: {here.failures}")

    async def _publish(self, fault: str) -> None:
        here, version = self._fleet, PolicyVersion(0, len(self.outcomes) + 1)
        if fault in WITHIN:  # one that was killed just now would be the first to be heard of
            await self._settle()
        moment = self._random.choice(("before", *PHASES)) if fault in AT_A_MOMENT else "transfer"
        victim = self._random.choice([process for process in here.rollouts if process.answers])
        joiner = await self._spare() if fault == JOIN else None
        where = self._random.random()
        if fault == SENT:
            await here.processes[TRAINER].ask("corrupt", where=where)
        elif fault in (RAISE, RECEIVED) or moment == "abort":
            await victim.ask("raise" if fault == RAISE else "corrupt", where=where)
        if moment == "rendezvous":
            here.pool.membership.break_up(here.pool.membership.epoch.number)  # so that there is one
        here.moments = Moments()
        publishing = asyncio.create_task(here.publisher.publish(version))
        injecting = asyncio.create_task(self._inject(fault, victim, joiner, moment, publishing))
        figures = await self._in_time(publishing)
        await injecting
        self._check(here.publisher.committed == version, f"committed is {here.publisher.committed}, published {version}")
        if here.renewing.done():
            here.renewing.result()
        self.outcomes.append((fault, figures.aborts))
        await self._verify()
        if fault == JOIN or self._random.random() < 0.5 or here.pool.membership.serving == ():
            await self._settle()

    async def _in_time(self, publishing: asyncio.Task[Any]) -> Any:
        """Its figures, within the sum of the deadlines of what was begun: rendezvous, transfers, commit, aborts."""
        await asyncio.wait({publishing}, timeout=SLACK)
        limits, calls = self._fleet.config.publication, self._fleet.moments.calls
        rendezvous = calls["rendezvous"] * (limits.join_timeout + limits.abort_timeout)
        attempts = max(calls["transfer"], 1) * (2 * limits.transfer_timeout + limits.abort_timeout)
        return await asyncio.wait_for(publishing, rendezvous + attempts + limits.commit_timeout)

    async def _inject(self, fault: str, victim: Process, joiner: Any, moment: str, publishing: asyncio.Task[Any]) -> None:
        """Somewhere in the phase `moment` of the publication that is beginning."""
        if fault not in AT_A_MOMENT:
            return
        if moment in PHASES:
            reached = asyncio.create_task(self._fleet.moments.reached[moment].wait())
            await asyncio.wait({reached, publishing}, return_when=asyncio.FIRST_COMPLETED)
            reached.cancel()
        await asyncio.sleep(self._random.uniform(0, SPAN))
        if fault == CUT:
            with suppress(ConnectionError):  # the victim is lost already
                await victim.ask("cut")
        elif fault == JOIN:
            self._fleet.arrive(joiner)
        else:
            victim.signal(signal.SIGKILL if fault == KILL else signal.SIGSTOP)
        if fault == PAUSE:
            await asyncio.sleep(0.5)
            victim.signal(signal.SIGCONT)

    async def _spare(self) -> Process:
        """A rollout that has loaded, and of which nobody knows yet."""
        process = await self._fleet.process(JOINER, self._joiners)
        self._joiners += 1
        process.leaves = True
        return process

    async def _settle(self) -> None:
        """Everybody is back, and right."""
        here = self._fleet
        if any(process.stopped for process in here.rollouts):
            return  # the next publication finds out
        await until(lambda: not any(process.killed for process in here.rollouts), RECOVERY)
        await here.settled(SIZE + (JOINER in here.processes), RECOVERY)
        await self._verify()
        if JOINER in here.processes:
            here.processes[JOINER].signal(signal.SIGKILL)
            await here.settled(SIZE, RECOVERY)

    async def _verify(self) -> None:
        """Every process answers, and whoever serves has exactly the committed weights."""
        here, trainer = self._fleet, self._fleet.processes[TRAINER]
        awake = [process for process in here.rollouts if process.answers]
        await asyncio.gather(*(self._answers(process) for process in (trainer, *awake)))
        serving = [process for process in awake if process.port in here.pool.serving]
        committed = here.publisher.committed
        sender = await trainer.ask("report")
        for process in serving:
            with suppress(ConnectionError):  # it was killed just now
                held = await process.ask("report")
                self._compare(process, held, sender["digest"], committed)

    def _compare(self, process: Process, held: dict[str, Any], digest: str, committed: PolicyVersion | None) -> None:
        check, name = self._check, f"{process.name} ({process.incarnation})"
        assert committed is not None
        check(held["version"] == committed.pack(), f"{name} serves {held['version']}, committed is {committed.pack()}")
        check(held["digest"] == digest, f"{name}: the weights of version {committed} differ from the sender's")
        check(held["swapped"] == sorted(set(held["swapped"])), f"{name}: versions went back: {held['swapped']}")

    async def _answers(self, process: Process) -> None:
        try:
            await asyncio.wait_for(process.port.status(), STATUS)
        except Exception as error:  # noqa: BLE001
            self._check(not process.answers, f"{process.name} ({process.incarnation}) does not answer: {error!r}")

    async def _generate(self) -> None:
        """Groups, one after the other, as in a run: until cancelled."""
        await until(lambda: bool(self._fleet.pool.serving), RECOVERY)
        sampling = SamplingParams(max_new_tokens=16)
        while True:
            request = GroupRequest(group_id=self.groups, prompt=np.arange(8, dtype=np.int32), n=2, seed=1, sampling=sampling)
            group = await self._fleet.pool.generate_anywhere(request)
            self._check(group.oldest <= group.newest, f"a group of versions {group.oldest} to {group.newest}")
            self.groups += 1
            await asyncio.sleep(0.02)


async def trial(rounds: int, seed: int, transport: str, folder: Path) -> Trial:
    """Raises what a publication ended with that did not end in a commit, or a promise that was not kept."""
    async with fleet(folder, transport, SIZE) as here:
        one = Trial(here, seed)
        try:
            await one.run(rounds)
        except BaseException:
            for process in here.processes.values():
                process.signal(signal.SIGUSR1)  # every thread's stack goes to its log
            await asyncio.sleep(0.5)
            raise
    return one
