"""Every process of a simulated run: who starts it, ends it, and puts another in its place. It stands for the nodes' agents."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from runtime.cluster.restarts import Allowance
from runtime.cluster.topology import Instance, instances, is_group, settings_of, slots
from runtime.config import Config
from runtime.coordinator.register import Register, UnitChange, UnitState
from runtime.errors import SluiceError
from runtime.simulation.cores import Cores
from runtime.simulation.costs import Costs
from runtime.simulation.loop import SimulatedLoop
from runtime.simulation.process import SimulatedProcess
from runtime.simulation.roles import ROLES, SimulatedModel, SimulatedRollout
from runtime.simulation.weights import SyncEpoch
from runtime.status import Progress
from runtime.types import PolicyVersion, TrainGroup


class CommandDeadlines(Protocol):
    def seconds(self, role: str, command: Any) -> float:
        """Until the answer of a process of `role` to `command`, as the contract has it."""


class Observer:
    """Told what happens beyond the ports. This one asks nothing of it."""

    published = False  # in this life of the coordinator: whether its first version counts

    def applied(self, model: SimulatedModel, step: int, batch: Sequence[TrainGroup]) -> None:
        """A model updates."""

    def swapped(self, rollout: SimulatedRollout, version: PolicyVersion, epoch: SyncEpoch) -> None:
        """A rollout takes a version over."""

    def stopped(self, process: SimulatedProcess) -> None:
        """A process does nothing any more, and its connection stays."""


class SimulatedCluster:
    """`register` has every unit connected once it is made. It is the run's supervisor, too."""

    restarts = True

    def __init__(
        self,
        loop: SimulatedLoop,
        config: Config,
        costs: Costs,
        seed: str,
        deadlines: CommandDeadlines,
        observer: Observer,
        nodes: int = 1,
    ):
        self.loop, self.config, self.costs, self.seed = loop, config, costs, seed
        self.deadlines, self.observer = deadlines, observer
        self.register = Register()
        self.processes: dict[str, SimulatedProcess] = {}
        self.epochs: dict[int, SyncEpoch] = {}
        self.corrupt: set[str] = set()
        """The rollouts whose next version arrives with a wrong byte, and the trainer if it sends such a one."""
        self.failed: asyncio.Future[None] = loop.create_future()
        """Fails with what ends the run: a process without which it cannot go on is not started again."""
        self.judge = config.rewards.rules[0].name.rpartition(":")[2] if config.rewards.rules else "reward"
        self.reward_workers = config.rewards.workers or 1
        self.began = loop.time()
        self.progress = Progress()
        self._chance = random.Random(f"{seed}/cluster")
        self.slots = slots(config)
        self._allowances: dict[str, Allowance] = {}
        self._nodes: dict[str, str] = {}
        self.cores = {f"node-{number}": Cores(loop, costs.cores) for number in range(nodes)}
        self.coordinator_busy = 0.0  # seconds
        self._inbox: deque[tuple[float, Callable[[], None]]] = deque()  # that the coordinator has not looked at yet
        for number, unit in enumerate(self._units()):
            self._nodes[unit.name] = f"node-{number % nodes}"
            self._allowances[unit.name] = Allowance(settings_of(config, unit).restarts)  # type: ignore[attr-defined]
            self._spawn(unit.role, unit.name, 0)
        self.register.subscribe(self._look)

    def report(self, progress: Progress) -> None:
        self.progress = progress
        self.observer.published = self.observer.published or progress.phase not in ("starting", "recovering")
        self.loop.note(f"{progress.phase} {progress.step}")

    def vacated(self) -> None:
        """Simulated processes hold no memory."""

    def lend(self, lent: bool) -> None:
        """The trainer's devices help all rollouts alike, or are its own again."""
        rollouts = [one for one in self.processes.values() if isinstance(one, SimulatedRollout)]
        for rollout in rollouts:
            rollout.engine.help(self.config.services.trainer.processes / len(rollouts) if lent else 0.0)

    def arrive(self, deliver: Callable[[], None], nbytes: int = 0) -> None:
        """An answer with a payload of `nbytes` reaches the coordinator, whose one thread takes the one after the other."""
        seconds = self.costs.coordinator_message + nbytes * self.costs.coordinator_byte
        if not seconds:
            deliver()
            return
        self._inbox.append((seconds, deliver))
        if len(self._inbox) == 1:
            self.loop.create_task(self._take())

    async def _take(self) -> None:
        while self._inbox:
            seconds, deliver = self._inbox[0]
            began = self.loop.time()
            await self.cores["node-0"].spend(seconds)
            self.coordinator_busy += self.loop.time() - began
            deliver()
            self._inbox.popleft()

    def kill(self, process: SimulatedProcess) -> None:
        """It ends; its node starts another where it may."""
        if not process.alive:
            return
        process.kill()
        delay = self._allowances[process.name].delay(self.loop.time())
        if delay is not None:
            start = delay + self.costs.start.draw(self._chance)
            self.loop.call_later(start, self._spawn, process.role, process.name, process.incarnation + 1)
        elif process.is_group or not self.register.has_others(process):
            self.loop.call_later(self.costs.delay.draw(self._chance), self._fail, process.name)

    @property
    def trainer(self) -> SimulatedModel:
        found = self.processes["trainer-0"]
        assert isinstance(found, SimulatedModel)
        return found

    def _units(self) -> list[Instance]:
        return [unit for unit in instances(self.config) if unit.rank == 0 or not is_group(self.config, unit.role)]

    def _spawn(self, role: str, name: str, incarnation: int) -> None:
        process = self.processes[name] = ROLES[role](self, name, incarnation, self._nodes[name])
        self.register.add(role, process)

    def _fail(self, name: str) -> None:
        if not self.failed.done():
            self.failed.set_exception(SluiceError(f"{name}: is not started again"))

    def _look(self, change: UnitChange) -> None:
        """Who is lost to the run is ended by its node, which hears of it from the coordinator."""
        unit = change.unit
        process = self.processes.get(unit.name)
        if unit.state is UnitState.LOST and process is not None and process.incarnation == unit.incarnation and process.alive:
            self.loop.call_later(self.costs.delay.draw(self._chance), self.kill, process)
