"""`sluice eval`: evaluates the model of a configuration on its evaluation sets. Runs only rollouts and rewards."""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path

import msgspec
from msgspec.structs import asdict, replace
from rich.console import Console

from launcher import run_folder
from launcher.job import Interrupted, Job, watched
from launcher.node.local_node import LocalNode
from launcher.view import View
from runtime.config import Cluster, Config, Evaluation, Source, loading
from runtime.data.handlers import extra, source_rows
from runtime.data.prepared import row_format_of, sources
from runtime.errors import UserError
from runtime.evaluation import results as evaluation
from runtime.evaluation.results import EvaluationResult, Generation, evaluation_sets
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


# ---- sluice play: plays one task of a configuration as in a run, and prints the conversation

PLAYED = "play"  # in the folder of the run whose configuration it takes
SILENT = "(the model gave no reply)"


def run_play(options: argparse.Namespace) -> None:
    config = loading.resolve(loading.load(options.config, options.overrides))
    played = watched(options.verbose, lambda view: play(config, options.task, view))
    say(Console(), shown(played))


async def play(config: Config, task: int, view: View) -> Generation:
    """Play a task, counted from 0 over all sources of the training data. Raises as `evaluate`; UserError for no such task."""
    config, data = own_folder(config, PLAYED), config.data
    held_out = data.eval or next((source.path for _, source in sources(data)), "")
    config = replace(config, data=replace(data, eval=held_out))  # the task replaces it
    playing = _OneTask(replace(config, run=replace(config.run, overwrite=True)), view, LocalNode.of(config))
    playing.task = task
    result = await playing.run()
    path = evaluation.folder_for(Path(config.run.dir), result.step) / f"{result.sets[0].name}{evaluation.SUFFIX}"
    (played,) = evaluation.read_replies(path)
    return replace(played, problem=playing.problem)


def shown(played: Generation) -> str:
    """Return the conversation branch by branch as the model saw and wrote it, and its outcome."""
    earned = "no reward" if played.reward is None else f"reward {played.reward:g}"
    of = [f"{name} {value:g}" for name, value in played.rules.items() if value is not None]
    silent = bool(played.outcome) and played.logprob is None
    asked = [SILENT] if silent else [played.prompt + branch for branch in (*played.earlier, played.reply)]
    of_what = f" ({', '.join(of)})" if of else ""
    return "\n\n".join([*asked, f"{played.problem}: {earned}{of_what}, {played.outcome or played.finish}"])


class _OneTask(Evaluating):
    task: int
    problem: str  # its id

    def chosen(self, config: Config) -> Config:
        data, left = config.data, self.task
        if left < 0:
            raise UserError(f"--task: {left} is below 0")
        for key, source in sources(data) or [("data.eval", Source(path=data.eval))]:
            path, row_format = source.path, row_format_of(source, data)
            for found in islice(source_rows(path, key), left, left + 1):
                self.problem = f"{found.source}:{found.position}"
                folder = Path(config.run.dir) / "task" / found.source
                folder.parent.mkdir(parents=True, exist_ok=True)
                file = folder.with_suffix(".jsonl")
                file.write_bytes(msgspec.json.encode(extra(found.row, list(found.row))) + b"\n")
                alone = replace(data, **asdict(row_format), train="", eval=str(file))
                return replace(config, data=alone, evaluation=Evaluation(temperature=config.sampling.temperature))
            left -= sum(1 for _ in source_rows(path, key))
        raise UserError(f"--task: {self.task}, but there are only {self.task - left} tasks")
