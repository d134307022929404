"""`sluice eval`: evaluates the model of a configuration on its evaluation sets. Runs only rollouts and rewards."""

from __future__ import annotations

import argparse
from pathlib import Path

from msgspec.structs import replace
from rich.console import Console

from launcher import run_folder
from launcher.job import Interrupted, Job, watched
from launcher.node.local_node import LocalNode
from launcher.view import View
from runtime.config import Cluster, Config, loading
from runtime.errors import UserError
from runtime.evaluation import results as evaluation
from runtime.evaluation.results import EvaluationResult, evaluation_sets
from runtime.telemetry.shown import say
from sluice import start

FOLDER = "eval"  # in the folder of the run whose configuration it takes; that run stays as it is


def run(options: argparse.Namespace) -> None:
    config = own_folder(loading.resolve(loading.load(options.config, options.overrides)))
    result = watched(options.verbose, lambda view: evaluate(config, view))
    console = Console()
    console.print(evaluation.render([result]))
    say(console, f"results and replies: {evaluation.folder_for(Path(config.run.dir), result.step)}")


def own_folder(config: Config, name: str = FOLDER) -> Config:
    """Return the configuration with a folder inside the run's folder, on this machine alone."""
    run = replace(config.run, dir=str(Path(config.run.dir) / name), resume="never")
    return replace(config, run=run, cluster=Cluster())


async def evaluate(config: Config, view: View) -> EvaluationResult:
    """Evaluate in the folder `run.dir`. Raises UserError, ServiceFault, Interrupted. Ends all processes in every case."""
    return await Evaluating(config, view, LocalNode.of(config)).run()


class Evaluating(Job[EvaluationResult]):
    trains = False
    stopped_early = start.STOPPED["eval"]
    stopped_late = "stopped at once; the evaluation has no results"

    async def prepared(self) -> Config:
        """Return the configuration, after the warm-up if it makes the model or the sets. Delete what an earlier one left."""
        config = self.config
        self.check(config)
        if not config.run.overwrite and evaluation.read(self.folder):
            raise UserError(
                f"run.dir: {self.folder} holds an evaluation already; choose another run.name or run.dir, or set "
                "run.overwrite=true to replace it"
            )
        if config.warmup is not None and not (config.model.path and evaluation_sets(config)):
            config = await self.warmed_up(config)
        config = self.chosen(config)
        run_folder.begin(self.folder, config)
        return config

    def chosen(self, config: Config) -> Config:
        return config

    async def outcome(self) -> EvaluationResult:
        found = evaluation.read(self.folder)
        if not found:
            replies = evaluation.folder_for(self.folder, 0)
            raise Interrupted(f"stopped before the evaluation was done; the replies so far are in {replies}", 0)
        return found[-1]
