"""`sluice bench weight_sync`: weights on their way from trainer to rollouts, beside plain ways of moving the same bytes."""

from __future__ import annotations

import asyncio
import importlib.util
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import msgspec
import psutil
from msgspec import Struct
from msgspec.structs import replace

from benchmarks.compared import Compared
from benchmarks.weight_sync import changes, in_run, pauses, spread, transfers
from benchmarks.weight_sync.changes import Changes
from benchmarks.weight_sync.in_run import HALF, InRun, InRunSettings
from benchmarks.weight_sync.pauses import Held
from benchmarks.weight_sync.peers import TRANSPORTS, BenchPeer, RolloutPeer, TrainerPeer, publisher
from benchmarks.weight_sync.spread import Spread
from benchmarks.weight_sync.tensors import read_sizes
from benchmarks.weight_sync.transfers import MemoryPasses, Sized, Transfers, TransportFigures
from runtime.config import Config, Rollout, Run, Services, WeightSyncConfig
from runtime.coordinator.weight_sync import WeightPublisher
from runtime.errors import ServiceFault, UserError
from runtime.telemetry.shown import LiteralTable
from runtime.types import PolicyVersion

TRIAL = "benchmarks.weight_sync.trial"
RAY_TRIAL = "benchmarks.weight_sync.ray_trial"
# What `compared` is to come to, by transport; and of the run of `HALF`: version 0, a later one, memory.
ASKED = {"collective": "≥ 0.9", "shared_memory": "≥ 0.6"}
ASKED_OF_HALF = ("≤ 1.5", "≤ 0.4", "≤ 12")
RAY_MEMORY = 8  # times the tensors, free before Ray starts; 5 ran out of memory at 2,048 MB


class WeightSyncSettings(Struct, frozen=True):
    sizes: tuple[int, ...] = (64, 512, 2048)  # MB
    receivers: int = 1
    rounds: int = 5
    changed: float = 0.02  # share of the elements that differ between two versions; a step at 1e-6 changes less
    generation: pauses.PausesSettings = pauses.PausesSettings()
    runs: tuple[InRunSettings, ...] = (InRunSettings(), HALF)
    versions: int = 100  # of consecutive steps, for encoding `delta`


FULL = WeightSyncSettings()
QUICK = WeightSyncSettings(
    sizes=(64, 512), generation=pauses.PausesSettings(models=pauses.PausesSettings().models[:1], rounds=2), versions=10
)


class WeightSyncReport(Struct):
    transfers: Transfers
    spread: list[Spread]
    runs: list[InRun]
    runs_left_out: dict[str, str]  # by model, why
    generation: list[Held]
    changes: Changes


def settings(sizes: str | None, receivers: int | None, quick: bool = False) -> WeightSyncSettings:
    """Of what the command line says. Raises UserError."""
    default = QUICK if quick else FULL
    if receivers is not None and receivers < 1:
        raise UserError(f"--receivers: {receivers} is not at least 1")
    return replace(
        default,
        sizes=default.sizes if sizes is None else read_sizes(sizes),
        receivers=default.receivers if receivers is None else receivers,
    )


async def measure(
    folder: Path, settings: WeightSyncSettings, show: Callable[[str], None] = lambda line: None
) -> WeightSyncReport:
    """Each process computes with one thread. What lies in `folder` beside models goes at the end. Raises ServiceFault."""
    sizes = []
    for megabytes in settings.sizes:
        with _scratch(folder) as scratch:
            sizes.append(await _size(Path(scratch), megabytes, settings, show))
    left_out = {run.shape.name: why for run in settings.runs if (why := in_run.without(run))}
    return WeightSyncReport(
        Transfers(settings.receivers, sizes),
        await asyncio.to_thread(spread.measure, settings.rounds, show, min(200, max(settings.sizes))),
        [await in_run.measure(folder, run, show) for run in settings.runs if run.shape.name not in left_out],
        left_out,
        await pauses.measure(folder, settings.generation, show),
        await changes.measure(folder, settings.versions, show),
    )


def _scratch(folder: Path) -> tempfile.TemporaryDirectory[str]:
    folder.mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryDirectory(prefix="weight sync-", dir=folder)


