"""One simulated run: the real coordinator, with its ledger on a file system, over modelled processes."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from runtime import run_files
from runtime.cluster.topology import fleets, instances
from runtime.config import Config, Rollout, StopConditions
from runtime.coordinator.metrics_recorder import RunContext, RunHistory
from runtime.coordinator.run import TrainingRun
from runtime.data.handlers import Problem
from runtime.data.prepared import Prompts
from runtime.errors import UserError
from runtime.evaluation.results import HeldOut, evaluation_sets
from runtime.ledger.journal import LedgerWriter
from runtime.ledger.reader import LedgerReader
from runtime.process.waiting import first_error, unless_failed
from runtime.simulation.calibration import LEAST, Observed, observe
from runtime.simulation.cluster import ROLES, Deadline, Observer, SimulatedCluster
from runtime.simulation.engine import Costs, Fixed
from runtime.simulation.loop import BEGAN, SimulatedLoop, SimulatedWorld
from runtime.telemetry.metrics import Metrics
from runtime.telemetry.trackers import Trackers
from runtime.types import TextDecoder

WALL = 1.7e9  # seconds since the epoch


class _Metrics(Trackers):
    """Trackers that keep the points in a list."""

    def __init__(self, config: Config, points: list[tuple[int, Metrics]]):
        super().__init__(replace(config, trackers=[]), config.run.dir)
        self._points = points

    async def log(self, step: int, metrics: Metrics, timeout: float = 0.0) -> None:
        self._points.append((step, metrics))


class _Numbers(TextDecoder):
    """A tokenizer whose texts are token numbers."""

    def decode_batch(self, batch: Sequence[Sequence[int] | np.ndarray], skip_special: bool = True) -> list[str]:
        return [" ".join(map(str, ids)) for ids in batch]


def prompts(name: str, count: int, tokens: int) -> Prompts:
    """Make problems of `tokens` tokens each, without further content."""
    asked = [{"role": "user", "content": str(i)} for i in range(count)]
    problems = [Problem(f"{name}:{i}", [message], str(i), f"simulated/{name}") for i, message in enumerate(asked)]
    prompt = np.arange(1, tokens + 1, dtype=np.int32)
    return Prompts(problems=problems, tokens=[prompt] * count, rows=count, dropped={})


class Simulation(SimulatedWorld):
    """A simulated run, by `run`, in the folder `config.run.dir`, which `run` makes."""

    problems = 1000  # of the training data

    def __init__(self, config: Config, costs: Costs, deadline: Deadline, seed: int = 0, nodes: int = 1):
        self.config = config
        self.metrics: list[tuple[int, Metrics]] = []  # of the steps
        self.lives = 1  # of the coordinator
        self.seconds = 0.0  # virtual, of the last life
        self.trace = ""  # of all lives
        self.training: TrainingRun | None = None
        self.cluster: SimulatedCluster | None = None
        self.observer = Observer()
        self._costs, self._deadline, self._seed, self._nodes = costs, deadline, seed, nodes
        tokens = costs.prompt_tokens
        self._train = prompts("train", self.problems, tokens)
        self._held_out = [HeldOut(each, prompts(each.name, each.problems or 16, tokens)) for each in evaluation_sets(config)]
        self._chance = random.Random(f"{seed}/storage")

    def run(self) -> None:
        """Simulate the run. Raises Stuck, and the errors that end a real run."""
        Path(self.config.run.dir).mkdir(parents=True, exist_ok=True)
        loop = self.new_loop(BEGAN)
        try:
            loop.run(self.live(loop, self.config))
        finally:
            self.close(loop)

    # ------------------------------------------------------------------------------------------ one life of the coordinator

    def new_loop(self, began: float) -> SimulatedLoop:
        """Make the loop of the next life. It lacks asyncio's methods for files and sockets, which it has none of."""
        return SimulatedLoop(f"{self._seed}/{self.lives}", self, began)  # type: ignore[abstract]

    def close(self, loop: SimulatedLoop) -> None:
        self.seconds = loop.time() - BEGAN
        self.trace += loop.trace
        self.training = None
        loop.end()

    async def live(self, loop: SimulatedLoop, config: Config, clock: float = 0.0) -> None:
        """Execute the run in the folder of `config`. `clock`: offset of the wall clock in seconds."""
        life = f"{self._seed}/{self.lives}"
        cluster = self.cluster = SimulatedCluster(loop, config, self._costs, life, self._deadline, self.observer, self._nodes)
        ledger = await LedgerWriter.open(Path(config.run.dir) / run_files.LEDGER)
        try:
            context = RunContext(
                config=config,
                ledger=ledger,
                trackers=_Metrics(config, self.metrics),
                train=self._train,
                held_out=self._held_out,
                text=_Numbers(),
                stop_token_ids=(0,),
                supervisor=cluster,
                epoch=WALL + clock,
                launched=loop.time(),
                history=RunHistory(config.run.resume),
                holders=cluster.agents.there,
            )
            run = self.training = TrainingRun(context, cluster.register)
            self.began(loop, cluster)
            # The end of the run unblocks this, or the loss of a process that is not started again.
            await unless_failed([cluster.failed], run.execute())
        except Exception as error:  # noqa: BLE001 - errors come in groups
            raise first_error(error) from None
        finally:
            await ledger.close()

    def began(self, loop: SimulatedLoop, cluster: SimulatedCluster) -> None:
        """Prepare, once all processes are connected and before the run begins."""

    def storage_seconds(self) -> float:
        return self._costs.storage.draw(self._chance)


