"""Each step's metrics to the trackers and the totals, and how busy the rollouts are."""

from __future__ import annotations

import asyncio
import time

from runtime import timeouts
from runtime.config import Config
from runtime.coordinator.buffer import Buffer
from runtime.coordinator.dynamic_sampling import DynamicSampling
from runtime.coordinator.probes import Probes
from runtime.coordinator.rollout_pool import RolloutPool
from runtime.coordinator.run_context import RunContext, accelerators
from runtime.coordinator.train_loop import TrainedStep
from runtime.errors import ServiceFault
from runtime.ports import RolePort
from runtime.status import Status
from runtime.telemetry.metrics import Metrics, SpanClock, StepFigures, idle_fraction, step_metrics
from runtime.telemetry.summary import Totals
from runtime.types import PolicyVersion


class BusyMeter:
    """The rollouts' idle fraction, from the busy seconds that their status tells. One that tells nothing for `silence` seconds
    is given up: a process answers while its engine computes."""

    def __init__(self, pool: RolloutPool, silence: float):
        self._pool = pool
        self._silence = silence
        self._heard: dict[RolePort, float] = {}  # when each that lives told something, or was first asked
        self._busy: dict[RolePort, float] = {}
        self._idle = 0.0
        self._worked = self._there = 0.0  # seconds of all rollouts together, since the step before

    def close_step(self) -> float:
        """The idle fraction since the step before; the newest one known, where the rollouts have not told anything since."""
        if self._there:
            self._idle = idle_fraction(self._worked, self._there)
            self._worked = self._there = 0.0
        return self._idle

    async def run(self) -> None:
        """Measure until cancelled, over the rollouts that answered at both ends of an interval."""
        then = time.monotonic()
        while True:
            before, self._busy = self._busy, await self._ask()
            now = time.monotonic()
            both = before.keys() & self._busy.keys()
            if both:
                self._worked += sum(self._busy[rollout] - before[rollout] for rollout in both)
                self._there += (now - then) * len(both)
            then = now
            await asyncio.sleep(timeouts.STATUS_INTERVAL)

    async def _ask(self) -> dict[RolePort, float]:
        """The busy seconds of each that answers."""
        rollouts, now = self._pool.serving, time.monotonic()
        self._heard = {rollout: self._heard.get(rollout, now) for rollout in rollouts}
        answers = await asyncio.gather(*(rollout.status() for rollout in rollouts), return_exceptions=True)
        told = {rollout: self._told(rollout, answer) for rollout, answer in zip(rollouts, answers, strict=True)}
        return {rollout: busy for rollout, busy in told.items() if busy is not None}

    def _told(self, rollout: RolePort, answer: Status | BaseException) -> float | None:
        now = time.monotonic()
        if isinstance(answer, Status):
            self._heard[rollout] = now
            return answer.gauges["busy_seconds_total"]
        if not isinstance(answer, ServiceFault):
            raise answer
        if now - self._heard[rollout] >= self._silence:
            self._pool.register.lose(rollout, f"told nothing for {self._silence:g} s (deadlines.silence)")
        return None


class MetricsRecorder:
    """What is known of the steps so far."""

    def __init__(
        self,
        context: RunContext,
        spans: SpanClock,
        buffer: Buffer,
        meter: BusyMeter,
        pool: RolloutPool,
        totals: Totals,
        dynamic_sampling: DynamicSampling | None,
        probes: Probes,
    ):
        self._trackers = context.trackers
        self._spans = spans
        self._buffer = buffer
        self._meter = meter
        self._world_size = accelerators(context.config)
        self._pool = pool
        self._dynamic_sampling = dynamic_sampling
        self._totals = totals
        self._probes = probes
        self._scores_as = _score_names(context.config)
        self.incarnation = 0
        self.newest: Metrics = {}

    async def step(self, trained: TrainedStep) -> Metrics:
        """Enter one step."""
        timing = self._spans.close_step()
        groups = trained.groups
        probed = self._probes.close_step(PolicyVersion(self.incarnation, trained.step), trained.result.probes)
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
                incarnation=self.incarnation,
                scores_as=self._scores_as,
                queues=self._queues(),
                idle={
                    "trainer": idle_fraction(trained.result.seconds, timing["timing/all"]),
                    "rollout": self._meter.close_step(),
                },
                publication=trained.publication,
                rollouts=self._pool.close_step() | probed,
                dynamic_sampling=self._dynamic_sampling.close_step() if self._dynamic_sampling else {},
            )
        )
        self._totals.add(metrics)
        self.newest = metrics
        await self._trackers.log(trained.step + 1, metrics)
        return metrics

    @property
    def figures(self) -> dict[str, float]:
        """Of the newest step, without histograms."""
        return {name: value for name, value in self.newest.items() if isinstance(value, float)}

    async def evaluation(self, step: int, metrics: Metrics) -> None:
        await self._trackers.log(step, metrics)

    def _queues(self) -> dict[str, int]:
        counts = self._buffer.counts()
        return {name: counts[name] for name in ("admitted", "generating", "generated", "ready")}


def _score_names(config: Config) -> list[str]:
    """What MindSpeed-RL's trainers of GRPO, PPO and DAPO call the scores, as far as the run is like them."""
    also = {"critic/score": config.critic is not None, "dapo/score": config.algorithm.dynamic_sampling}
    return ["grpo/score", *(name for name, applies in also.items() if applies)]


def gap(figures: dict[str, float]) -> str:
    """How far rollouts and trainer were apart; "" where nothing was compared."""
    shown = (("abs_logprob", "mean"), ("abs_logprob_p99", "p99"), ("max", "max"), ("worst_rollout", "worst rollout"))
    told = [f"{what} {figures[f'mismatch/{name}']:.1e}" for name, what in shown if f"mismatch/{name}" in figures]
    return f"|Δ log p| {', '.join(told)}" if told else ""


def line(figures: dict[str, float]) -> str:
    """The figures that a progress bar has room for."""
    shown = (
        ("eval/accuracy", "accuracy {:.1%}"),
        ("grpo/score/mean", "reward {:.2f}"),
        ("timing/all", "{:.0f} ms/step"),
        ("staleness/mean", "staleness {:.1f}"),
        ("mismatch/abs_logprob_p99", "log p gap {:.0e}"),
    )
    scale = {"timing/all": 1000.0}
    return "  ".join(form.format(figures[name] * scale.get(name, 1.0)) for name, form in shown if name in figures)