async def _size(folder: Path, megabytes: int, settings: WeightSyncSettings, show: Callable[[str], None]) -> Sized:
    show(f"{megabytes} MB: starting")
    async with AsyncExitStack() as stack:
        places = [(str(folder), str(rank), str(1 + settings.receivers)) for rank in range(1 + settings.receivers)]
        trainer = await stack.enter_async_context(TrainerPeer.started("trainer-0", TRIAL, *places[0]))
        rollouts = [
            await stack.enter_async_context(RolloutPeer.started(f"rollout-{index}", TRIAL, *place))
            for index, place in enumerate(places[1:])
        ]
        stage = Stage(trainer, rollouts, megabytes, settings)
        await stage.everyone("prepare", megabytes=megabytes)
        seconds, left_out = await stage.plain(folder, show)
        return await stage.published(seconds, left_out, show)


def without_ray(nbytes: int) -> str:
    """Why Ray's object store is not measured, or ""."""
    if importlib.util.find_spec("ray") is None:
        return "ray is not installed: pip install 'sluice-rl[bench]'"
    needed, free = RAY_MEMORY * nbytes, psutil.virtual_memory().available
    return f"needs {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} are free" if needed > free else ""


class Stage:
    """The processes of one size."""

    def __init__(self, trainer: TrainerPeer, rollouts: list[RolloutPeer], megabytes: int, settings: WeightSyncSettings):
        self._trainer, self._rollouts = trainer, rollouts
        self._ray: BenchPeer  # while the plain ways are measured, where it is installed
        self._megabytes = megabytes
        self._settings = settings

    async def everyone(self, what: str, **arguments: object) -> list[object]:
        peers: list[BenchPeer] = [self._trainer, *self._rollouts]
        return await asyncio.gather(*(peer.ask(what, **arguments) for peer in peers))

    async def plain(self, folder: Path, show: Callable[[str], None]) -> tuple[dict[str, list[float]], dict[str, str]]:
        """The seconds of each plain way by round, and why others are left out."""
        from benchmarks.weight_sync import ways as plain

        megabytes, nbytes = self._megabytes, self._megabytes * 1_000_000
        ways, left_out = [plain.GLOO, plain.COPY, plain.HASHED, plain.BUCKETS, plain.ONE_BY_ONE], {}
        for way, place in ((plain.DISK, folder), (plain.MEMORY_FILE, plain.SHARED_MEMORY)):
            if plain.room(place, nbytes):
                ways.append(way)
            else:
                left_out[way] = f"{place} is not there or has no room"
        for way in ways:
            show(f"{megabytes} MB: {way}, once to see that it arrives")
            await self._check(way)
        async with AsyncExitStack() as stack:
            if why := without_ray(nbytes):
                left_out[plain.RAY] = why
            else:
                show(f"{megabytes} MB: {plain.RAY}, once to see that it arrives")
                short = stack.enter_context(tempfile.TemporaryDirectory(prefix="sluice-ray-"))
                peer = BenchPeer.started("ray", RAY_TRIAL, short, str(megabytes), str(self._settings.receivers))
                self._ray = await stack.enter_async_context(peer)
                await self._ray.ask("open")
                ways.append(plain.RAY)
            seconds: dict[str, list[float]] = {way: [] for way in ways}
            for number in range(self._settings.rounds):
                for way in ways:
                    show(f"{megabytes} MB: round {number + 1} of {self._settings.rounds}, {way}")
                    seconds[way].append(await self._together(way))
            if plain.RAY in ways:
                await self._ray.ask("close")
        return seconds, left_out

    async def published(self, seconds: dict[str, list[float]], left_out: dict[str, str], show: Callable[[str], None]) -> Sized:
        """The transports, each beside a plain way."""
        from benchmarks.weight_sync import ways as plain

        megabytes = self._megabytes
        published = {}
        gather = 0.0
        for transport in TRANSPORTS:
            show(f"{megabytes} MB: opening {transport}")
            publishing = await self._open(transport)
            gather = gather or await self._trainer.ask("gather")
            way = plain.COPY if transport == "shared_memory" else plain.GLOO
            published[transport] = await self._publish(transport, publishing, way, show)
            await self.everyone("close")
        rates = await self._trainer.ask("rates", piece=WeightSyncConfig().bucket_bytes)
        passes = MemoryPasses(checksum=rates["checksum"], copy=rates["copy"], gather=megabytes * 1e6 / gather)
        return Sized(megabytes, seconds, left_out, published, passes)

    async def _check(self, way: str) -> None:
        await self.everyone("forget")
        await self._together(way)
        sent, *received = await self.everyone("digest")
        if any(digest != sent for digest in received):
            raise ServiceFault("bench", way, "did not bring what was sent")

    async def _together(self, way: str) -> float:
        """Seconds from the sender's beginning to the last receiver's end; where the sender has no part, of the slowest."""
        from benchmarks.weight_sync.ways import COPY, HASHED, RAY

        if way == RAY:
            return cast(float, await self._ray.ask("move"))
        (sent, _), *others = cast(list[tuple[float, float]], await self.everyone("run", way=way))
        return max(ended - (began if way in (COPY, HASHED) else sent) for began, ended in others)

    async def _open(self, transport: Any) -> WeightPublisher:
        weight_sync = WeightSyncConfig(**TRANSPORTS[transport])
        replicas = Services(rollout=Rollout(replicas=len(self._rollouts)))
        config = Config(run=Run(name="bench", resume=""), services=replicas, weight_sync=weight_sync)
        await self.everyone("open", config=msgspec.to_builtins(config), megabytes=self._megabytes)
        await self._trainer.ask("fill")
        publishing = publisher(self._trainer, self._rollouts, config.weight_sync)
        await asyncio.gather(*(rollout.ask("look") for rollout in self._rollouts))
        await publishing.publish(PolicyVersion(0, 1))
        await self._compare(transport)
        return publishing

    async def _compare(self, transport: str) -> None:
        sent = await self._trainer.ask("sent")
        seen = await asyncio.gather(*(rollout.ask("seen") for rollout in self._rollouts))
        if any(digest != sent for digest in seen):
            raise ServiceFault("bench", transport, "did not bring what was sent")

    async def _publish(
        self, transport: str, publishing: WeightPublisher, baseline: str, show: Callable[[str], None]
    ) -> TransportFigures:
        found = TransportFigures(baseline, [], [], 0)
        for number in range(self._settings.rounds):
            show(f"{self._megabytes} MB: round {number + 1} of {self._settings.rounds}, {transport}")
            found.baseline_seconds.append(await self._together(baseline))
            await self._trainer.ask("alter", share=self._settings.changed, seed=number)
            figures = await publishing.publish(PolicyVersion(0, 2 + number))
            found.seconds.append(figures.seconds)
            found.bytes = int(figures.bytes)
        return found


