"""One simulated run: the coordinator as it is, with its ledger on a file system, over processes that are modelled."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from runtime import run_files
from runtime.config import Config
from runtime.coordinator.run import TrainingRun
from runtime.coordinator.run_context import RunContext
from runtime.data.handlers import Problem
from runtime.data.prompts import Prompts
from runtime.evaluation.held_out import HeldOut
from runtime.evaluation.sets import evaluation_sets
from runtime.ledger.journal import LedgerWriter
from runtime.process.aio import first_error
from runtime.simulation.cluster import CommandDeadlines, Observer, SimulatedCluster
from runtime.simulation.costs import Costs
from runtime.simulation.loop import BEGAN, SimulatedLoop, SimulatedWorld
from runtime.telemetry.metrics import Metrics
from runtime.telemetry.summary import Summary
from runtime.telemetry.trackers import Trackers

WALL = 1.7e9  # seconds since the epoch


class Outcome(Struct):
    """What became of a run. `metrics` are its steps', `trace` is of all lives of its coordinator."""

    summary: Summary | None = None
    metrics: list[tuple[int, Metrics]] = field(default_factory=list)
    lives: int = 1
    seconds: float = 0.0  # virtual, of the last life
    rounds: int = 0
    trace: str = ""


class _Metrics(Trackers):
    """Keeps the points."""

    def __init__(self, config: Config, points: list[tuple[int, Metrics]]):
        super().__init__(replace(config, trackers=[]), config.run.dir)
        self._points = points

    async def log(self, step: int, metrics: Metrics, timeout: float = 0.0) -> None:
        self._points.append((step, metrics))


class _Numbers:
    """A tokenizer whose text is the numbers of its tokens."""

    def decode(self, ids: np.ndarray, skip_special: bool = True) -> str:
        return " ".join(map(str, ids.tolist()))

    def decode_batch(self, batch: Sequence[np.ndarray], skip_special: bool = True) -> list[str]:
        return [self.decode(ids) for ids in batch]


def prompts(name: str, count: int, tokens: int) -> Prompts:
    """Problems of which nothing matters but how many tokens they have."""
    problems = [
        Problem(f"{name}:{i}", [{"role": "user", "content": str(i)}], str(i), f"simulated/{name}") for i in range(count)
    ]
    prompt = np.arange(1, tokens + 1, dtype=np.int32)
    return Prompts(problems=problems, tokens=[prompt] * count, rows=count, dropped={})


class Simulation(SimulatedWorld):
    """`run` does all of it, in the folder `config.run.dir`, which is made."""

    def __init__(
        self,
        config: Config,
        costs: Costs,
        deadlines: CommandDeadlines,
        seed: int = 0,
        *,
        observer: Observer | None = None,
        problems: int = 1000,
        nodes: int = 1,
    ):
        self.config = config
        self.outcome = Outcome()
        self.training: TrainingRun | None = None
        self.cluster: SimulatedCluster | None = None
        self.observer = observer or Observer()
        self._costs, self._deadlines, self._seed, self._nodes = costs, deadlines, seed, nodes
        self._train = prompts("train", problems, costs.prompt_tokens)
        self._held_out = [
            HeldOut(each, prompts(each.name, each.problems or 16, costs.prompt_tokens)) for each in evaluation_sets(config)
        ]
        self._chance = random.Random(f"{seed}/storage")

    def run(self) -> Outcome:
        """Raises Stuck, and what ends the run as it would a real one."""
        Path(self.config.run.dir).mkdir(parents=True, exist_ok=True)
        loop = self.new_loop(BEGAN)
        try:
            self.outcome.summary = loop.run(self.live(loop, self.config))
            return self.outcome
        finally:
            self.close(loop)

    # ------------------------------------------------------------------------------------------ one life of the coordinator

    def new_loop(self, began: float) -> SimulatedLoop:
        """For the next life. It has no files and no sockets: what asyncio declares for those it does not have."""
        return SimulatedLoop(f"{self._seed}/{self.outcome.lives}", self, began)  # type: ignore[abstract]

    def close(self, loop: SimulatedLoop) -> None:
        self.outcome.seconds = loop.time() - BEGAN
        self.outcome.rounds += loop.rounds
        self.outcome.trace += loop.trace
        self.training = None
        loop.end()

    async def live(self, loop: SimulatedLoop, config: Config, clock: float = 0.0) -> Summary:
        """The run in the folder of `config`. `clock`: seconds by which the wall clock is off."""
        life = f"{self._seed}/{self.outcome.lives}"
        cluster = self.cluster = SimulatedCluster(loop, config, self._costs, life, self._deadlines, self.observer, self._nodes)
        ledger = await LedgerWriter.open(Path(config.run.dir) / run_files.LEDGER, config.ledger.segment_bytes)
        try:
            context = RunContext(
                config=config,
                ledger=ledger,
                trackers=_Metrics(config, self.outcome.metrics),
                train=self._train,
                held_out=self._held_out,
                text=_Numbers(),
                stop_token_ids=(0,),
                supervisor=cluster,
                epoch=WALL + clock,
                launched=loop.time(),
            )
            run = self.training = TrainingRun(context, cluster.register)
            self.began(loop, cluster)
            working = asyncio.ensure_future(run.execute())
            waits: set[asyncio.Future[Any]] = {working, cluster.failed}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                cluster.failed.result()
            try:
                return working.result()
            except Exception as error:  # noqa: BLE001 - it comes in a group
                raise first_error(error) from None
        finally:
            await ledger.close()

    def began(self, loop: SimulatedLoop, cluster: SimulatedCluster) -> None:
        """Called once everybody is there, before the run begins."""

    def storage_seconds(self) -> float:
        return self._costs.storage.draw(self._chance)
