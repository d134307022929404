"""One lineage of a run: from its beginning or a checkpoint to its last step, or until trainer or critic is lost.

::

    begin → [evaluate] → train → evaluate → save                                the run is over
        |__________________|________|________|   lost(trainer or critic)  →  generate as far as staleness allows  →  end

What needs the groups under training is the lineage's course, and ends when one of them is lost. Admission, generation, scores
and the journal go on beside it until other groups are there: then another lineage goes on from the newest checkpoint.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from runtime import codec, run_files
from runtime.cluster.topology import alternates
from runtime.coordinator.accounting import Books, BusyMeter, gap, line
from runtime.coordinator.buffer import Buffer
from runtime.coordinator.checkpoints import Checkpoints
from runtime.coordinator.devices import devices_of
from runtime.coordinator.dynamic_sampling import DynamicSampling
from runtime.coordinator.evaluation import Evaluator
from runtime.coordinator.groups import STREAM, GroupStage
from runtime.coordinator.history import History
from runtime.coordinator.loss import Watch
from runtime.coordinator.probes import Probes
from runtime.coordinator.roles import Roles, Updated
from runtime.coordinator.rollout_pool import RolloutPool
from runtime.coordinator.run_context import Material, needs
from runtime.coordinator.train_loop import TrainedStep, TrainLoop
from runtime.coordinator.updates import AlternatingUpdates, ModelUpdates
from runtime.coordinator.weight_sync import Publisher
from runtime.data.prompts import PromptStream, StreamState
from runtime.errors import ServiceFault
from runtime.evaluation import results as evaluation
from runtime.evaluation.results import EvaluationResult
from runtime.ledger import checkpoint
from runtime.ledger.position import Position
from runtime.ledger.records import Note
from runtime.ports import RolloutPort, UpdatePort
from runtime.process.aio import TaskGroup
from runtime.status import Progress
from runtime.telemetry import startup
from runtime.telemetry.metrics import SpanClock
from runtime.types import PolicyVersion

WHY_ENDED = "run ended"
INTERRUPTED = "interrupted"


class Lineage:
    """`execute` is all of it; `stop` ends it in order."""

    def __init__(self, material: Material, roles: Roles, pool: RolloutPool, history: History):
        """`pool` and `history` are the run's, and outlive it."""
        config = material.config
        self._material, self._config, self._roles, self._pool, self._history = material, config, roles, pool, history
        self._stream = PromptStream(
            material.train.problems, config.run.seed, config.data.shuffle, material.train.shares, config.data.curriculum
        )
        self._position = self._first_position()
        first = self._position.version.step if self._position else 0
        self._incarnation = 0
        self._needs = needs(config)
        self._buffer = Buffer(
            needs=self._needs,
            groups_per_step=config.training.groups_per_step,
            staleness=config.training.staleness,
            journal=material.ledger.record,
            step=first,
        )
        self._buffer.last_step = config.training.steps
        history.goes_on_at(first)
        self._checkpoints = Checkpoints(material, roles, self._stream, self._buffer, history)
        self._spans = SpanClock()
        self._publisher = Publisher(roles.trainer, pool, config.publication, config.deadlines.train)
        self._meter = BusyMeter(pool, config.deadlines.silence)
        limit = config.algorithm.dynamic_sampling_limit * config.training.groups_per_step
        self._dynamic = DynamicSampling(self._buffer, limit) if config.algorithm.dynamic_sampling else None
        self._probes = Probes(material, pool, history, self._spans, self._buffer.ready_changed)
        self._books = Books(material, self._spans, self._buffer, self._meter, pool, history.totals, self._dynamic, self._probes)
        self._devices = devices_of(config, roles, pool, self._publisher, self._buffer, self._probes, self._spans)
        self._groups = GroupStage(material, roles, pool, self._devices, self._buffer, self._stream, self._spans, self._dynamic)
        self._training = self._train_loop()
        evaluates = material.held_out and config.rewards.rules
        self._evaluator = Evaluator(material, roles, pool) if evaluates else None
        self._evaluating: asyncio.Task[Any] | None = None
        self._admission: asyncio.Task[None] | None = None
        self._begun = history.lineages > 0
        self._updated: list[UpdatePort] = [roles.trainer] if roles.critic is None else [roles.trainer, roles.critic]
        self._regrouping: asyncio.Future[Updated] | None = None
        self.accuracy_after: float | None = None
        self._interrupted = False

    # ------------------------------------------------------------------------------------------ from outside

    def stop(self, reason: str) -> None:
        """End after the step under way and save. Asked for from outside, it also ends an evaluation, and there is no other."""
        self._buffer.stop(reason)
        self._interrupted = self._interrupted or reason == INTERRUPTED
        for task in (self._evaluating, self._regrouping):
            if self._interrupted and task is not None:
                task.cancel()

    @property
    def stop_reason(self) -> str:
        return self._buffer.stop_reason

    @property
    def buffer(self) -> Buffer:
        return self._buffer

    @property
    def publisher(self) -> Publisher:
        return self._publisher

    @property
    def gap(self) -> str:
        """How far rollouts and trainer were apart in the newest step; "" where nothing was compared."""
        return gap(self._books.figures)

    async def execute(self) -> Updated | None:
        """The whole lineage. None when the run is over; after a loss, the groups with which another lineage goes on.

        Raises ServiceFault, UserError (a full disk), InvariantViolated.
        """
        async with TaskGroup() as tasks:
            self._tasks = tasks
            self._beside = [tasks.create_task(self._material.ledger.run(self._config.ledger.tick))]
            watch = Watch(self._updated, self._material.lost, self._can_recover)
            updated = None
            if not await watch.holds(self._course()):
                updated = await self._regrouped(watch.fault)
            await self._close()
        await self._material.ledger.flush()
        return updated

    async def _close(self) -> None:
        """End what is left, whatever it is at. A group that is being generated would be of two lineages' weights: another
        generates it from the same seed."""
        for task in (*self._beside, self._admission, self._evaluating):
            if task is not None:
                task.cancel()
        self._probes.close()
        await self._groups.close()
        self._publisher.close()

    def arrive(self, rollout: RolloutPort) -> None:
        """A rollout has come, perhaps in the place of one that was lost."""
        self._devices.arrive(rollout)

    def _train_loop(self) -> TrainLoop:
        config, roles = self._config, self._roles
        updates = ModelUpdates(roles.trainer, roles.critic, self._spans)
        if alternates(config) and roles.critic is not None:
            updates = AlternatingUpdates(roles.trainer, roles.critic, self._spans)
        return TrainLoop(
            config=config,
            updates=updates,
            devices=self._devices,
            probes=self._probes,
            buffer=self._buffer,
            ledger=self._material.ledger,
            spans=self._spans,
            checkpoints=self._checkpoints,
            observer=self,
        )

    def _can_recover(self) -> bool:
        return (
            self._devices.trainer_is_replaceable
            and self._begun
            and self._material.regroup is not None
            and not self._interrupted
        )

    async def _regrouped(self, loss: ServiceFault) -> Updated:
        """Wait for other groups, while the rollouts go on as far as the staleness bound allows. Raises `loss` when the run is
        interrupted meanwhile, or when as many lineages in a row as a trainer may be started again have not got any further."""
        regroup, history = self._material.regroup, self._history
        assert regroup is not None
        history.lost(self._buffer.committed)
        if history.fruitless > self._config.services.trainer.restarts.attempts:
            message = f"{loss.reason}; {history.fruitless} times in a row before any step after {history.furthest}"
            raise ServiceFault(loss.service, loss.phase, message) from loss
        self._report("recovering", detail=str(loss))
        self._regrouping = asyncio.ensure_future(regroup())
        try:
            return await self._regrouping
        except asyncio.CancelledError:
            if self._interrupted:
                raise loss from None
            raise

    # ------------------------------------------------------------------------------------------ the course of the run

    async def _course(self) -> None:
        """All that needs the groups under training."""
        history, config = self._history, self._config
        async with TaskGroup() as tasks:
            await self._begin()
            keeper = tasks.create_task(self._publisher.run())
            if not history.evaluated_before:
                history.accuracy_before = await self._evaluate_before()
                history.evaluated_before = True
            await self._train(tasks)
            await self._end_groups()
            self.accuracy_after = await self._evaluate_alone(config.evaluation.after)
            await self._save_end()
            keeper.cancel()

    async def _begin(self) -> None:
        """Restore, connect the publication group, and bring the first version to every rollout."""
        self._report("recovering" if self._history.lineages else "starting")
        if self._position is not None:
            await self._restore(self._position)
        before, version = time.monotonic(), PolicyVersion(self._incarnation, self._buffer.step)
        async with self._devices.lease("trainer") as lease:
            await lease.sync(version)
        self._material.startup.phases.setdefault("first publication", time.monotonic() - before)
        self._begun = True
        self._beside += [self._tasks.create_task(self._pool.guard()), self._tasks.create_task(self._meter.run())]

    async def _evaluate_before(self) -> float | None:
        began = time.monotonic()
        accuracy = await self._evaluate_alone(self._config.evaluation.before)
        if accuracy is not None:
            self._material.startup.phases[startup.NOT_COUNTED] = time.monotonic() - began
        return accuracy

    async def _train(self, tasks: TaskGroup) -> None:
        """Admission and training until the last step."""
        history = self._history
        history.rl_began = history.rl_began or time.monotonic()
        self._spans.close_step()
        self._report("training")
        if self._buffer.stop_reason:
            return
        self._admission = self._tasks.create_task(self._groups.run(self._tasks))
        await self._training.run(tasks)
        self._admission.cancel()
        await self._evaluation_over()
        self._buffer.stop("all steps done")
        history.rl_seconds = time.monotonic() - history.rl_began

    async def _end_groups(self) -> None:
        """Give up what is still on its way; its prompts come first when the run is resumed."""
        self._probes.close()
        await self._groups.close()
        for group in sorted(self._buffer, key=lambda group: group.group_id):
            ticket = self._buffer.drop(group.group_id, WHY_ENDED)
            self._stream.give_back(ticket.problem)
        self._material.ledger.record(Note(key=STREAM, value=codec.encode(self._stream.state())))

    async def finished(self, trained: TrainedStep) -> None:
        """After each step: the books, a checkpoint's record, an evaluation if one is due, and the conditions to stop."""
        config, step, history = self._config, trained.step + 1, self._history
        await self._books.step(trained)
        if startup.TOTAL not in self._material.startup.phases:
            self._started_up()
        if config.stop.hours and time.monotonic() - history.rl_began >= config.stop.hours * 3600:
            self.stop(f"{config.stop.hours:g} hours are over")
        if self.evaluates(step):
            if self._is_evaluating():
                history.skipped_evaluations += 1  # training waits for none
            else:
                self._evaluating = self._tasks.create_task(self._evaluate_beside(step))
                await asyncio.sleep(0)  # it takes the rollouts' devices before the trainer may
        self._report("training")

    def evaluates(self, step: int) -> bool:
        """Whether version `step` is to be evaluated beside training."""
        every = self._config.evaluation.every
        return self._evaluator is not None and every > 0 and step % every == 0 and step < self._buffer.last_step

    def _is_evaluating(self) -> bool:
        return self._evaluating is not None and not self._evaluating.done()

    def _started_up(self) -> None:
        """The first step is done: it is known when its batch was whole in the trainer's hands."""
        phases, submitted = self._material.startup.phases, self._training.first_applied
        phases["first step"] = submitted - self._history.rl_began
        phases[startup.TOTAL] = submitted - self._material.launched - phases.get(startup.NOT_COUNTED, 0.0)
        self._material.startup.write(self._material.folder)

    async def _evaluate_beside(self, step: int) -> None:
        assert self._evaluator is not None
        async with self._devices.lease("rollout"):
            found = await self._evaluator.run(step, alone=False)
        await self._note(step, found)
        goal = self._config.stop.accuracy
        if goal and found.accuracy >= goal:
            self.stop(f"accuracy {found.accuracy:.1%} reached {goal:.1%}")

    async def _evaluation_over(self) -> None:
        """Wait for the evaluation under way, if there is one; it may have been cut short."""
        if self._evaluating is not None:
            await asyncio.wait([self._evaluating])

    async def _evaluate_alone(self, wanted: bool) -> float | None:
        """Before or after training. None when it is not wanted, or was cut short."""
        if self._evaluator is None or not wanted or self._interrupted:
            return None
        step = self._buffer.committed

        def report(done: int, total: int) -> None:
            self._report("evaluating", done, total)

        evaluating = self._evaluating = self._tasks.create_task(self._evaluator.run(step, alone=True, progress=report))
        await self._evaluation_over()
        if evaluating.cancelled():
            return None
        found = evaluating.result()
        await self._note(step, found)
        return found.accuracy

    async def _note(self, step: int, found: EvaluationResult) -> None:
        self._checkpoints.accuracy[step] = found.accuracy
        await self._books.evaluation(
            step, {**evaluation.metrics(found), "eval/skipped": float(self._history.skipped_evaluations)}
        )

    # ------------------------------------------------------------------------------------------ the end, and a new start

    async def _save_end(self) -> None:
        self._report("saving")
        step = self._buffer.committed
        await self._training.saved()  # it may be of the same step
        async with self._devices.lease("trainer", last=True):
            await self._checkpoints.save_end(step)
            folder = self._material.folder / run_files.MODEL
            await self._roles.trainer.export(str(folder.absolute()))

    def _first_position(self) -> Position | None:
        """Where the lineage begins; None for a run without a past."""
        if self._history.folder:
            position = checkpoint.read_position(Path(self._history.folder))
            self._stream.restore(position.stream)
            return position
        if self._history.lineages:
            return Position(version=PolicyVersion(), stream=self._stream.state(), trained=[])
        return None

    async def _restore(self, position: Position) -> None:
        """Take over what the ledger has of the groups that the checkpoint does not name as trained, as a new incarnation."""
        if (newest := await self._material.ledger.note(STREAM)) is not None:
            self._stream.restore(codec.decode(StreamState, newest))
        else:  # the checkpoint of another folder, whose ledger knows the groups that were on their way
            for problem in position.pending:
                self._stream.give_back(problem)
        restored = await self._material.ledger.restore(position.version.step, position.trained, self._needs)
        self._buffer.load(restored.groups)
        evaluation.forget_after(self._material.folder, position.version.step)
        if self._dynamic is not None:
            self._dynamic.judge_restored()
        self._incarnation = self._training.incarnation = self._books.incarnation = max(
            restored.incarnation, position.version.incarnation + 1
        )
        self._checkpoints.resume(self._incarnation, position)
        if self._history.folder:
            await asyncio.gather(*(model.restore(self._history.folder) for model in self._updated))

    # ------------------------------------------------------------------------------------------ what is said of it

    def _report(self, phase: str, done: int = 0, total: int = 0, detail: str = "") -> None:
        figures = self._books.figures
        if (newest := self._checkpoints.newest_accuracy) is not None:
            figures["eval/accuracy"] = newest
        step, steps = self._buffer.committed, self._config.training.steps
        if phase == "training":
            done, total = step, steps
        detail = detail or line(figures)
        alarm = self._history.alarm
        self._material.report(Progress(phase=phase, step=step, steps=steps, done=done, total=total, detail=detail, alarm=alarm))
