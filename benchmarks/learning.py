"""`sluice bench learning`: the time that training takes to an accuracy, of a whole run and of the plain loop.

The quickstart is trained until an evaluation finds 90 % of the held-out sums right: by `sluice train`, with all its services,
and by the plain loop, with one thread and with two. All start from the same warmed model, with the same problems, rewards,
learning rate and its ramp, groups a step, group size, KL term and evaluation cadence; the run's decoupled loss takes samples of
earlier versions, where the plain loop, which is on-policy, has ratios of 1. A seed has a split, a warmed model and draws of its
own.

The clock starts with training: neither the start of processes, the loading of the model, the warm-up nor the evaluation before
training is in it. The evaluations during training count on both sides, with what they take there: in the plain loop training
waits for them, in a run they take rollouts' slots and training goes on, so the clock stops some steps later than the one that
is evaluated. Each has the same held-out problems, greedy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from msgspec import Struct

from benchmarks.compared import Compared
from benchmarks.staleness.runs import train_quickstart
from benchmarks.worker import Worker
from runtime import run_files
from runtime.config import loading
from runtime.telemetry.record import read_jsonl
from runtime.telemetry.shown import LiteralTable

SLUICE = "sluice train"
PLAIN = {1: "plain loop, one thread", 2: "plain loop, two threads"}
AIM = 1.1  # of the plain loop's time, at most


class LearningSettings(Struct, frozen=True):
    seeds: int = 5
    goal: float = 0.9
    every: int = 10  # steps between evaluations; the quickstart's 25 are coarse beside the some 60 that the goal takes
    steps: int = 300  # at most
    deadline: float = 1800.0  # seconds of one run, its warm-up included


FULL = LearningSettings()
QUICK = LearningSettings(seeds=1)


class LearningPoint(Struct, frozen=True):
    """An evaluation that fell due at `step`, and when its accuracy was known, in seconds since training began."""

    step: int
    seconds: float
    accuracy: float


class LearningTrial(Struct, frozen=True):
    """One training: its evaluations, the first before it. `seconds` and `step` of the first that reached the goal."""

    seed: int
    points: list[LearningPoint]
    step: int | None
    seconds: float | None

    @classmethod
    def of(cls, seed: int, points: list[LearningPoint], goal: float) -> LearningTrial:
        reached = next((point for point in points if point.accuracy >= goal), None)
        return cls(seed, points, reached.step if reached else None, reached.seconds if reached else None)


class LearningReport(Struct):
    """Trials by way, seed by seed. `ratios`: of each seed, the run's seconds over those of the plain loop with so many threads.

    `ratio` is the median of the run's seconds over the lower median of the plain loop's. A median is None, and so is a ratio,
    where a trial did not reach the goal.
    """

    goal: float
    every: int
    trials: dict[str, list[LearningTrial]]
    seconds: dict[str, float | None]
    ratios: dict[str, list[float | None]]
    ratio: float | None


async def measure(folder: Path, settings: LearningSettings, show: Callable[[str], None] = lambda line: None) -> LearningReport:
    """Seed by seed, each way in turn. Raises SluiceError that names the run and its log."""
    trials: dict[str, list[LearningTrial]] = {name: [] for name in (SLUICE, *PLAIN.values())}
    for seed in range(1, settings.seeds + 1):
        name = f"seed{seed}"
        show(f"seed {seed} of {settings.seeds}: {SLUICE}")
        await train_quickstart(name, overrides(name, seed, settings, folder), folder, settings.deadline)
        trials[SLUICE].append(LearningTrial.of(seed, points(read_jsonl(folder / name / run_files.METRICS)), settings.goal))
        config = loading.load(folder / name / run_files.CONFIG, ())
        for threads, way in PLAIN.items():
            show(f"seed {seed} of {settings.seeds}: {way}")
            async with Worker.started(config, threads, module="benchmarks.learning_trial") as worker:
                order = {"what": way, "goal": settings.goal, "every": settings.every, "steps": settings.steps}
                found = (await worker.ask(order))["points"]
            trials[way].append(LearningTrial.of(seed, [LearningPoint(*each) for each in found], settings.goal))
    return report(settings, trials)


def overrides(name: str, seed: int, settings: LearningSettings, folder: Path) -> list[str]:
    """What a run changes of the quickstart. Paths are quoted, as they may hold what means something in YAML."""
    return [
        f"run.name={name}",
        f"run.dir={json.dumps(str(folder / name))}",
        f"run.seed={seed}",
        f"warmup.cache={json.dumps(str(folder))}",
        f"warmup.seed={seed}",
        f"warmup.max_seconds={settings.deadline / 2:g}",
        f"evaluation.every={settings.every}",
        "evaluation.after=false",
        f"training.steps={settings.steps}",
        f"stop.accuracy={settings.goal}",
    ]


def points(rows: Sequence[dict[str, Any]]) -> list[LearningPoint]:
    """The evaluations of a run, by its metrics; training begins when the one before it is done."""
    found = [row for row in rows if "eval/accuracy" in row]
    return [LearningPoint(row["step"], row["time"] - found[0]["time"], row["eval/accuracy"]) for row in found]


def report(settings: LearningSettings, trials: dict[str, list[LearningTrial]]) -> LearningReport:
    seconds = {way: _median([trial.seconds for trial in of]) for way, of in trials.items()}
    ratios = {
        way: [_ratio(own.seconds, other.seconds) for own, other in zip(trials[SLUICE], trials[way], strict=True)]
        for way in PLAIN.values()
    }
    plain = [found for way in PLAIN.values() if (found := seconds[way]) is not None]
    ratio = _ratio(seconds[SLUICE], min(plain, default=None))
    return LearningReport(settings.goal, settings.every, trials, seconds, ratios, ratio)


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if len(known) == len(values) else None


def _ratio(over: float | None, under: float | None) -> float | None:
    return None if over is None or under is None else over / under


def compared(made: LearningReport) -> list[Compared]:
    return [Compared.of(f"seconds to {made.goal:.0%}, {SLUICE} / {way}", ratios, "< 1") for way, ratios in made.ratios.items()]


def render(made: LearningReport) -> list[LiteralTable]:
    table = LiteralTable(title=f"Seconds of training to {made.goal:.0%} accuracy", title_justify="left", title_style="bold")
    for name in ("", "median", "of each seed", "steps", f"{SLUICE} / this, by seed"):
        table.add_column(name, justify="left" if not name else "right")
    for way, trials in made.trials.items():
        table.add_row(
            way,
            _told(made.seconds[way], ".1f"),
            ", ".join(_told(trial.seconds, ".1f") for trial in trials),
            ", ".join(_told(trial.step, "d") for trial in trials),
            ", ".join(_told(ratio, ".2f") for ratio in made.ratios.get(way, [])),
        )
    table.caption = (
        f"medians, {SLUICE} / faster plain loop: {_told(made.ratio, '.2f')} (aim: at most {AIM}); "
        f"an evaluation every {made.every} steps, counted on both sides; –: not reached"
    )
    table.caption_justify = "left"
    return [table]


def _told(value: float | None, form: str) -> str:
    return "–" if value is None else f"{value:{form}}"