# ---- Prediction
# Predicts the speed of a configuration: simulated runs of some steps, also of variations of the configuration.

MEMORY = Path("/dev/shm")  # a file system in memory, if present
INTERVAL = 20  # the most steps between two checkpoints that `death_costs` simulates


class Prediction(Struct):
    observed: Observed
    busy: dict[str, list[float]]
    """By role: the share of the time that each process spent computing."""
    seconds: float  # virtual, of the whole run


def simulated(
    config: Config, costs: Costs, deadline: Deadline, steps: int, make: Callable[..., Simulation] = Simulation
) -> Prediction:
    """Simulate `steps` steps of `config`, evaluations before and after left out. Raises what `refuse` and real runs raise."""
    refuse(config)
    given = config.cluster.nodes
    nodes = config.cluster.min_nodes or 1 if given == "auto" else len(given)
    with tempfile.TemporaryDirectory(prefix="sluice-simulation-", dir=MEMORY if MEMORY.is_dir() else None) as folder:
        settings = replace(
            config,
            run=replace(config.run, dir=f"{folder}/run", resume=""),
            training=replace(config.training, steps=steps),
            stop=StopConditions(),
            evaluation=replace(config.evaluation, before=False, after=False),
            trackers=[],
        )
        simulation = make(settings, costs, deadline, nodes=nodes)
        simulation.run()
        with LedgerReader(Path(settings.run.dir) / run_files.LEDGER) as reader:
            observed = observe([point for _, point in simulation.metrics], reader.groups())
        cluster, seconds = simulation.cluster, simulation.seconds
        assert cluster is not None
        busy = {"coordinator": [cluster.coordinator_busy / seconds]}
        for process in cluster.processes.values():
            busy.setdefault(process.role, []).append(process.gauges()["busy_seconds_total"] / seconds)
        return Prediction(observed, busy, seconds)


