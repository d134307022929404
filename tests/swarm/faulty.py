"""A simulated run that goes wrong by seed, through all lives of its coordinator: from a crash it goes on as `run.resume=auto`
does. A witness says what does not hold."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from runtime import run_files, timeouts
from runtime.config import Config
from runtime.errors import StorageFull
from runtime.ledger import checkpoint, reader
from runtime.simulation.cluster import Deadline, SimulatedCluster, SimulatedModel
from runtime.simulation.engine import Costs
from runtime.simulation.loop import BEGAN, Crash, SimulatedLoop
from runtime.simulation.simulate import Simulation
from tests.swarm.faults import DAMAGES, Fault, Faults
from tests.swarm.witness import Witness


class FaultySimulation(Simulation):
    problems = 50

    def __init__(self, config: Config, costs: Costs, deadline: Deadline, seed: int, faults: Sequence[Fault] = (), **more: Any):
        training, every = config.training, config.checkpoint.every
        redone = min(training.steps, every or training.steps)
        self.witness = Witness(training.staleness, training.groups_per_step, _patience(config), redone)
        super().__init__(config, costs, deadline, seed, **more)
        self.observer = self.witness
        self.said: list[str] = []  # of damaged ledgers
        self._faults = Faults(faults, random.Random(f"{seed}/faults"))

    def run(self) -> None:
        """Raises Broken, Stuck, and what ends the run as it would a real one."""
        began, folder, resume = BEGAN, Path(self.config.run.dir), ""
        while True:
            folder.mkdir(parents=True, exist_ok=True)
            config = replace(self.config, run=replace(self.config.run, dir=str(folder), resume=resume))
            loop = self.new_loop(began)
            try:
                loop.run(self.live(loop, config, self._faults.clock))
                self.close(loop)
                return
            except (Crash, StorageFull):
                following = folder.with_name(f"{folder.name.split('~')[0]}~{self.lives}")
                shutil.copytree(folder, following)  # what a SIGKILL leaves is what lies there now
                self.close(loop)
                shutil.rmtree(folder)
                folder, began = following, loop.time()
                self.lives += 1
                self._faults.failing_writes = 0
                self.witness.moved(began)
                resume = checkpoint.resolve("auto", folder)
                if not resume:
                    shutil.rmtree(folder)
                elif self._faults.damage:
                    DAMAGES[self._faults.damage](folder / run_files.LEDGER)
                    reader.examine(folder, Path(resume), self.said.append)
                    self.witness.damaged, self._faults.damage = True, ""
            except BaseException:
                self.close(loop)
                raise

    async def live(self, loop: SimulatedLoop, config: Config, clock: float = 0.0) -> None:
        await super().live(loop, config, clock)
        assert self.training is not None and self.cluster is not None
        trainer = self.cluster.processes["trainer-0"]
        assert isinstance(trainer, SimulatedModel)
        ledger = Path(config.run.dir) / run_files.LEDGER
        prompts = len(self._train.problems)
        self.witness.ended(self.training, ledger, trainer.state, config.training.steps, prompts)

    def began(self, loop: SimulatedLoop, cluster: SimulatedCluster) -> None:
        self._faults.begin(loop, cluster)

    def before_round(self, rounds: int) -> None:
        self._faults.crash(rounds)

    def after_round(self) -> None:
        if self.training is not None and self.cluster is not None:
            self.witness.look(self.training, self.cluster)

    def check_storage(self) -> None:
        self._faults.check_disk()


def _patience(config: Config) -> float:
    """More than any wait that is right, one after the other: what a step that loses a group may take."""
    deadlines, weight_sync = config.deadlines, config.weight_sync
    one = deadlines.start + deadlines.generate + deadlines.score + deadlines.train + deadlines.save
    sync = weight_sync.join_timeout + 2 * weight_sync.transfer_timeout + weight_sync.commit_timeout + timeouts.SYNC_ABORT
    return 3 * (one + 3 * sync)
