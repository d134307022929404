"""One simulation of `sluice bench scale`, in a process of its own: `python -m benchmarks.scale_trial REPLICAS STEPS`.

The coordinator's processor time is sampled: each millisecond of the process's own, the innermost function of `runtime` says
whether the coordinator computes or what is modelled. Prints the figures as JSON.
"""

from __future__ import annotations

import resource
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType

import msgspec
from msgspec import Struct

from runtime import config as schema
from runtime.config import Config
from runtime.simulation.engine import Costs, Fixed, LogNormal
from runtime.simulation.simulate import MEMORY, Simulation
from runtime.telemetry.startup import collect_rarely
from services.rpc.client import command_deadline

INTERVAL = 0.001  # seconds of processor time between two samples
WARM = 2  # steps that are not counted
GROUPS, SIZE, STALENESS = 1, 8, 1  # a replica's of a step, samples of a group
RUNTIME = str(Path(schema.__file__).parents[1])
MODELS = str(Path(RUNTIME) / "simulation")


class ScaleFigures(Struct):
    """Seconds are of the processor, `memory` is bytes: what the process grew by at its largest."""

    replicas: int
    steps: int
    samples: int  # of the steps that were counted
    coordinator_seconds: float
    seconds: float
    memory: int
    alive: int  # samples that may be alive at once


def configured(replicas: int, steps: int, folder: str) -> Config:
    return Config(
        run=schema.Run(name="scale", dir=f"{folder}/run", resume=""),
        sampling=schema.Sampling(group_size=SIZE, max_new_tokens=64),
        evaluation=schema.Evaluation(before=False, after=False),
        rewards=schema.Rewards(rules=[schema.Rule(name="gsm8k")], workers=replicas),
        training=schema.Training(steps=steps, staleness=STALENESS, groups_per_step=GROUPS * replicas),
        services=schema.Services(rollout=schema.Rollout(replicas=replicas, max_num_seqs=GROUPS * SIZE)),
        trackers=[],
    )


def costs(replicas: int) -> Costs:
    """Of a cluster whose trainer grows with its rollouts, so that a step takes as long at every size."""
    return Costs(reply_tokens=LogNormal(16.0, 0.5), train_token=2e-4 / replicas, update=1e-2, score=Fixed(2e-3))


class SampledRun(Simulation):
    """Counts samples of the processor's time from step `WARM` on."""

    coordinator = others = 0
    begun = 0.0  # when it began to count, in processor time

    def sample(self, number: int, frame: FrameType | None) -> None:
        while frame is not None and not frame.f_code.co_filename.startswith(RUNTIME):
            frame = frame.f_back
        if frame is None or frame.f_code.co_filename.startswith(MODELS):
            self.others += 1
        else:
            self.coordinator += 1

    def after_round(self) -> None:
        if not self.begun and self.training is not None and self.training.buffer.committed >= WARM:
            self.begun = time.process_time()
            self.coordinator = self.others = 0


def measure(replicas: int, steps: int) -> ScaleFigures:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with tempfile.TemporaryDirectory(prefix="sluice-scale-", dir=MEMORY if MEMORY.is_dir() else None) as folder:
        config = configured(replicas, steps, folder)
        run = SampledRun(config, costs(replicas), command_deadline)
        signal.signal(signal.SIGPROF, run.sample)
        signal.setitimer(signal.ITIMER_PROF, INTERVAL, INTERVAL)
        try:
            run.run()
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
    seconds = time.process_time() - run.begun
    per_step = GROUPS * SIZE * replicas
    return ScaleFigures(
        replicas=replicas,
        steps=steps,
        samples=(steps - WARM) * per_step,
        coordinator_seconds=seconds * run.coordinator / max(1, run.coordinator + run.others),
        seconds=seconds,
        memory=1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before),
        alive=(STALENESS + 1) * per_step,
    )


if __name__ == "__main__":
    collect_rarely()  # as the coordinator does
    sys.stdout.buffer.write(msgspec.json.encode(measure(int(sys.argv[1]), int(sys.argv[2]))) + b"\n")
