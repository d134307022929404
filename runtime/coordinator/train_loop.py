"""The last stages: fill a step's batch by deadline, apply the step, publish the new version.

Step v trains version v and makes v + 1. While v is applied and v + 1 published, the batch of step v + 1 is already filled and
sent: the trainer holds one batch ahead. A critic gets the same commands in the same order, and updates in parallel with the
trainer. A step's groups are consumed once both have applied it, and retire once its version is committed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import closing
from functools import partial
from typing import Any

from msgspec.structs import replace

from runtime.chosen_algorithm import groups_per_update, streams
from runtime.cluster.topology import alternates
from runtime.commands import Accumulate, Apply, BeginStep, Keep, Offload, Onload, RolePort
from runtime.coordinator.buffer import Buffer, Group
from runtime.coordinator.metrics_recorder import MetricsRecorder, RunContext, TrainedStep
from runtime.coordinator.pools import Roles
from runtime.coordinator.recovery import Checkpoints
from runtime.coordinator.weight_sync import Devices, Lease, WeightSync
from runtime.ledger.checkpoint import Position
from runtime.process.waiting import now
from runtime.telemetry.metrics import UPDATE, UPDATE_CRITIC, SpanClock, WeightSyncFigures
from runtime.telemetry.summary import Totals
from runtime.types import PolicyVersion, StepResult, TrainGroup


class TrainLoop:
    """Runs the steps of an attempt."""

    def __init__(
        self,
        context: RunContext,
        roles: Roles,
        devices: Devices,
        buffer: Buffer,
        recorder: MetricsRecorder,
        checkpoints: Checkpoints,
    ):
        config = context.config
        updates = AlternatingUpdates if alternates(config) else ModelUpdates
        self._updates = updates(roles.models, context.spans, config.checkpoint.in_memory != "off")
        self._devices, self._buffer, self._recorder, self._checkpoints = devices, buffer, recorder, checkpoints
        self._ledger, self._spans, self._history = context.ledger, context.spans, context.history
        self._supervisor = context.supervisor
        self._streams = streams(config)
        self._groups_per_update = groups_per_update(config)
        self._save_every = config.checkpoint.every
        self._running: asyncio.Task[None] | None = None
        self._saving: asyncio.Task[None] | None = None
        self._recorded: asyncio.Future[Totals] | None = None  # done when the step of the checkpoint being written is recorded
        self.next = buffer.step  # the step whose batch is to be applied next

    async def run(self, tasks: asyncio.TaskGroup) -> None:
        """Train until the buffer's `last_step`. A failed command of the trainer fails the task group."""
        self._tasks = tasks
        # On shared devices `next_lease` waits until the rollouts have generated all that the staleness bound admits.
        while self.next < self._buffer.step or await self._devices.next_lease():
            async with self._devices.lease("trainer") as lease:
                unpublished = await self._steps(lease)
            # A shared lease publishes its last version at its end. Then commit and record this version here.
            if lease.version is not None:
                self._buffer.commit(lease.version.step)
            if unpublished is not None:
                await self._finished(replace(unpublished, weight_sync=lease.figures))

    async def _steps(self, lease: Lease) -> TrainedStep | None:
        """Make the steps of a lease. Return the last step if it is published only at the lease's end."""
        while (batch := await self._fill(self.next)) is not None:
            step, self.next = self.next, self.next + 1
            # `_fill` waits for ready groups. The run's position must be read before the step is applied.
            position = None
            if self._save_every and not (step + 1) % self._save_every:
                position = await self._checkpoints.position(step + 1)
                await self.saved()  # one checkpoint at a time
            if self._running is not None:
                await self._running  # until the previous step is published and recorded
            # Write what a new coordinator must know of this step and the previous one, before the update is ordered.
            await self._ledger.flush()
            # Order the update, and right behind it the weight sync of the new version.
            applying = await self._apply(step)
            sync = await lease.begin_sync(self._buffer.version(step + 1))
            if sync is not None:  # update and sync go on while the next batch is filled
                self._running = self._tasks.create_task(self._finish(step, batch, applying, sync))
                if position is not None:
                    self._save(step + 1, position)
                continue
            trained = await self._finish_unpublished(step, batch, applying, position)
            if not self._goes_on():
                return trained
            await self._finished(trained)
        if self._running is not None:
            await self._running
        return None

    def _goes_on(self) -> bool:
        """Return True if there is a batch for another step before the rollouts need the newest version."""
        buffer = self._buffer
        goes_on = buffer.step < buffer.last_step and not self._recorder.evaluates(buffer.step)
        return self.next < buffer.step or (goes_on and self._devices.have_batch())

    async def _apply(self, step: int) -> list[asyncio.Task[StepResult]]:
        """Order the update. Return the tasks of the trainer's result and of the critic's, if there is one. A task ends once the
        update is copied: a version that rollouts commit cannot be lost with the ranks that made it."""
        if self._updates.alternating:
            await self.saved()  # saving uses the devices as well
        probes = await self._recorder.probes.answers(self._buffer.version(step))
        applying = await self._updates.apply(self._tasks, self._buffer.version(step + 1), probes)
        self._recorder.first_applied = self._recorder.first_applied or now()
        return applying

    async def saved(self) -> None:
        """Wait until the checkpoint ordered last, if any, is complete."""
        if self._saving is not None:
            await self._saving

    def _save(self, step: int, position: Position, written: asyncio.Future[None] | None = None) -> None:
        """Order the checkpoint of version `step`, behind the commands before. `written`: see `Checkpoints.save`."""

        self._recorded = asyncio.get_running_loop().create_future()
        saving = self._checkpoints.save(step, position, self._recorded, written)
        self._saving = self._tasks.create_task(self._checkpoints.unless_full(step, saving))

    async def _fill(self, step: int) -> list[Group] | None:
        """Take the groups of `step` as they become ready, and send them to the models. Return None if the run ends first."""
        buffer = self._buffer
        if batch := buffer.taken(step):  # taken by an earlier coordinator
            await self._send(step, batch, first=True)
        if self._running is not None:
            self._running.add_done_callback(lambda _: buffer.ready_changed.set())
        while buffer.step == step:
            buffer.trainer_waits = False
            if step >= buffer.last_step:
                return None
            buffer.ready_changed.clear()
            groups = buffer.take(step, whole=not self._may_stream())
            if groups:
                await self._send(step, groups, first=not batch)
                batch += groups
            else:
                buffer.trainer_waits = self._running is None or self._running.done()
                if buffer.trainer_waits:
                    buffer.room_changed.set()
                await buffer.ready_changed.wait()
        return batch

    async def _send(self, step: int, groups: list[Group], first: bool) -> None:
        """Send a part of the batch. The step begins with the first: between steps the trainer's devices may be lent out."""
        if first:
            self._updates.begin(self._tasks, step)
        last = self._buffer.step != step
        self._updates.accumulate(self._tasks, step, [await self._train_group(group) for group in groups], last)

    def _may_stream(self) -> bool:
        """Return True if the trainer is idle and has half of what the batch lacks: parts are few, and the last one is small."""
        idle = self._running is None or self._running.done()
        return self._streams and idle and 2 * self._buffer.takeable >= self._buffer.places

    async def _finish(self, step: int, batch: list[Group], applying: list[asyncio.Task[StepResult]], sync: WeightSync) -> None:
        """Finish a step whose version is published as soon as the trainer has it."""
        trainer, *others = applying
        # Wait until the trainer has the version; then publish it. The rollouts need not wait for the critic, whose result
        # `joined` awaits meanwhile. Both must be done before the step is over.
        with closing(sync):
            await trainer
            async with asyncio.TaskGroup() as both:
                publishing = both.create_task(self._publish(sync))
                result = await joined(trainer, others)
                self._buffer.consume(step, result.seconds)
        self._buffer.commit(step + 1)
        trained = TrainedStep(step=step, groups=batch, result=result, weight_sync=publishing.result())
        await self._finished(trained)

    async def _finished(self, trained: TrainedStep) -> None:
        """Record the finished step. The models may drop their answers once the ledger has been written."""
        await self._recorder.finished(trained)
        if self._recorded is not None and not self._recorded.done():
            self._recorded.set_result(self._history.totals.copy())
        self._ledger.then(partial(self._updates.acknowledge, trained.step))
        self._supervisor.step_over()

    async def _finish_unpublished(
        self, step: int, batch: list[Group], applying: list[asyncio.Task[StepResult]], position: Position | None
    ) -> TrainedStep:
        """Finish a step whose version is published at the end of the lease, after the models have written their checkpoint."""
        trainer, *others = applying
        result = await joined(trainer, others)
        self._buffer.consume(step, result.seconds)
        if position is not None:
            written = asyncio.get_running_loop().create_future()
            self._save(step + 1, position, written)
            assert self._saving is not None
            await asyncio.wait({written, self._saving}, return_when=asyncio.FIRST_COMPLETED)
        return TrainedStep(step=step, groups=batch, result=result, weight_sync=None)

    async def _publish(self, sync: WeightSync) -> WeightSyncFigures:
        with self._spans.span("weight_sync"):
            return await sync.finish()

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