def compared(report: WeightSyncReport) -> list[Compared]:
    from benchmarks.weight_sync.ways import HASHED

    found = []
    for sized in report.transfers.sizes:
        for transport, figures in sized.published.items():
            what = f"{transport} / {figures.baseline}, {sized.megabytes} MB"
            found.append(Compared(what, figures.ratios, ASKED.get(transport, "")))
        if "shared_memory" in sized.published:
            seconds = zip(sized.ways[HASHED], sized.published["shared_memory"].seconds, strict=True)
            ratios = [hashed / own for hashed, own in seconds]
            found.append(Compared(f"shared_memory / a copy that hashes, {sized.megabytes} MB", ratios, "≥ 0.85"))
    for run in report.runs:
        first, later, peak = ASKED_OF_HALF if run.megabytes > 900 else ("", "", "")
        of_run = f"in a run, {run.megabytes:,.0f} MB"
        found += [
            Compared(f"seconds of version 0 {of_run}", [run.first], first),
            Compared(f"seconds of a later version {of_run}", [seconds for seconds, *_ in run.later], later),
            Compared(f"GiB of memory {of_run}", [run.peak / 2**30], peak),
        ]
    found += spread.compared(report.spread)
    return [*found, Compared("bytes of a delta / of a whole version", report.changes.shares)]


def render(report: WeightSyncReport) -> list[LiteralTable]:
    from benchmarks.weight_sync.ways import GLOO

    return [
        *transfers.render(report.transfers, GLOO),
        spread.render(report.spread),
        *in_run.render(report.runs, report.runs_left_out, report.transfers),
        *pauses.render(report.generation),
        changes.render(report.changes),
    ]
