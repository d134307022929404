"""The last stages where rollouts and trainer take turns on the same devices.

A turn of the rollouts lasts until nothing is left to be generated: every group that the bound η admits is there, which is
η + 1 batches, and no evaluation is under way. So no sample is in flight when they give back their memory, and none has tokens
of two versions. The trainer's turn then makes η + 1 steps, the last of which alone is published: nobody could generate with the
others. It ends sooner after a step that is to be evaluated, or when the run is to end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from runtime.coordinator.buffer import Group
from runtime.coordinator.states import Mark, Phase
from runtime.coordinator.train_loop import TrainedStep, TrainStage
from runtime.coordinator.turn_taking import TurnTaking
from runtime.coordinator.updates import joined
from runtime.process.aio import TaskGroup
from runtime.types import PolicyVersion

_ANY = 1 << 30  # groups: the slots do not matter


class TurnStage(TrainStage):
    """`evaluates(step)`: whether version `step` is to be evaluated. `evaluating()`: whether an evaluation is under way; at its
    end the buffer's `ready_changed` is to be set. `judges`: a score may drop a group."""

    def __init__(
        self, turns: TurnTaking, evaluates: Callable[[int], bool], evaluating: Callable[[], bool], judges: bool, **stage: Any
    ):
        """`stage`: what TrainStage takes."""
        super().__init__(**stage)
        self._turns = turns
        self._evaluates = evaluates
        self._evaluating = evaluating
        self._judges = judges

    async def run(self, tasks: TaskGroup, last_step: int) -> None:
        self.last_step = last_step
        while await self._generated():
            await self._turns.take(self._referred)
            await self._turn(tasks)

    async def _generated(self) -> bool:
        """The rollouts' turn is over; False: the run ends first."""
        buffer = self._buffer
        while buffer.step < self.last_step:
            buffer.ready_changed.clear()
            if self._nothing_to_generate():
                return True
            await buffer.ready_changed.wait()
        return False

    def _nothing_to_generate(self) -> bool:
        buffer = self._buffer
        if self._evaluating() or self._probes.pending or buffer.capacity(_ANY, self.last_step):
            return False
        return not any(group.state.phase == Phase.GENERATING or self._may_be_dropped(group) for group in buffer)

    def _may_be_dropped(self, group: Group) -> bool:
        """And another prompt be drawn in its place."""
        return self._judges and group.state.phase == Phase.GENERATED and not group.state.marks & Mark.SCORED

    async def _referred(self) -> None:
        """The reference has seen every group that was generated."""
        buffer = self._buffer
        while any(Mark.REFERENCED & group.state.needs & ~group.state.marks for group in buffer if group.generated is not None):
            buffer.ready_changed.clear()
            await buffer.ready_changed.wait()

    async def _turn(self, tasks: TaskGroup) -> None:
        """Steps, as many as there are batches for; the last one's version is published."""
        buffer, version = self._buffer, None
        last: TrainedStep | None = None
        while (batch := await self._fill(tasks, buffer.step)) is not None:
            last = await self._step(tasks, buffer.step - 1, batch)
            version = PolicyVersion(self.incarnation, buffer.step)
            if not self._goes_on():
                break
            await self._finished(last)
            last = None
        figures = await self._turns.give(version)
        if version is not None:
            buffer.commit(version.step)
        if last is not None:
            await self._finished(replace(last, publication=figures))

    def _goes_on(self) -> bool:
        """Whether there is a batch for another step in this turn."""
        buffer = self._buffer
        there = sum(group.generated is not None and group.taken is None for group in buffer)
        return buffer.step < self.last_step and not self._evaluates(buffer.step) and there >= buffer.groups_per_step

    async def _step(self, tasks: TaskGroup, step: int, batch: list[Group]) -> TrainedStep:
        saving = await self._checkpoint(step + 1)
        trainer, *others = await self._apply(tasks, step)
        result = await joined(trainer, others)
        self._buffer.consume(step)
        if saving is not None:
            self._saving = asyncio.ensure_future(self._save(saving(None)))
            await self.saved()
        return TrainedStep(step=step, groups=batch, result=result, publication=None)
