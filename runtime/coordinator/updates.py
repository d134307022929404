"""How a step's batch reaches trainer and critic: both at the same time, or one after the other on the same devices."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from msgspec.structs import replace

from runtime.ports import Answer, CriticPort, TrainerPort, UpdatePort
from runtime.process.aio import TaskGroup
from runtime.telemetry.metrics import UPDATE, UPDATE_CRITIC, SpanClock
from runtime.types import StepResult, TrainGroup


class ModelUpdates:
    """Both get the same commands in the same order, and update beside each other."""

    alternating = False

    def __init__(self, trainer: TrainerPort, critic: CriticPort | None, spans: SpanClock):
        self._trainer = trainer
        self._critics = [] if critic is None else [critic]
        self._spans = spans

    def begin(self, tasks: TaskGroup, step: int) -> None:
        for model in (self._trainer, *self._critics):
            tasks.create_task(model.begin_step(step))

    def accumulate(self, tasks: TaskGroup, step: int, groups: list[TrainGroup], last: bool) -> None:
        """A part of the step's batch; `last`: it completes it."""
        for model in (self._trainer, *self._critics):
            tasks.create_task(model.accumulate(step, groups, last))

    async def apply(self, tasks: TaskGroup, step: int, probes: Sequence[bytes]) -> list[asyncio.Task[StepResult]]:
        """The trainer's command is on its way when this returns: its result, and the critic's if there is one."""
        applying = [(self._trainer.apply(step, probes), UPDATE)]
        applying += [(critic.apply(step), UPDATE_CRITIC) for critic in self._critics]
        return [tasks.create_task(self._applied(answer, phase)) for answer, phase in applying]

    async def _applied(self, apply: Answer[StepResult], phase: str) -> StepResult:
        result = await apply
        now = time.monotonic()
        self._spans.add(phase, now - result.seconds, now)
        return result


class AlternatingUpdates(ModelUpdates):
    """The critic updates first, while the trainer's state is off the devices; then the trainer, while the critic's is.

    The batch is kept here until each one's time comes: so long nothing brings its state back. The trainer's stays after its
    update, as it is to be published, until the next step, or until somebody else needs the devices.
    """

    alternating = True

    def __init__(self, trainer: TrainerPort, critic: CriticPort, spans: SpanClock):
        super().__init__(trainer, critic, spans)
        self._critic = critic
        self._parts: list[tuple[list[TrainGroup], bool]] = []

    def begin(self, tasks: TaskGroup, step: int) -> None:
        self._parts = []

    def accumulate(self, tasks: TaskGroup, step: int, groups: list[TrainGroup], last: bool) -> None:
        self._parts.append((groups, last))

    async def apply(self, tasks: TaskGroup, step: int, probes: Sequence[bytes]) -> list[asyncio.Task[StepResult]]:
        await self._trainer.offload()  # behind what was ordered before: its newest version is gathered
        await self._critic.onload()
        self._give(tasks, self._critic, step)
        critic = tasks.create_task(self._applied(self._critic.apply(step), UPDATE_CRITIC))
        await critic
        await self._critic.offload()
        await self._trainer.onload()
        self._give(tasks, self._trainer, step)
        return [tasks.create_task(self._applied(self._trainer.apply(step, probes), UPDATE)), critic]

    def _give(self, tasks: TaskGroup, model: UpdatePort, step: int) -> None:
        """The batch that was kept."""
        tasks.create_task(model.begin_step(step))
        for groups, last in self._parts:
            tasks.create_task(model.accumulate(step, groups, last))


async def joined(trainer: asyncio.Task[StepResult], others: Sequence[asyncio.Task[StepResult]]) -> StepResult:
    """The trainer's result with the metrics of all; its own stand over others of the same name."""
    result = await trainer
    for applied in others:
        result = replace(result, metrics=(await applied).metrics | result.metrics)
    return result
