"""What publishing does to generation: how long an update holds it up, and how many tokens a transfer costs."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from benchmarks.packing import PackingShape
from benchmarks.rollout import Pauses, rank, rollout_config
from benchmarks.weight_sync.peers import RolloutPeer, TrainerPeer, publisher
from runtime.config import Config
from runtime.coordinator.weight_sync import WeightPublisher
from runtime.telemetry.metrics import WeightSyncFigures
from runtime.telemetry.shown import LiteralTable
from runtime.types import PolicyVersion

TRIAL = "benchmarks.weight_sync.engine_trial"
ENGINE = "rollout-0"
GROUPS = 8  # generated at once
WARM = 1.0  # seconds of generation that are not counted


class PausesModel(Struct, frozen=True):
    name: str
    shape: PackingShape
    dtype: str


class PausesSettings(Struct, frozen=True):
    models: tuple[PausesModel, ...] = (
        PausesModel("quickstart", PackingShape(128, 4, 4, 2, 384), "float32"),
        PausesModel("512 MB", PackingShape(1024, 20, 16, 8, 3136), "bfloat16"),
    )
    rounds: int = 3
    seconds: float = 8.0  # of a round, once without transfers and once with one after the other


class PauseWindow(Struct):
    """Of generation. CPU seconds of the thread that generates, of the event loop, which does its share for each group and
    takes the orders of a weight sync, and of all other threads."""

    seconds: float = 0.0
    tokens: float = 0.0
    engine: float = 0.0
    loop: float = 0.0
    others: float = 0.0

    def add(self, before: Mapping[str, float], after: Mapping[str, float]) -> None:
        self.seconds += after["now"] - before["now"]
        self.tokens += after["tokens"] - before["tokens"]
        self.engine += after["engine"] - before["engine"]
        self.loop += after["loop"] - before["loop"]
        self.others += after["others"] - before["others"]


class Held(Struct):
    """`transfer`: the median, in seconds, from the requests to the commit. `pauses`: from order to answer."""

    model: str
    megabytes: float
    transfer: float
    pauses: Pauses
    quiet: PauseWindow
    busy: PauseWindow

    @property
    def lost(self) -> float:
        """Tokens that were not generated in `busy`, by the rate of `quiet`."""
        return self.quiet.tokens / self.quiet.seconds * self.busy.seconds - self.busy.tokens

    @property
    def receiving(self) -> float:
        """CPU seconds of the receiver in `busy`: of the threads that receive and verify, beyond what they take in `quiet`, and
        of the event loop, orders and swaps, beyond what it takes for as many tokens."""
        threads = self.busy.others - self.quiet.others * self.busy.seconds / self.quiet.seconds
        return threads + self.busy.loop - self.quiet.loop * self.busy.tokens / self.quiet.tokens

    @property
    def worth(self) -> float:
        """Tokens that the CPU seconds of the receiver would have generated."""
        return self.receiving * self.quiet.tokens / (self.quiet.engine + self.quiet.loop)


async def measure(folder: Path, settings: PausesSettings, show: Callable[[str], None] = lambda line: None) -> list[Held]:
    """Trainer and rollout on a core each, where there are two. Raises UserError, ServiceFault."""
    return [await _model(folder, model, settings, show) for model in settings.models]


async def _model(folder: Path, model: PausesModel, settings: PausesSettings, show: Callable[[str], None]) -> Held:
    show(f"{model.name}: making the model")
    config = model_config(folder, model)
    cores: list[int | None] = [*sorted(os.sched_getaffinity(0))[:2]]
    first, second = cores if len(cores) == 2 else (None, None)
    with tempfile.TemporaryDirectory(prefix="weight sync-", dir=folder) as scratch:
        async with (
            TrainerPeer.started("trainer-0", TRIAL, scratch, "0", "2", core=first) as trainer,
            RolloutPeer.started(ENGINE, TRIAL, scratch, "1", "2", core=second) as rollout,
        ):
            raw = msgspec.to_builtins(config)
            await asyncio.gather(trainer.ask("open_model", config=raw), rollout.ask("open_model", config=raw))
            publishing = publisher(trainer, [rollout], config.weight_sync)
            quiet, busy = PauseWindow(), PauseWindow()
            await rollout.ask("generate", groups=GROUPS)
            await _publish(publishing, 0.0, 0)
            await asyncio.sleep(WARM)
            done: list[WeightSyncFigures] = []
            for number in range(settings.rounds):
                show(f"{model.name}: round {number + 1} of {settings.rounds}")
                before = await rollout.ask("counters")
                await asyncio.sleep(settings.seconds)
                between = await rollout.ask("counters")
                done += await _publish(publishing, settings.seconds, 1 + len(done))
                after = await rollout.ask("counters")
                quiet.add(before, between)
                busy.add(between, after)
            await asyncio.gather(trainer.ask("close"), rollout.ask("close"))
    pauses = [figures.pause_seconds for figures in done]
    return Held(
        model=model.name,
        megabytes=done[-1].bytes / 1e6,
        transfer=median(figures.seconds for figures in done),
        pauses=Pauses(rank(pauses, 0.5), rank(pauses, 0.99), len(pauses)),
        quiet=quiet,
        busy=busy,
    )


def model_config(folder: Path, model: PausesModel) -> Config:
    config = rollout_config(folder / "weight_sync", model.shape, "torch", 8 * GROUPS)
    fleet = replace(config.services.rollout, dtype=model.dtype)  # type: ignore[type-var]
    return replace(
        config,
        run=replace(config.run, resume=""),
        services=replace(config.services, rollout=fleet),
        weight_sync=replace(config.weight_sync, dtype=model.dtype),
    )


async def _publish(publishing: WeightPublisher, seconds: float, published: int) -> list[WeightSyncFigures]:
    """One version after the other for so long, at least one."""
    done: list[WeightSyncFigures] = []
    give_up = time.monotonic() + seconds
    while not done or time.monotonic() < give_up:
        done.append(await publishing.publish(PolicyVersion(0, 1 + published + len(done))))
    return done


def render(found: list[Held]) -> list[LiteralTable]:
    pauses = LiteralTable(title="Pause of generation by an update, ms", title_justify="left", title_style="bold")
    for name in ("", "MB", "p50", "p99", "updates", "transfer", "p99 / transfer"):
        pauses.add_column(name, justify="right" if name else "left")
    tokens = LiteralTable(title="Tokens lost to transfers one after the other", title_justify="left", title_style="bold")
    for name in ("", "tokens/s without", "with", "lost a transfer", "worth of the receiver's CPU", "lost / worth"):
        tokens.add_column(name, justify="right" if name else "left")
    for one in found:
        held = one.pauses
        told = (f"{seconds * 1e3:,.1f}" for seconds in (held.p50, held.p99))
        share = f"{held.p99 / one.transfer:.1%}"
        pauses.add_row(one.model, f"{one.megabytes:,.1f}", *told, str(held.updates), f"{one.transfer * 1e3:,.0f}", share)
        speeds = (f"{window.tokens / window.seconds:,.0f}" for window in (one.quiet, one.busy))
        each = (f"{value / held.updates:,.1f}" for value in (one.lost, one.worth))
        tokens.add_row(one.model, *speeds, *each, f"{one.lost / one.worth:.2f}")
    return [pauses, tokens]
