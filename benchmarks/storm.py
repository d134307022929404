"""`sluice bench storm`: a run of the quickstart's problems, asked by an agent, beside the same run in which 10 % of the
attempts at an episode crash, 5 % hang and 5 % answer garbage.

What crashes or answers garbage is played again, and so is work of which nothing comes: rates are of attempts, not of episodes.
An attempt that hangs is ended at its deadline.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
from msgspec import Struct

from benchmarks.compared import Compared
from benchmarks.staleness.runs import train_quickstart
from runtime import run_files
from runtime.ledger.reader import LedgerReader
from runtime.ledger.states import Phase
from runtime.telemetry.shown import LiteralTable
from runtime.telemetry.summary import Summary

AGENT = Path(__file__).parent / "agents" / "stormy.py"


class StormSettings(Struct, frozen=True):
    steps: int = 200
    staleness: int = 4
    episode: float = 1.0  # seconds of an agent, some four times what it takes
    deadline: float = 1800.0  # seconds of a run


FULL = StormSettings()
QUICK = StormSettings(steps=60)


class StormTrial(Struct, frozen=True):
    """One run. `outcomes`: of the episodes that were trained on, by how they ended; `repeated`: by reason, attempts of which
    nothing came; `left_over`: processes."""

    steps: int
    seconds: float
    episodes: int
    outcomes: dict[str, int]
    repeated: dict[str, int]
    attempts_per_second: float
    left_over: int


class StormReport(Struct):
    calm: StormTrial
    storm: StormTrial
    ratio: float  # attempts a second


async def measure(folder: Path, settings: StormSettings, show: Callable[[str], None]) -> StormReport:
    found = []
    for name in ("calm", "storm"):
        show(name)
        await train_quickstart(name, _changes(folder, name, settings), folder, settings.deadline)
        found.append(_trial(folder / name))
    calm, storm = found
    return StormReport(calm, storm, storm.attempts_per_second / calm.attempts_per_second)


def _changes(folder: Path, name: str, settings: StormSettings) -> list[str]:
    environment: dict[str, Any] = {
        "run": f"{AGENT}:run",
        "concurrency": 128,
        "failures_in_a_row": 64,
        "budgets": {"episode": settings.episode},
        "env": {"STORM": "1" if name == "storm" else "0"},
    }
    return [
        f"run.dir={json.dumps(str(folder / name))}",
        f"warmup.cache={json.dumps(str(folder))}",
        f"services.environment={msgspec.json.encode({'storm': environment}).decode()}",
        "rewards={rules: []}",
        f"training.steps={settings.steps}",
        f"training.staleness={settings.staleness}",
        "evaluation={every: 0, before: false, after: false}",
        "trackers=[{name: jsonl}]",
    ]


def _trial(folder: Path) -> StormTrial:
    summary = Summary.read(folder)
    outcomes, repeated = Counter[str](), Counter[str]()
    with LedgerReader(folder / run_files.LEDGER) as ledger:
        for group in ledger.groups(states=[Phase.RETIRED]):
            assert group.outcomes is not None
            outcomes.update(group.outcomes.reasons)
            repeated.update(group.outcomes.repeated)
    attempts = outcomes.total() + repeated.total()
    left = sum(str(AGENT) in " ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"]))
    return StormTrial(
        steps=summary.steps,
        seconds=summary.rl_seconds,
        episodes=outcomes.total(),
        outcomes=dict(outcomes.most_common()),
        repeated=dict(repeated.most_common()),
        attempts_per_second=attempts / summary.rl_seconds,
        left_over=left,
    )


def compared(report: StormReport) -> list[Compared]:
    return [Compared("attempts a second, storm / calm", [report.ratio])]


def render(report: StormReport) -> list[LiteralTable]:
    headers = ("run", "steps", "seconds", "episodes", "attempts/s", "ended", "played again", "processes left")
    table = LiteralTable(*headers, caption=f"attempts a second: {report.ratio:.2f} of the calm run's")
    for name in ("calm", "storm"):
        trial: StormTrial = getattr(report, name)
        told = [", ".join(f"{count} {reason}" for reason, count in each.items()) for each in (trial.outcomes, trial.repeated)]
        figures = [str(trial.steps), f"{trial.seconds:.1f}", str(trial.episodes), f"{trial.attempts_per_second:.1f}"]
        table.add_row(name, *figures, *told, str(trial.left_over))
    return [table]
