"""The last stages: fill a step's batch by deadline, apply it, publish what it made.

Step v trains version v and makes v + 1. While v is applied and v + 1 published, the batch of step v + 1 is already being filled
and sent: the trainer holds one batch ahead. A critic is given the same commands in the same order, and updates beside the
trainer. A step's groups are consumed once both have applied it, and retire once its version is committed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from msgspec import Struct

from runtime.coordinator.buffer import Buffer, Group
from runtime.coordinator.probes import Probes
from runtime.coordinator.states import Phase
from runtime.coordinator.updates import ModelUpdates, joined
from runtime.coordinator.weight_sync import Publisher, Transaction
from runtime.ledger.journal import LedgerWriter
from runtime.ports import Answer
from runtime.process.aio import TaskGroup
from runtime.telemetry.metrics import PublicationFigures, SpanClock
from runtime.types import PolicyVersion, StepResult, TrainGroup

CHUNKS = 4  # an idle trainer is given what is ready once it is a quarter of the step


class TrainedStep(Struct, kw_only=True):
    """One step, applied and published."""

    step: int
    groups: list[Group]
    result: StepResult
    publication: PublicationFigures | None  # None: it was not published


class TrainStage:
    """`checkpoint(step)` is asked once a batch is complete, before it is applied: it returns what orders the checkpoint of the
    version that the batch makes, if one is due, given the end of the step. `finished` is awaited after each step."""

    def __init__(
        self,
        updates: ModelUpdates,
        publisher: Publisher,
        probes: Probes,
        buffer: Buffer,
        ledger: LedgerWriter,
        spans: SpanClock,
        *,
        streams: bool,
        groups_per_update: int,
        checkpoint: Callable[[int], Awaitable[Callable[[asyncio.Future[None] | None], Answer[None]] | None]],
        finished: Callable[[TrainedStep], Awaitable[None]],
    ):
        self._updates = updates
        self._publisher = publisher
        self._probes = probes
        self._buffer = buffer
        self._ledger = ledger
        self._spans = spans
        self._streams = streams
        self._groups_per_update = groups_per_update
        self._checkpoint = checkpoint
        self._finished = finished
        self._running: asyncio.Task[None] | None = None
        self._saving: asyncio.Task[None] | None = None
        self.incarnation = 0
        self.last_step = 0
        """The run ends before this step."""
        self.first_applied = 0.0
        """When the first step was submitted whole, on the clock of time.monotonic."""

    def stop(self) -> None:
        """End after the step whose batch was completed last; one that is still being filled is given up."""
        self.last_step = min(self.last_step, self._buffer.step)
        self._buffer.ready_changed.set()

    async def run(self, tasks: TaskGroup, last_step: int) -> None:
        """Train until `last_step`, or until `stop`. A trainer's command that fails fails the task group."""
        self.last_step = last_step
        while (step := self._buffer.step) < self.last_step:
            batch = await self._fill(tasks, step)
            if batch is None:
                break
            saving = await self._checkpoint(step + 1)
            if saving is not None:
                await self.saved()  # at most one is being written
            if self._running is not None:
                await self._running
            version = PolicyVersion(self.incarnation, step + 1)
            applying = await self._apply(tasks, step)
            publication = await self._publisher.begin(version)
            self._running = tasks.create_task(self._finish(step, batch, applying, publication))
            if saving is not None:
                self._saving = tasks.create_task(self._save(saving(self._running)))
        if self._running is not None:
            await self._running

    async def _apply(self, tasks: TaskGroup, step: int) -> list[asyncio.Task[StepResult]]:
        """Order the update: the trainer's result, and others'."""
        if self._updates.alternating:
            await self.saved()  # it takes the devices as well
        probes = await self._probes.answers(PolicyVersion(self.incarnation, step))
        applying = await self._updates.apply(tasks, step, probes)
        self.first_applied = self.first_applied or time.monotonic()
        return applying

    async def saved(self) -> None:
        """The checkpoint ordered last, if there was one, is complete."""
        if self._saving is not None:
            await self._saving

    async def _save(self, saving: Answer[None]) -> None:
        with self._spans.span("checkpoint"):
            await saving

    async def _fill(self, tasks: TaskGroup, step: int) -> list[Group] | None:
        """Take the groups of `step` as they become ready, and send them on; None when `stop` came first."""
        buffer, batch = self._buffer, list[Group]()
        if self._running is not None:
            self._running.add_done_callback(lambda _: buffer.ready_changed.set())
        while buffer.step == step:
            if step >= self.last_step:
                return None
            buffer.ready_changed.clear()
            groups = buffer.take(step, whole=not self._may_stream(len(batch)))
            if groups:
                if not batch:  # no sooner: between steps the trainer's devices may be lent out
                    self._updates.begin(tasks, step)
                batch += groups
                last = buffer.step != step
                self._updates.accumulate(tasks, step, [await self._train_group(group) for group in groups], last)
            else:
                await buffer.ready_changed.wait()
        return batch

    def _may_stream(self, taken: int) -> bool:
        """Whether a part of the batch is worth sending: it is, when the trainer has nothing else to do."""
        if not self._streams or not (self._running is None or self._running.done()):
            return False
        buffer = self._buffer
        ready = sum(group.state.phase == Phase.READY and group.taken is None for group in buffer)
        return ready >= min(buffer.groups_per_step - taken, -(-buffer.groups_per_step // CHUNKS))

    async def _finish(
        self, step: int, batch: list[Group], applying: list[asyncio.Task[StepResult]], publication: Transaction
    ) -> None:
        trainer, *others = applying
        try:
            await trainer
            async with TaskGroup() as both:  # the rollouts need not wait for the critic
                publishing = both.create_task(self._publish(publication))
                result = await joined(trainer, others)
                self._buffer.consume(step)
        finally:
            publication.close()
        self._buffer.commit(step + 1)
        await self._finished(TrainedStep(step=step, groups=batch, result=result, publication=publishing.result()))

    async def _publish(self, publication: Transaction) -> PublicationFigures:
        with self._spans.span("resharding_to_infer"):
            return await publication.finish()

    async def _train_group(self, group: Group) -> TrainGroup:
        scores = group.scores
        assert scores is not None and group.payload is not None and group.place is not None
        return TrainGroup(
            group_id=group.group_id,
            tokens=group.tokens,
            payload=await self._ledger.bytes_of(group.payload),
            rewards=scores.rewards,
            valid=scores.valid,
            reference=None if group.reference is None else await self._ledger.bytes_of(group.reference),
            values=None if group.values is None else await self._ledger.bytes_of(group.values),
            mini_batch=group.place // self._groups_per_update,
        )