class ModelUpdates:
    """Sends trainer and critic the same commands in the same order; both update in parallel."""

    alternating = False

    def __init__(self, models: Sequence[RolePort], spans: SpanClock, keeps: bool):
        """Create it. `keeps`: each update is copied into memory that outlives the ranks, before it counts as applied."""
        self._models, self._spans, self._keeps = models, spans, keeps

    def begin(self, tasks: asyncio.TaskGroup, step: int) -> None:
        for model in self._models:
            tasks.create_task(model.post(BeginStep(step)))

    def accumulate(self, tasks: asyncio.TaskGroup, step: int, groups: list[TrainGroup], last: bool) -> None:
        """Send a part of the step's batch; `last`: it completes the batch."""
        for model in self._models:
            tasks.create_task(model.post(Accumulate(step, groups, last)))

    def acknowledge(self, step: int) -> None:
        """Acknowledge the result of `step`: it is in the ledger."""
        for model in self._models:
            model.acknowledge(Apply(step))

    async def apply(
        self, tasks: asyncio.TaskGroup, version: PolicyVersion, probes: Sequence[bytes]
    ) -> list[asyncio.Task[StepResult]]:
        """Order the update that makes `version`; the trainer's command is sent when this returns. Return the tasks of the
        results, trainer first; each ends once the update is copied as well."""
        step = version.step - 1
        trainer, *critics = self._models
        trained = self._applied(trainer, Apply(step, tuple(probes)), version, UPDATE)
        valued = [self._applied(critic, Apply(step), version, UPDATE_CRITIC) for critic in critics]
        return [tasks.create_task(each) for each in (trained, *valued)]

    def _applied(self, model: RolePort, apply: Apply, version: PolicyVersion, phase: str) -> Coroutine[Any, Any, StepResult]:
        """Send the update, and the order to copy its result, now. The returned coroutine waits for both."""
        applied = self._timed(model.post(apply), phase)
        return _first(applied, *([model.post(Keep(version))] if self._keeps else []))

    async def _timed(self, apply: Coroutine[Any, Any, StepResult], phase: str) -> StepResult:
        result = await apply
        end = now()
        self._spans.add(phase, end - result.seconds, end)
        return result


