"""`sluice bench staleness`: what training on stale samples costs, and what holds.

The quickstart is trained with each bound η on staleness and at two learning rates: *naive* (clipped about the policy that
sampled, as if it were the one being trained), *decoupled*, both with the learning rate as configured, and by *default*:
decoupled, with a rate that falls with staleness. Others are tried where samples are oldest and the rate is highest. Every
variant has several seeds. A seed has a split of the sums, a corpus and a policy of its own; all runs of that seed start from
it, so that variants can be compared in pairs.

Two 95 % intervals of a final accuracy are told, as they answer different questions:

- **over seeds**, the headline: Student's t over the seeds' accuracies. The seeds are what is independent: all problems of a
  seed are answered by one policy, so what its training came to by chance moves them together. This interval is about the
  mean over seeds, those included that were not run.
- **Wilson**, on the problems of all seeds pooled: the error of measuring these very policies on finitely many problems. It
  takes the answers as independent, which those of one policy are not (besides, a + b and b + a are held out together), so
  it says nothing of what another seed would come to.

Evaluations beside training use all problems too, a few at a time, while versions change: each is placed at the middle of the
versions that answered, and "steps to 90 %" counts the newest of them. The last one is of the last version alone.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import fmean

import msgspec

from benchmarks.staleness.report import FIGURE_FILE, StalenessReport, compared, render, report
from benchmarks.staleness.runs import QUICK, RunOutcome, StalenessSettings, StalenessTrial, outcome, plan, train
from runtime import run_files
from runtime.errors import SluiceError

__all__ = ["QUICK", "StalenessReport", "StalenessSettings", "compared", "measure", "render"]

REPORT_FILE = "staleness.json"
MOST_FAILURES = 3  # runs that may fail before the rest is not tried
BULKY = (run_files.CHECKPOINTS, run_files.LEDGER, run_files.MODEL)  # of a finished run, not needed for the figures

Show = Callable[[str], None]
Start = Callable[[StalenessTrial, StalenessSettings, Path], Awaitable[None]]


async def measure(
    folder: Path,
    settings: StalenessSettings,
    show: Show = lambda line: None,
    tell: Show = lambda line: None,
    start: Start = train,
) -> StalenessReport:
    """Make the runs that are not there yet, then the report and the figure under `folder`.

    `show` is given what is under way, `tell` each result. Raises SluiceError that names the runs that failed, each with its
    log: one does not keep the others from running, a third does.
    """
    trials, failed, taken = plan(settings), list[str](), list[float]()
    outcomes = {trial: found for trial in trials if (found := outcome(trial, settings, folder)) is not None}
    missing = [trial for trial in trials if trial not in outcomes]
    if outcomes:
        tell(f"{len(outcomes)} of {len(trials)} runs are there already")
    for number, trial in enumerate(missing):
        left = f", some {(len(missing) - number) * fmean(taken) / 60:.0f} min left" if taken else ""
        show(f"run {len(trials) - len(missing) + number + 1} of {len(trials)}: {trial.name}{left}")
        begun = time.monotonic()
        try:
            outcomes[trial] = await _made(trial, settings, folder, start)
        except SluiceError as error:
            failed.append(str(error))
            if len(failed) == MOST_FAILURES:
                break
        else:
            tell(f"{trial.name}: {outcomes[trial].accuracy:.1%} in {outcomes[trial].rl_seconds:.0f} s")
        taken.append(time.monotonic() - begun)
    if failed:
        raise SluiceError(
            f"bench staleness: {len(failed)} of {len(trials)} runs failed, {len(outcomes)} are finished and kept; the same "
            "command goes on with the others\n" + "\n".join(failed)
        )
    return _published(report(settings, outcomes, folder), folder)


async def _made(trial: StalenessTrial, settings: StalenessSettings, folder: Path, start: Start) -> RunOutcome:
    """Make a run, and keep of its folder what the report or a reader of its course may need. Raises SluiceError."""
    await start(trial, settings, folder)
    if (found := outcome(trial, settings, folder)) is None:
        raise SluiceError(f"{trial.name}: ended before its last step (log: {folder / 'logs' / trial.name}.log)")
    for name in BULKY:
        shutil.rmtree(folder / trial.name / name, ignore_errors=True)
    return found


def _published(made: StalenessReport, folder: Path) -> StalenessReport:
    from benchmarks.staleness.figure import draw

    (folder / REPORT_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(made), indent=2) + b"\n")
    draw(made, folder / FIGURE_FILE)
    return made
