"""Hours at the quickstart's size with a fault every few seconds: `python -m tests.system.soak --minutes 120 --seed 1`.

::

    every 20 s: kill or stop a process, by seed ──►  the run goes on  ──►  each minute: memory, files, threads, bytes

Prints what each took in the second quarter of an hour and in the last, the accuracies, and how often the run was held up; ends
with 1 where the run ended, stood still, lost a group or left something behind. `--every 0`: without faults, to compare with.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from tests.system.chaos import RESTARTS, check_ledger
from tests.system.runs import ROOT, SOON, STOP, Live, belonging, check_gone, eventually, points, started, steps

QUICKSTART = ROOT / "configs" / "quickstart.yaml"
PROCESSES = ("coordinator", "trainer-0", "reference-0", "reward-0", "rollout-0", "rollout-1")
OVERRIDES = (
    "training.steps=1000000",
    "checkpoint.every=20",
    "evaluation.every=100",
    *(f"services.{role}.restarts={RESTARTS}" for role in ("coordinator", *{name[:-2] for name in PROCESSES[1:]})),
)
GROUPS = 8  # in a step of the quickstart
MINUTE = 60.0  # seconds between two samples
QUARTER = 15  # of them
STUCK = 300.0  # seconds without a step after which the run counts as hung

Sample = dict[str, float]


def sample(run: Live) -> Sample:
    """What the processes hold, summed by role and in megabytes, and what the run's folder does."""
    found: Sample = defaultdict(float)
    for process in belonging(run.folder):
        with suppress(psutil.Error):
            name = next((word for word in process.cmdline() if word in PROCESSES), "")
            role = name.partition("-")[0] or ("coordinator" if "services.coordinator" in process.cmdline() else "launcher")
            with process.oneshot():
                found[f"{role}: memory, MB"] += process.memory_info().rss / 1e6
                found[f"{role}: files"] += process.num_fds()
                found[f"{role}: threads"] += process.num_threads()
    for entry in run.folder.iterdir():
        files = [entry] if entry.is_file() else [one for one in entry.rglob("*") if one.is_file()]
        for one in files:
            with suppress(FileNotFoundError):
                found[f"folder: {entry.name}, MB"] += one.stat().st_size / 1e6
    found["shared memory, MB"] = psutil.disk_usage("/dev/shm").used / 1e6
    return found


class Soak:
    """The faults, and what was sampled meanwhile."""

    def __init__(self, run: Live, every: float, chance: random.Random):
        self.run, self.samples, self.faults = run, list[Sample](), Counter[str]()
        self._every, self._chance = every, chance
        self._furthest = (0, time.monotonic())

    def play(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        fault, look = time.monotonic() + (self._every or float("inf")), time.monotonic() + MINUTE
        while (now := time.monotonic()) < end:
            time.sleep(max(0.0, min(fault, look, end) - now))
            if time.monotonic() >= fault:
                fault += self._every
                self._fault()
            if time.monotonic() >= look:
                look += MINUTE
                self._look()

    def _fault(self) -> None:
        number = self._chance.choice((signal.SIGKILL, signal.SIGSTOP))
        for name in self._chance.sample(PROCESSES, self._chance.choice((1, 1, 1, 2))):
            with suppress(psutil.NoSuchProcess, KeyError):  # it is away already
                self.run.member(name).send_signal(number)
                self.faults[f"{number.name} {name}"] += 1

    def _look(self) -> None:
        if (code := self.run.process.poll()) is not None:
            raise AssertionError(f"the run ended with {code}: {self.run.output[-2000:]}{self.run.errors[-2000:]}")
        step, done, now = self.run.steps(), len(steps(self.run.folder)), time.monotonic()  # some of them made again
        if done > self._furthest[0]:
            self._furthest = done, now
        assert now - self._furthest[1] < STUCK, f"no step after {step}: {self.run.output[-2000:]}"
        self.samples.append(sample(self.run))
        print(f"{len(self.samples)} min: step {step}, {sum(self.faults.values())} faults", flush=True)


def table(samples: Sequence[Sample]) -> str:
    """Markdown: medians of the second quarter of an hour and of the last."""
    early, late = samples[QUARTER : 2 * QUARTER] or samples, samples[-QUARTER:]
    lines = ["| what | minutes 15 to 30 | last 15 minutes |", "| --- | --- | --- |"]
    for what in sorted({what for one in samples for what in one}):
        medians = (statistics.median(one.get(what, 0.0) for one in part) for part in (early, late))
        lines.append(f"| {what} | " + " | ".join(f"{value:.1f}" for value in medians) + " |")
    return "\n".join(lines)


def accuracies(folder: Path) -> Mapping[int, float]:
    return {int(point["step"]): point["eval/accuracy"] for point in points(folder) if "eval/accuracy" in point}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--every", type=float, default=20.0, help="seconds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", type=Path)
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="sluice-soak-") as name,
        started(QUICKSTART, *OVERRIDES, folder=Path(name) / "run", modules=SOON) as run,
    ):
        run.reaches(5, STUCK)
        soak = Soak(run, arguments.every, random.Random(arguments.seed))
        try:
            soak.play(60.0 * arguments.minutes)
            run.reaches(run.steps() + 2, STUCK)  # a run that is stopped while its trainer is away ends at once
            run.interrupt()
            eventually((run.folder / "summary.json").exists, STUCK, "its end")
            assert run.wait(STOP) in (0, 130), run.output[-2000:]
            check_gone(run.folder)
            check_ledger(run.folder / "ledger", GROUPS)
        except AssertionError as error:
            sys.exit(f"seed {arguments.seed}: {error}")
        finally:
            kept = {"samples": soak.samples, "faults": soak.faults, "accuracy": accuracies(run.folder), "steps": run.steps()}
            if arguments.save:
                arguments.save.write_text(json.dumps(kept))
    print(table(soak.samples), kept["faults"], kept["accuracy"], f"{kept['steps']} steps", sep="\n")


if __name__ == "__main__":
    main()