class DyingSimulation(Simulation):
    """A simulated run whose trainer dies once, half a step after the step `dies_at`; 0: never."""

    def __init__(self, dies_at: int, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._dies_at, self._last = dies_at, (0, 0.0)

    def after_round(self) -> None:
        if not self._dies_at or self.training is None or self.cluster is None:
            return
        step, now = self.training.buffer.committed, self.cluster.loop.time()
        if step == self._dies_at:
            _, since = self._last
            self.cluster.loop.call_later((now - since) / 2, self.cluster.kill, self.cluster.processes["trainer-0"])
            self._dies_at = 0
        elif step != self._last[0]:
            self._last = step, now


class DeathCost(Struct):
    """The cost of one death of a trainer rank in an hour of training."""

    death: float  # seconds lost by the death
    copying: float = 0.0  # seconds lost in the hour by the copies in memory

    @property
    def share(self) -> float:
        """The share of the hour that is lost, 0 to 1."""
        return (self.death + self.copying) / 3600


def death_costs(config: Config, costs: Costs, deadline: Deadline) -> dict[str, DeathCost]:
    """Simulate the death of a trainer rank in the middle between two checkpoints, once with copies in memory ("auto") and once
    without ("off"). Of more than `INTERVAL` steps between two checkpoints the further ones cost what their repetition takes.
    Raises what `simulated` raises."""
    whole = config.checkpoint.every or config.training.steps
    every = min(whole, INTERVAL)
    dies_at, clean, found = every + every // 2, dict[str, Prediction](), dict[str, DeathCost]()
    for in_memory in ("off", "auto"):
        tried = replace(config, checkpoint=replace(config.checkpoint, every=every, in_memory=in_memory))
        clean[in_memory], dying = (
            simulated(tried, costs, deadline, dies_at + LEAST, partial(DyingSimulation, at)) for at in (0, dies_at)
        )
        death = dying.seconds - clean[in_memory].seconds
        if in_memory == "off":
            death += (whole - every) / 2 * clean["off"].observed.seconds["step"]
        found[in_memory] = DeathCost(max(0.0, death))
    steps = (clean[each].observed.seconds["step"] for each in ("off", "auto"))
    found["auto"].copying = 3600 * max(0.0, 1 - next(steps) / next(steps))
    return found


def refuse(config: Config) -> None:
    """Check that `config` can be simulated. Raises UserError with a line for each part that is not modelled."""
    unknown = sorted({one.role for one in instances(config)} - ROLES.keys())
    faults = [f"services.{role}: the role is not modelled, and cannot be simulated" for role in unknown]
    if len({(fleet.engine, fleet.parallel) for fleet in fleets(config).values()}) > 1:
        faults.append("services.rollout: fleets of different engines or sizes are not modelled: all rollouts have one speed")
    if faults:
        raise UserError("\n".join(faults))


def variations(config: Config, costs: Costs) -> Iterator[tuple[str, Config, Costs]]:
    """Yield useful variations: a name, the configuration, and the costs."""
    training, sampling, fleet = config.training, config.sampling, config.services.rollout
    if isinstance(fleet, Rollout):
        for replicas in (fleet.replicas - 1, fleet.replicas + 1):
            if replicas:
                yield f"rollouts {replicas}", _with_fleet(config, replicas=replicas), costs
        yield f"slots {2 * fleet.max_num_seqs}", _with_fleet(config, max_num_seqs=2 * fleet.max_num_seqs), costs
    for staleness in (training.staleness - 1, training.staleness + 1):
        if staleness >= 0:
            yield f"η {staleness}", replace(config, training=replace(training, staleness=staleness)), costs
    size = sampling.group_size
    yield f"groups of {2 * size}", replace(config, sampling=replace(sampling, group_size=2 * size)), costs
    delay = Fixed(10 * costs.delay.value) if isinstance(costs.delay, Fixed) else costs.delay
    yield "a link 10 times slower", config, replace(costs, bandwidth=costs.bandwidth / 10, delay=delay)
    longer = replace(sampling, max_new_tokens=2 * sampling.max_new_tokens)
    yield "replies twice as long", replace(config, sampling=longer), replace(costs, length_scale=2 * costs.length_scale)


def _with_fleet(config: Config, **changed: Any) -> Config:
    fleet = replace(config.services.rollout, **changed)  # type: ignore[type-var]
    return replace(config, services=replace(config.services, rollout=fleet))
