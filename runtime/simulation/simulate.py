"""One simulated run: the real coordinator, with its ledger on a file system, over modelled processes."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
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
from runtime.simulation.calibration import Observed, observe
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


class Prediction(Struct):
    observed: Observed
    busy: dict[str, list[float]]
    """By role: the share of the time that each process spent computing."""


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
        return Prediction(observed, busy)


def refuse(config: Config) -> None:
    """Check that `config` can be simulated. Raises UserError with a line for each part that is not modelled."""
    unknown = sorted({one.role for one in instances(config)} - ROLES.keys())
    faults = [f"services.{role}: the role is not modelled, and cannot be simulated" for role in unknown]
    if len({(fleet.engine, fleet.tensor_parallel) for fleet in fleets(config).values()}) > 1:
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
