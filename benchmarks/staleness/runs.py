"""The runs of `sluice bench staleness`: which there are, how one is made, and what a finished one came to."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from launcher.node.supervisor import Supervisor
from launcher.node.topology import ProcessSpec
from runtime import run_files, timeouts
from runtime.config import Config, loading
from runtime.errors import SluiceError, UserError
from runtime.telemetry.record import read_jsonl
from runtime.telemetry.summary import Summary
from sluice import start

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"
NO_POWER = "training.lr_staleness_power=0"
VARIANTS = {"naive": (NO_POWER, "algorithm.loss=ppo"), "decoupled": (NO_POWER, "algorithm.loss=decoupled"), "default": ()}
"""What each changes of the configuration."""
OTHERS = {
    "m2po": (NO_POWER, "algorithm.loss=m2po"),
    "topr": (NO_POWER, "algorithm.loss=topr"),
    "geometric mask": (NO_POWER, "algorithm.loss=ppo", "algorithm.correction=geometric_mask", "algorithm.correction_high=2"),
    "interpolated": (NO_POWER, "algorithm.loss=decoupled", "algorithm.proximal=interpolated"),
    "four updates": (NO_POWER, "algorithm.loss=decoupled", "training.mini_batch_size=2"),
    "naive, by staleness": ("algorithm.loss=ppo",),
}
"""Likewise: tried where samples are oldest and the learning rate is highest."""
END_GRACE = timeouts.INTERRUPTED_GRACE + 2 * timeouts.FAILED_GRACE  # seconds until a run that is told to stop has done so


class StalenessSettings(Struct, frozen=True):
    steps: int = 200
    seeds: int = 5
    bounds: tuple[int, ...] = (0, 2, 8)
    rates: tuple[float, ...] = (1e-4, 3e-4)  # learning rates
    others: tuple[str, ...] = tuple(OTHERS)  # at the last bound and the last rate
    problems: int = 820  # held out of 1,600, a seed: five seeds give 4,100 a cell
    every: int = 25  # steps between evaluations, each of which takes some 10 to 20 of them
    deadline: float = 1800.0  # seconds of one run, its warm-up included
    depth: str = "bound"  # of `training.depth`


QUICK = StalenessSettings(seeds=1, rates=(1e-4,), others=())


class StalenessTrial(Struct, frozen=True):
    """One run that is to be made. `variant` is a key of VARIANTS or OTHERS."""

    rate: float
    bound: int
    variant: str
    seed: int

    @property
    def name(self) -> str:
        return f"lr{self.rate:g}-eta{self.bound}-{re.sub('[^a-z0-9]+', '-', self.variant)}-seed{self.seed}"


class EvaluationPoint(Struct, frozen=True):
    """An evaluation that fell due at `step`, answered by versions `oldest` to `newest`."""

    step: int
    oldest: int
    newest: int
    accuracy: float


class RunOutcome(Struct, frozen=True):
    """One run: `correct` of `problems` at its end, and its evaluations from step 0 to there. Staleness in versions."""

    seed: int
    correct: int
    problems: int
    curve: list[EvaluationPoint]
    staleness_mean: float
    staleness_max: int
    rl_seconds: float

    @property
    def accuracy(self) -> float:
        return self.correct / self.problems

    def steps_to(self, goal: float) -> int | None:
        """The newest version in the first evaluation that reached `goal`; None when none did."""
        return next((point.newest for point in self.curve if point.accuracy >= goal), None)


def plan(settings: StalenessSettings) -> list[StalenessTrial]:
    """Seed by seed, so that a machine that slows down does so for all cells alike."""
    return [StalenessTrial(*cell, seed) for seed in range(1, settings.seeds + 1) for cell in cells(settings)]


def cells(settings: StalenessSettings) -> list[tuple[float, int, str]]:
    """Rate, bound and variant."""
    base = [(rate, bound, variant) for rate in settings.rates for bound in settings.bounds for variant in VARIANTS]
    return base + [(settings.rates[-1], settings.bounds[-1], other) for other in settings.others]


def overrides(trial: StalenessTrial, settings: StalenessSettings, folder: Path) -> list[str]:
    """What a run changes of the quickstart. Paths are quoted, as they may hold what means something in YAML."""
    return [
        f"run.name={trial.name}",
        f"run.dir={json.dumps(str(folder / trial.name))}",
        f"run.seed={trial.seed}",
        "run.overwrite=true",
        f"warmup.cache={json.dumps(str(folder))}",
        f"warmup.seed={trial.seed}",
        f"warmup.eval_problems={settings.problems}",
        f"warmup.max_seconds={settings.deadline / 2:g}",
        "evaluation.problems=0",
        f"evaluation.every={settings.every}",
        "evaluation.before=true",
        "evaluation.after=true",
        f"training.optimizer.learning_rate={trial.rate:g}",
        *{**VARIANTS, **OTHERS}[trial.variant],
        f"training.steps={settings.steps}",
        f"training.staleness={trial.bound}",
        f"training.depth={settings.depth}",
        "checkpoint.every=0",
        "trackers=[{name: jsonl}]",
    ]


async def train(trial: StalenessTrial, settings: StalenessSettings, folder: Path) -> None:
    """One `sluice train` to its end. Raises SluiceError that names the run and its log."""
    await train_quickstart(trial.name, overrides(trial, settings, folder), folder, settings.deadline)


async def train_quickstart(name: str, changes: Sequence[str], folder: Path, deadline: float) -> None:
    """`train_to_its_end` of the quickstart."""
    await train_to_its_end(name, CONFIG, changes, folder, deadline)


async def train_to_its_end(name: str, config: Path, changes: Sequence[str], folder: Path, deadline: float) -> None:
    """`sluice train` of `config` with these changes, to its end, in a process of its own. Raises SluiceError that names the run
    and its log, which lies in `folder`."""
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    command = start.command("launcher.cli", "train", str(config), *changes)
    supervisor = Supervisor(logs)
    try:
        child = await supervisor.start(ProcessSpec(name=name, role="bench", command=command, env={}))
        try:
            await asyncio.wait_for(child.process.wait(), deadline)
        except TimeoutError:
            raise SluiceError(f"{name}: did not end within {deadline:g} s (log: {child.log})") from None
        if child.process.returncode:
            why = str(child.fault())
            raise SluiceError(f"{name}: {why}" + f" (log: {child.log})" * (str(child.log) not in why))
    finally:
        await supervisor.end_all(END_GRACE)


def outcome(trial: StalenessTrial, settings: StalenessSettings, folder: Path) -> RunOutcome | None:
    """What the run came to; None unless it lies there with these very settings and came to its end."""
    run_dir = folder / trial.name
    wanted = loading.resolve(loading.load(CONFIG, overrides(trial, settings, folder)))
    try:
        if _asked(loading.load(run_dir / run_files.CONFIG, ())) != _asked(wanted):
            return None
        summary, rows = Summary.read(run_dir), read_jsonl(run_dir / run_files.METRICS)
    except UserError:  # nothing there, or not whole, or of a schema that is no more
        return None
    evaluations = [row for row in rows if "eval/accuracy" in row]
    last = evaluations[-1] if evaluations else {"step": -1}
    if last["step"] != settings.steps:  # there is one at the last step only when everything is trained
        return None
    return RunOutcome(
        seed=trial.seed,
        correct=round(last["eval/accuracy"] * last["eval/samples"]),
        problems=round(last["eval/samples"]),
        curve=[
            EvaluationPoint(row["step"], int(row["eval/version_oldest"]), int(row["eval/version_newest"]), row["eval/accuracy"])
            for row in evaluations
        ],
        staleness_mean=summary.staleness_mean,
        staleness_max=summary.staleness_max,
        rl_seconds=summary.rl_seconds,
    )


def _asked(config: Config) -> Config:
    """What was asked for: without what the launcher adds once the warm-up, which is part of the comparison, is done."""
    return replace(
        config,
        run=replace(config.run, resume="never"),
        model=replace(config.model, path="", reference=""),
        data=replace(config.data, train="", eval=""),
    )
