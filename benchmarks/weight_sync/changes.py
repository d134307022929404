"""How much of the weights a step of training changes, and what encoding `delta` makes of it."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from benchmarks.inputs import bench_config
from benchmarks.weight_sync.peers import RolloutPeer, TrainerPeer, publisher
from runtime.config import Config
from runtime.errors import ServiceFault
from runtime.telemetry.shown import LiteralTable
from runtime.types import PolicyVersion

TRIAL = "benchmarks.weight_sync.changes_trial"


class Changes(Struct):
    """By version, after the first, which is whole: the share of elements that changed, and the bytes that were sent."""

    learning_rate: float
    whole_bytes: int
    changed: list[float]
    bytes: list[int]

    @property
    def shares(self) -> list[float]:
        """Of the bytes of a whole version."""
        return [one / self.whole_bytes for one in self.bytes]


async def measure(folder: Path, versions: int, show: Callable[[str], None] = lambda line: None) -> Changes:
    """Train, and publish every step; each version has to be the trainer's, bit for bit. Raises ServiceFault."""
    config = training_config(folder)
    with tempfile.TemporaryDirectory(prefix="weight sync-", dir=folder) as scratch:
        async with (
            TrainerPeer.started("trainer-0", TRIAL, scratch, "0", "2") as trainer,
            RolloutPeer.started("rollout-0", TRIAL, scratch, "1", "2") as rollout,
        ):
            raw = msgspec.to_builtins(config)
            await asyncio.gather(trainer.ask("open_training", config=raw), rollout.ask("open_training", config=raw))
            publishing = publisher(trainer, [rollout], config.weight_sync)
            changed, sent = [], []
            for number in range(versions + 1):
                show(f"delta: version {number} of {versions}")
                if number:
                    await trainer.ask("step", number=number)
                await rollout.ask("look")
                figures = await publishing.publish(PolicyVersion(0, 1 + number))
                if await trainer.ask("sent") != await rollout.ask("seen"):
                    raise ServiceFault("bench", "delta", f"version {number} is not what was sent")
                changed.append(await trainer.ask("changed"))
                sent.append(int(figures.bytes))
            await asyncio.gather(trainer.ask("close"), rollout.ask("close"))
    return Changes(config.training.optimizer.learning_rate, sent[0], changed[1:], sent[1:])


def training_config(folder: Path) -> Config:
    """The benches' own, whose learning rate is 1e-6, without a folder; masters in float32, published in bfloat16."""
    config = bench_config(folder / "inputs")
    weight_sync = replace(config.weight_sync, transport="collective", encoding="delta", dtype="bfloat16")
    return replace(config, run=replace(config.run, dir="", resume=""), weight_sync=weight_sync)


def render(found: Changes) -> LiteralTable:
    table = LiteralTable(title="Versions of consecutive steps of GRPO, bfloat16", title_justify="left", title_style="bold")
    for name in ("learning rate", "versions", "elements changed", "bytes of a whole version", "highest", "on the whole"):
        table.add_column(name, justify="right")
    table.add_row(
        f"{found.learning_rate:g}",
        str(len(found.bytes)),
        f"{median(found.changed):.2%}",
        f"{median(found.shares):.2%}",
        f"{max(found.shares):.2%}",
        f"{sum(found.bytes) / found.whole_bytes / len(found.bytes):.2%}",
    )
    table.caption = "every version was the trainer's, bit for bit"
    table.caption_justify = "left"
    return table
