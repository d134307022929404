"""One simulated run, through all lives of its coordinator: from a crash it goes on as `run.resume=auto` does."""

from __future__ import annotations

import asyncio
import random
import shutil
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
from runtime.errors import StorageFull
from runtime.evaluation.held_out import HeldOut
from runtime.evaluation.sets import evaluation_sets
from runtime.ledger import checkpoint
from runtime.ledger.journal import LedgerWriter
from runtime.process.aio import first_error
from runtime.simulation.cluster import CommandDeadlines, SimulatedCluster
from runtime.simulation.costs import Costs
from runtime.simulation.faults import Fault, Faults
from runtime.simulation.loop import BEGAN, Crash, SimulatedLoop, SimulatedWorld
from runtime.simulation.witness import Witness
from runtime.telemetry.metrics import Metrics
from runtime.telemetry.summary import Summary
from runtime.telemetry.trackers import Trackers

WALL = 1.7e9  # seconds since the epoch


class Outcome(Struct):
    """What became of a run. `metrics` are its steps', `trace` is of all lives."""

    summary: Summary | None = None
    metrics: list[tuple[int, Metrics]] = field(default_factory=list)
    lives: int = 1
    seconds: float = 0.0  # virtual
    rounds: int = 0
    trace: str = ""
    witness: Witness | None = None


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
        faults: Sequence[Fault] = (),
        *,
        problems: int = 1000,
        nodes: int = 1,
    ):
        self._config, self._costs, self._deadlines, self._seed = config, costs, deadlines, seed
        self._nodes = nodes
        self._train = prompts("train", problems, costs.prompt_tokens)
        self._held_out = [
            HeldOut(each, prompts(each.name, each.problems or 16, costs.prompt_tokens)) for each in evaluation_sets(config)
        ]
        self._faults = Faults(faults, random.Random(f"{seed}/faults"))
        training, every = config.training, config.checkpoint.every
        redone = min(training.steps, every or training.steps)
        self.witness = Witness(training.staleness, training.groups_per_step, _patience(config), redone)
        self._chance = random.Random(f"{seed}/storage")
        self._run: TrainingRun | None = None
        self.cluster: SimulatedCluster | None = None
        self.outcome = Outcome(witness=self.witness)

    def run(self) -> Outcome:
        """Raises Broken, Stuck, and what ends the run as it would a real one."""
        began, folder, resume = BEGAN, Path(self._config.run.dir), ""
        while True:
            folder.mkdir(parents=True, exist_ok=True)
            config = replace(self._config, run=replace(self._config.run, dir=str(folder), resume=resume))
            life = f"{self._seed}/{self.outcome.lives}"
            # The loop has no files and no sockets: what asyncio declares for those it does not have.
            loop = SimulatedLoop(life, self, began)  # type: ignore[abstract]
            try:
                self.outcome.summary = loop.run(self._live(loop, config))
                self._close(loop)
                return self.outcome
            except (Crash, StorageFull):
                following = folder.with_name(f"{folder.name.split('~')[0]}~{self.outcome.lives}")
                shutil.copytree(folder, following)  # what a SIGKILL leaves is what lies there now
                self._close(loop)
                shutil.rmtree(folder)
                folder, began = following, loop.time()
                self.outcome.lives += 1
                self._faults.failing_writes = 0
                self.witness.moved(began)
                resume = checkpoint.resolve("auto", folder)
                if not resume:
                    shutil.rmtree(folder)
            except BaseException:
                self._close(loop)
                raise

    def _close(self, loop: SimulatedLoop) -> None:
        self.outcome.seconds = loop.time() - BEGAN
        self.outcome.rounds += loop.rounds
        self.outcome.trace += loop.trace
        self._run = None
        loop.end()

    # ------------------------------------------------------------------------------------------ around the loop

    def before_round(self, rounds: int) -> None:
        self._faults.crash(rounds)

    def after_round(self) -> None:
        if self._run is not None and self.cluster is not None:
            self.witness.look(self._run, self.cluster)

    def storage_seconds(self) -> float:
        return self._costs.storage.draw(self._chance)

    def check_storage(self) -> None:
        self._faults.check_disk()

    # ------------------------------------------------------------------------------------------ one life of the coordinator

    async def _live(self, loop: SimulatedLoop, config: Config) -> Summary:
        cluster = self.cluster = SimulatedCluster(
            loop, config, self._costs, f"{self._seed}/{self.outcome.lives}", self._deadlines, self.witness, self._nodes
        )
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
                epoch=WALL + self._faults.clock,
                launched=loop.time(),
            )
            run = self._run = TrainingRun(context, cluster.register)
            self._faults.begin(loop, cluster)
            working = asyncio.ensure_future(run.execute())
            waits: set[asyncio.Future[Any]] = {working, cluster.failed}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                cluster.failed.result()
            try:
                summary = working.result()
            except Exception as error:  # noqa: BLE001 - it comes in a group
                raise first_error(error) from None
        finally:
            await ledger.close()
        self.witness.ended(run, ledger.folder, cluster.trainer.state, config.training.steps)
        return summary


def _patience(config: Config) -> float:
    """More than any wait that is right, one after the other: what a step that loses a group may take."""
    deadlines, publication = config.deadlines, config.publication
    one = deadlines.start + deadlines.generate + deadlines.score + deadlines.train + deadlines.save
    sync = publication.join_timeout + 2 * publication.transfer_timeout + publication.commit_timeout + publication.abort_timeout
    return 3 * (one + 3 * sync)
