"""The run's books: each step's metrics to the trackers and the totals, and how busy the rollouts are."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Protocol

from runtime.errors import ServiceFault
from runtime.metrics import Metrics, SpanClock, StepFigures, idle_fraction, step_metrics
from runtime.pipeline.buffer import Buffer
from runtime.pipeline.dynamic_sampling import DynamicSampling
from runtime.pipeline.training import TrainedStep
from runtime.status import Status
from runtime.summary import Totals
from runtime.trackers import Trackers

POLL = 0.5  # seconds between two looks at the rollouts


class Watched(Protocol):
    name: str

    async def status(self) -> Status: ...


class BusyMeter:
    """The rollouts' idle fraction, from the busy seconds that their status tells. `rollouts` are those that live now."""

    def __init__(self, rollouts: Sequence[Watched]):
        self._rollouts = rollouts
        self.idle = 0.0

    async def run(self) -> None:
        """Measure until cancelled; `idle` is that of the newest interval in which all rollouts answered."""
        then, before = time.monotonic(), await self._busy_seconds() or {}
        while True:
            await asyncio.sleep(POLL)
            busy = await self._busy_seconds()
            if busy is not None:
                now, both = time.monotonic(), busy.keys() & before.keys()
                if both:
                    self.idle = idle_fraction(sum(busy[name] - before[name] for name in both), now - then, len(both))
                then, before = now, busy

    async def _busy_seconds(self) -> dict[str, float] | None:
        """By name. None when one did not answer: that is for whoever waits for its work to judge."""
        rollouts = list(self._rollouts)
        try:
            statuses = await asyncio.gather(*(rollout.status() for rollout in rollouts))
        except ServiceFault:
            return None
        return {rollout.name: status.gauges["busy_seconds_total"] for rollout, status in zip(rollouts, statuses, strict=True)}


class Books:
    """What is known of the steps so far."""

    def __init__(
        self,
        trackers: Trackers,
        spans: SpanClock,
        buffer: Buffer,
        meter: BusyMeter,
        world_size: int,
        dynamic_sampling: DynamicSampling | None = None,
    ):
        self._trackers = trackers
        self._spans = spans
        self._buffer = buffer
        self._meter = meter
        self._world_size = world_size
        self._dynamic_sampling = dynamic_sampling
        self.totals = Totals()
        self.newest: Metrics = {}

    async def step(self, trained: TrainedStep) -> Metrics:
        """Enter one step."""
        timing = self._spans.close_step()
        groups = trained.groups
        ages = [
            trained.step - group.generated.oldest.step
            for group in groups
            if group.generated is not None
            for _ in group.generated.response_tokens
        ]
        metrics = step_metrics(
            StepFigures(
                generated=[group.generated for group in groups if group.generated is not None],
                scores=[group.scores for group in groups if group.scores is not None],
                staleness=ages,
                timing=timing,
                trained=trained.result,
                world_size=self._world_size,
                queues=self._queues(),
                idle={
                    "trainer": idle_fraction(trained.result.seconds, timing["timing/all"]),
                    "rollout": self._meter.idle,
                },
                publication=trained.publication,
                dynamic_sampling=self._dynamic_sampling.close_step() if self._dynamic_sampling else {},
            )
        )
        self.totals.add(metrics)
        self.newest = metrics
        await self._trackers.log(trained.step + 1, metrics)
        return metrics

    async def evaluation(self, step: int, metrics: Metrics) -> None:
        await self._trackers.log(step, metrics)

    def _queues(self) -> dict[str, int]:
        counts = self._buffer.counts()
        return {name: counts[name] for name in ("admitted", "generating", "generated", "ready")}
