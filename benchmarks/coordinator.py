"""`sluice bench coordinator`: processor time of the coordinator for each sample, with few replicas and with many.

The coordinator is a process of its own, as in a run; everything else is in one other (`coordinator_trial`), whose engines
compute nothing. A step has as many groups for each replica, however many there are.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import psutil
from msgspec import Struct
from msgspec.structs import replace

from benchmarks.compared import Compared
from benchmarks.inputs import bench_config
from benchmarks.process import end
from runtime import run_files
from runtime.config import Config, Evaluation, Network, Rollout, loading
from runtime.errors import DeadlineExceeded, ServiceFault
from runtime.telemetry.shown import LiteralTable
from services.rpc import client
from sluice import start

DEADLINE = 300.0  # seconds of one run
AIM = 0.3  # ms a sample


class CoordinatorBenchSettings(Struct, frozen=True):
    replicas: tuple[int, ...] = (2, 20, 200)
    groups: int = 4  # of a step, for each replica
    samples: int = 12_800  # at least, of one measure
    warm: int = 3  # steps that are not counted
    rounds: int = 2


FULL = CoordinatorBenchSettings()
QUICK = CoordinatorBenchSettings(samples=6400)


class Cost(Struct):
    """Of one run, its first steps left out."""

    replicas: int
    samples: int
    seconds: float
    cpu_seconds: float  # the coordinator's
    memory: int  # bytes, resident, of the coordinator at the end

    @property
    def milliseconds(self) -> float:
        """Processor time for each sample."""
        return self.cpu_seconds / self.samples * 1e3


class CoordinatorBenchReport(Struct):
    """`milliseconds` of processor time for each sample, by replicas: the median of the rounds."""

    costs: list[Cost]
    milliseconds: dict[int, float]


async def measure(
    folder: Path, settings: CoordinatorBenchSettings, show: Callable[[str], None] = lambda line: None
) -> CoordinatorBenchReport:
    """Each number of replicas in turn. Raises UserError, ServiceFault."""
    config = await asyncio.to_thread(bench_config, folder)
    costs: list[Cost] = []
    for number in range(settings.rounds):
        for replicas in settings.replicas:
            show(f"round {number + 1} of {settings.rounds}: {replicas} replicas")
            costs.append(await _run(config, replicas, settings))
    by_replicas = {n: sorted(cost.milliseconds for cost in costs if cost.replicas == n) for n in settings.replicas}
    return CoordinatorBenchReport(costs, {n: found[len(found) // 2] for n, found in by_replicas.items()})


def _configured(config: Config, replicas: int, settings: CoordinatorBenchSettings, folder: Path) -> Config:
    groups = settings.groups * replicas
    per_step = groups * config.sampling.group_size
    steps = settings.warm + -(-settings.samples // per_step) + 1
    return replace(
        config,
        run=replace(config.run, dir=str(folder), resume=""),
        training=replace(config.training, groups_per_step=groups, steps=steps),
        evaluation=Evaluation(before=False, after=False),
        checkpoint=replace(config.checkpoint, in_memory="off"),  # engines that compute nothing have no state
        network=Network(security="none"),  # no agent gives keys; streams cost the same with them
        services=replace(
            config.services, rollout=Rollout(replicas=replicas, max_num_seqs=settings.groups * config.sampling.group_size)
        ),
        trackers=[],
    )


async def _run(config: Config, replicas: int, settings: CoordinatorBenchSettings) -> Cost:
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as temporary:
        folder = Path(temporary)
        config = _configured(config, replicas, settings, folder)
        (folder / run_files.CONFIG).write_text(loading.to_yaml(config))
        with (folder / "log").open("wb") as log:
            try:
                return await asyncio.wait_for(_watched(config, folder, log.fileno(), settings), DEADLINE)
            except TimeoutError:
                raise DeadlineExceeded("coordinator", "run", f"{replicas} replicas did not end", DEADLINE) from None
            except ServiceFault as fault:
                last = (folder / "log").read_text(errors="replace").strip().rpartition("\n")[2]
                raise ServiceFault(fault.service, fault.phase, f"{fault.reason}; the last line of the log: {last}") from fault


async def _watched(config: Config, folder: Path, log: int, settings: CoordinatorBenchSettings) -> Cost:
    """One run, from its first process to its last."""
    trial = await asyncio.create_subprocess_exec(
        *start.command("benchmarks.coordinator_trial", str(folder / run_files.CONFIG)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=log,
    )
    assert trial.stdout is not None
    try:
        pid, _, address = (await trial.stdout.readline()).decode().strip().partition(" ")
        if not address:
            raise ServiceFault("coordinator", "start", "ended without an address")
        return await _window(config, address, psutil.Process(int(pid)), settings)
    finally:
        await end(trial)  # and with it its coordinator


async def _window(config: Config, address: str, coordinator: psutil.Process, settings: CoordinatorBenchSettings) -> Cost:
    """From the step `warm` to the last but one: the last waits for no other."""
    begin: tuple[int, float, float] | None = None
    last = config.training.steps - 1
    async with aclosing(client.watch(address)) as progress:
        async for one in progress:
            if one.phase != "training" or one.step < settings.warm:
                continue
            now = one.step, time.monotonic(), _cpu(coordinator)
            begin = begin or now
            if one.step >= last and one.step > begin[0]:
                samples = (now[0] - begin[0]) * config.training.groups_per_step * config.sampling.group_size
                replicas = config.services.rollout.replicas if isinstance(config.services.rollout, Rollout) else 0
                memory = coordinator.memory_info().rss
                return Cost(replicas, samples, now[1] - begin[1], now[2] - begin[2], memory)
    raise ServiceFault("coordinator", "run", f"ended before step {last}")


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def compared(report: CoordinatorBenchReport) -> list[Compared]:
    return [
        Compared(
            f"ms a sample, {replicas} replicas",
            [cost.milliseconds for cost in report.costs if cost.replicas == replicas],
            f"≤ {AIM}",
        )
        for replicas in report.milliseconds
    ]


def render(report: CoordinatorBenchReport) -> list[LiteralTable]:
    table = LiteralTable("replicas", "samples", "samples/s", "coordinator, ms a sample", "its memory, MiB", title="Coordinator")
    for cost in sorted(report.costs, key=lambda cost: cost.replicas):
        rate = f"{cost.samples / cost.seconds:,.0f}"
        table.add_row(str(cost.replicas), f"{cost.samples:,}", rate, f"{cost.milliseconds:.3f}", f"{cost.memory / 2**20:.0f}")
    few, many = min(report.milliseconds), max(report.milliseconds)
    ratio = report.milliseconds[many] / report.milliseconds[few]
    table.caption = f"{many} replicas: {ratio:.2f} times the processor time a sample of {few} (aim: {AIM} ms, and 1.0)"
    return [table]