class AlternatingUpdates(ModelUpdates):
    """Updates the critic while the trainer's state is off the devices, then the trainer while the critic's state is.

    The batch is kept here until a model's update, since it would bring the model's state back. After its update the trainer's
    state stays on the devices for the weight sync, until the next step or another role needs the devices."""

    alternating = True
    _parts: list[tuple[list[TrainGroup], bool]]

    def begin(self, tasks: asyncio.TaskGroup, step: int) -> None:
        self._parts = []

    def accumulate(self, tasks: asyncio.TaskGroup, step: int, groups: list[TrainGroup], last: bool) -> None:
        self._parts.append((groups, last))

    async def apply(
        self, tasks: asyncio.TaskGroup, version: PolicyVersion, probes: Sequence[bytes]
    ) -> list[asyncio.Task[StepResult]]:
        # Offload waits for the commands before: the trainer's newest version is gathered. Then the critic loads and updates.
        trainer, critic = self._models
        await trainer.call(Offload())
        await critic.call(Onload())
        step = version.step - 1
        valued = self._update(tasks, critic, Apply(step), version, UPDATE_CRITIC)
        await valued
        # The trainer loads only after the critic has left the devices.
        await critic.call(Offload())
        await trainer.call(Onload())
        return [self._update(tasks, trainer, Apply(step, tuple(probes)), version, UPDATE), valued]

    def _update(
        self, tasks: asyncio.TaskGroup, model: RolePort, apply: Apply, version: PolicyVersion, phase: str
    ) -> asyncio.Task[StepResult]:
        """Send the batch that was kept, and order the update."""
        tasks.create_task(model.post(BeginStep(apply.step)))
        for groups, last in self._parts:
            tasks.create_task(model.post(Accumulate(apply.step, groups, last)))
        return tasks.create_task(self._applied(model, apply, version, phase))


async def _first(first: Coroutine[Any, Any, StepResult], *others: Coroutine[Any, Any, None]) -> StepResult:
    """Return the result of the first, once all are done."""
    result, *_ = await asyncio.gather(first, *others)
    return result


async def joined(trainer: asyncio.Task[StepResult], others: Sequence[asyncio.Task[StepResult]]) -> StepResult:
    """Return the trainer's result with the metrics of all; the trainer's metrics win over others of the same name."""
    result = await trainer
    for applied in others:
        result = replace(result, metrics=(await applied).metrics | result.metrics)
    return result
