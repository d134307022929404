"""A run from its first evaluation to its last check, through all its attempts: the coordinator's logic, above the ports.

An attempt goes from the beginning or a checkpoint to the last step, or until trainer or critic is lost.

::

    begin → [evaluate] → train → [evaluate] → save                                the run is over
        |__________________|________|__________|   lost(trainer or critic)  →  wait for restarts  →  the next attempt

    TrainingRun owns   RolloutPool, RunHistory, and one Attempt after the other
    Attempt owns       everything below; a task for each line that waits

    GroupStage         admits prompts, waits for room in the buffer; a task for each group: rollout → reward, reference, critic
       ↓ Buffer        its groups, in their states; bounded by the staleness bound; every change goes into the ledger
    TrainLoop          waits for a batch → trainer and critic: accumulate, apply → WeightPublisher: new weights to the rollouts
       ↓ finished()    MetricsRecorder; an Evaluator beside training, in a task; Checkpoints
    Devices            TrainLoop, evaluations and references wait for the devices that they share
    WeightPublisher.run      waits for changes of the living rollouts, and gives newcomers the committed version
    RolloutPool.guard  waits until no rollout has served for too long: that ends the run
    Recovery           waits until the register reports the loss of trainer or critic

When trainer or critic is lost, `_until_saved`, which needs both, is cancelled. All else goes on until both are started again.
Then the next attempt takes up the run from their copies in memory, or else goes on from the newest checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from runtime import run_files, types
from runtime.chosen_algorithm import streams
from runtime.cluster.topology import takes_turns
from runtime.commands import Export, Keep, Restore
from runtime.config import Config
from runtime.coordinator import failover
from runtime.coordinator.buffer import Buffer, DynamicSampling, asked_of
from runtime.coordinator.devices import ColocatedDevices
from runtime.coordinator.evaluation import evaluator_of
from runtime.coordinator.failover import FailoverState, NotInMemory
from runtime.coordinator.gateways import rollout_pool
from runtime.coordinator.group_pipeline import STREAM, GroupStage
from runtime.coordinator.metrics_recorder import (
    MetricsRecorder,
    RunContext,
    RunHistory,
    RunState,
    gap,
    needs,
    run_state,
    save_run_state,
)
from runtime.coordinator.pools import Roles, RolloutPool
from runtime.coordinator.recovery import Checkpoints, Recovery, models_back, started_anew
from runtime.coordinator.register import ROLLOUT, Register, UnitState
from runtime.coordinator.staleness import PipelineDepth, most_live
from runtime.coordinator.train_loop import TrainLoop
from runtime.coordinator.weight_sync import Devices, WeightPublisher
from runtime.data.prompts import PromptStream, StreamState
from runtime.errors import SluiceError, Unreachable, UserError
from runtime.evaluation import results as evaluation
from runtime.evaluation.results import EvaluationResult
from runtime.ledger import checkpoint
from runtime.ledger.checkpoint import Position
from runtime.ledger.journal import Note
from runtime.ledger.reader import LedgerReader
from runtime.ledger.states import Phase
from runtime.process.waiting import now
from runtime.status import Progress, RunFigures
from runtime.telemetry import startup
from runtime.telemetry.summary import Summary
from runtime.types import PolicyVersion


def depth_of(config: Config) -> PipelineDepth:
    """Return the depth of the pipeline: the staleness bound if so configured, or if the trainer shares devices."""
    training = config.training
    measured = training.depth == "auto" and not takes_turns(config)
    bound = most_live(training.staleness, training.groups_per_step)
    return PipelineDepth(training.groups_per_step, bound, measured, streams(config))


WHY_ENDED, INTERRUPTED = "run ended", "interrupted"


class Attempt:
    """`execute` runs the attempt; `stop` ends it in order."""

    def __init__(self, context: RunContext, pool: RolloutPool, taken_up: FailoverState | None = None):
        """Create an attempt. `taken_up`: an earlier coordinator's state. Raises Unreachable without trainer or critic."""
        config, history = context.config, context.history
        roles = Roles(pool.register, config.deadlines.start, taken_up.models if taken_up else ())
        self._context, self._config, self._roles, self._pool, self._history = context, config, roles, pool, history
        train, data = context.train, config.data
        self._stream = PromptStream(train.problems, config.run.seed, data.shuffle, train.shares, data.curriculum)
        self._taken_up = taken_up
        self._position = None if taken_up else self._first_position()
        first = taken_up.version.step if taken_up else self._position.version.step if self._position else 0
        self.buffer = Buffer(
            needs=needs(config),
            groups_per_step=config.training.groups_per_step,
            staleness=config.training.staleness,
            journal=context.ledger,
            step=first,
            clock=context.time,
            depth=depth_of(config),
        )
        self.buffer.last_step = config.training.steps
        history.accuracy = {step: accuracy for step, accuracy in history.accuracy.items() if step <= first}
        self._checkpoints = Checkpoints(context, roles, self._stream, self.buffer)
        self.publisher = WeightPublisher(roles.trainer, pool, config.weight_sync, config.deadlines.train)
        limit = config.algorithm.dynamic_sampling_limit * config.training.groups_per_step
        self._dynamic = DynamicSampling(self.buffer, limit) if config.algorithm.dynamic_sampling else None
        self._evaluator = evaluator_of(context, roles.scorers, pool)
        evaluate = None if self._evaluator is None else self._evaluate_beside
        self.recorder = MetricsRecorder(context, roles, pool, self.buffer, self._dynamic, evaluate)
        self._devices = (
            ColocatedDevices(context, roles, pool, self.publisher, self.buffer, self.recorder.probes)
            if takes_turns(config)
            else Devices(pool, self.publisher, self.buffer)
        )
        self._groups = GroupStage(context, roles, pool, self._devices, self.buffer, self._stream, self._dynamic)
        self._training = TrainLoop(context, roles, self._devices, self.buffer, self.recorder, self._checkpoints)
        self._evaluating: asyncio.Task[Any] | None = None
        self._recovery = Recovery(context, roles, pool.register)
        self.accuracy_after: float | None = None
        self.vacated = False  # after a loss: the devices are free for another trainer
        self.follows: FailoverState | None = None  # after a loss: the state that the next attempt takes up

    # ------------------------------------------------------------------------------------------ public

    def stop(self, reason: str) -> None:
        """End after the step under way, and save. `INTERRUPTED` also ends the evaluation under way and prevents later ones."""
        self.buffer.stop(reason)
        if reason == INTERRUPTED:
            self._context.supervisor.interrupted = True
            self._recovery.interrupt()
            if self._evaluating is not None:
                self._evaluating.cancel()

    async def execute(self) -> bool:
        """Run the attempt. Return False if the run is over, True if a model was lost and the models of the next attempt serve.
        Raises ServiceFault, UserError (a full disk), InvariantViolated."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks, self._beside = tasks, list[asyncio.Task[Any]]()
            self._go_beside(self._context.ledger.run())
            if (loss := await self._recovery.run_until_lost(self._until_saved())) is not None:
                # Rollouts go on meanwhile, unless they share devices. Wait for the registration of trainer and critic.
                self._recovery.check_progress(loss, self.buffer.committed)
                self.recorder.report("recovering", detail=str(loss))
                await self._vacate()
                await self._recovery.wait_restarted(loss)
                self.follows = await self._recall()
            await self._close()  # ends the tasks before the last records are written
        await self._context.ledger.flush()
        return loss is not None

    async def _recall(self) -> FailoverState | None:
        """Return the state in which the next attempt takes up the run; None if it has to go back to a checkpoint."""
        if self._config.checkpoint.in_memory != "off":
            return await _taken_up(self._context, self._pool.register, run_state(self._context, self._roles))
        self._context.history.go_back()
        return None

    def _go_beside(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:  # until `_close`
        self._beside.append(self._tasks.create_task(work))
        return self._beside[-1]

    async def _close(self) -> None:
        """End all remaining tasks. Groups under way go on in the next attempt if it takes up the run. Otherwise it generates
        them again: they would mix the weights of two."""
        for task in self._beside:
            task.cancel()
        self.recorder.probes.close()
        self._devices.close()
        await self._groups.close(handed_over=self.follows is not None)
        self.publisher.close()

    async def _vacate(self) -> None:
        """Free shared devices for another trainer: stop all generation and put the rollouts to sleep."""
        if isinstance(self._devices, ColocatedDevices):
            await self._close()
            await self._devices.vacate()
        self.vacated = True
        self._context.supervisor.vacated()

    # ------------------------------------------------------------------------------------------ from begin to save

    async def _until_saved(self) -> None:
        """Do all that needs trainer and critic, from the first version to the last checkpoint."""
        history, config = self._history, self._config
        async with asyncio.TaskGroup() as tasks:
            # `_begin` waits until every rollout has the first version. From then on the keeper syncs newcomers.
            await self._begin()
            keeper = tasks.create_task(self.publisher.run())
            if not history.evaluated_before:
                began = now()
                history.accuracy_before = await self._evaluate_alone(config.evaluation.before)
                history.evaluated_before = True
                if history.accuracy_before is not None:
                    self._context.startup.phases[startup.NOT_COUNTED] = now() - began
                save_run_state(self._context, self._roles)
            # Wait for all steps. Then drop the groups that no step has taken, and evaluate and save the result.
            await self._train(tasks)
            await self._end_groups()
            self.accuracy_after = await self._evaluate_alone(config.evaluation.after)
            await self._save_end()
            keeper.cancel()

    async def _begin(self) -> None:
        """Restore, connect the sync group, and bring the first version to every rollout."""
        self.recorder.report("recovering" if self._history.attempts or self._taken_up else "starting")
        # Restore or take over first: this sets the incarnation and step of the first version.
        if self._position is not None:
            await self._restore(self._position)
        if self._taken_up is not None:
            await self._take_up(self._taken_up)
        before, version = now(), self.buffer.version(self.buffer.committed)
        if self._position is not None and self._history.attempts:  # what is in memory of the lineage before does not count
            self._history.version = version
            save_run_state(self._context, self._roles)
        if self._taken_up is None and self._config.checkpoint.in_memory != "off":
            await asyncio.gather(*(model.call(Keep(version)) for model in self._roles.models))
        if self._pool.membership.committed != version and not self.publisher.waits_for_next:
            # At its end the lease waits for the rollouts to have the version.
            async with self._devices.lease("trainer") as lease:
                lease.version = version
            self._context.startup.phases.setdefault("first weight sync", now() - before)
        self._recovery.begun, self._history.version = True, version
        save_run_state(self._context, self._roles)
        self._go_beside(self._pool.guard())
        self._go_beside(self.recorder.meter.run(self._groups.measured))

    async def _train(self, tasks: asyncio.TaskGroup) -> None:
        """Admit and train until the last step."""
        history = self._history
        history.rl_began = history.rl_began or now()
        self._context.spans.close_step()
        self.recorder.report("training")
        if self.buffer.stop_reason:
            return
        admission = self._go_beside(self._groups.run(self._tasks, self._taken_up))
        if history.evaluating is not None:  # interrupted with the coordinator: begin it again, with the current weights
            self._evaluating = self._go_beside(self._evaluated(history.evaluating))
        await asyncio.ensure_future(self._training.run(tasks))  # in a task: a step does not pass through the attempt
        admission.cancel()
        if self._evaluating is not None:
            await asyncio.wait([self._evaluating])  # it may be cancelled
        self.buffer.stop("all steps done")
        history.rl_seconds = now() - history.rl_began

    async def _end_groups(self) -> None:
        """Drop the groups that are still under way; a resumed run begins with their prompts."""
        self.recorder.probes.close()
        await self._groups.close()
        for group in sorted(self.buffer, key=lambda group: group.group_id):
            self._stream.give_back(self.buffer.drop(group.group_id, WHY_ENDED).problem)
        self._context.ledger.record(Note(key=STREAM, value=types.encode(self._stream.state())))

    async def _evaluate_beside(self, step: int) -> None:
        """Begin an evaluation beside training, unless one runs: training waits for no evaluation."""
        if self._evaluating is not None and not self._evaluating.done():
            self._history.skipped_evaluations += 1
        else:
            self._history.evaluating = step
            self._evaluating = self._go_beside(self._evaluated(step))
            await asyncio.sleep(0)  # the evaluation takes the rollouts' lease before the trainer takes its own

    async def _evaluated(self, step: int) -> None:
        assert self._evaluator is not None
        async with self._devices.lease("rollout"):
            found = await self._evaluator.run(step, alone=False)
        accuracy, goal = await self._note(step, found), self._config.stop.accuracy
        if goal and accuracy >= goal:
            self.stop(f"accuracy {accuracy:.1%} reached {goal:.1%}")

    async def _evaluate_alone(self, wanted: bool) -> float | None:
        """Evaluate before or after training. Return None if not wanted or cancelled."""
        if self._evaluator is None or not wanted or self._context.supervisor.interrupted:
            return None
        step, report = self.buffer.committed, partial(self.recorder.report, "evaluating")
        evaluating = self._evaluating = self._go_beside(self._evaluator.run(step, alone=True, progress=report))
        await asyncio.wait([evaluating])
        return None if evaluating.cancelled() else await self._note(step, evaluating.result())

    async def _note(self, step: int, found: EvaluationResult) -> float:
        self._history.accuracy[step], self._history.evaluating = found.accuracy, None
        await self.recorder.evaluation(step, evaluation.metrics(found))
        return found.accuracy

    # ------------------------------------------------------------------------------------------ save and restore

    async def _save_end(self) -> None:
        self.recorder.report("saving")
        # Wait for the checkpoint ordered before: it may be of the same step.
        await self._training.saved()
        async with self._devices.lease("trainer", last=True):
            # Both calls wait for room on the disk: a checkpoint to resume from, and the model for other programs.
            await self._checkpoints.save_end(self.buffer.committed)
            folder = str((self._context.folder / run_files.MODEL).absolute())
            await self._checkpoints.until_room(lambda: self._roles.trainer.call(Export(folder)))

    def _first_position(self) -> Position | None:
        """Return the position at which the attempt begins, or None for a new run."""
        if self._history.folder:
            position = checkpoint.read_position(Path(self._history.folder))
            self._stream.restore(position.stream)
            return position
        beginning = Position(version=PolicyVersion(), stream=self._stream.state(), trained=[])
        return beginning if self._history.attempts else None

    async def _take_up(self, found: FailoverState) -> None:
        """Take over the groups as they are, in the same incarnation, after the step that was over last."""
        if (newest := await self._context.ledger.note(STREAM)) is not None:
            self._stream.restore(types.decode(StreamState, newest))
        self.buffer.take_up(await self._context.ledger.take_up(found.version.step))
        await self._lose_blobs(found.version.step + found.ahead)
        self.buffer.incarnation = found.version.incarnation
        self._checkpoints.take_up()
        if takes_turns(self._config):
            self._pool.membership.committed = None  # sleeping rollouts have no weights
            # The rollouts were put to sleep, so the groups in generation are generated again, from the same seeds.
            for group in [one for one in self.buffer if one.state.phase == Phase.GENERATING]:
                self.buffer.lose(group.group_id)
        else:
            self._pool.take_up(found.version, found.having)
            if found.lives:
                self.publisher.kept = found.version  # the trainer has gathered it into its buckets
        self.publisher.waits_for_next = self.recorder.probes.given_before = found.ahead

    async def _lose_blobs(self, made: int, since: int = 0) -> None:
        """Have the groups generated again whose blobs are lost. `made`, `since`: as of `Buffer.lose_blobs`."""
        find, held = self._context.holders, any(group.generated and group.generated.holders for group in self.buffer)
        if find is not None and held and (lost := self.buffer.lose_blobs(await find(), made, since)):
            log.warning("no agent holds the experts of groups %s any more: they are generated again", lost)

    async def _restore(self, position: Position) -> None:
        """Begin a new incarnation at `position`, with the ledger's groups that the checkpoint does not name as trained."""
        # Groups are restored with all their data; evaluations of later steps are forgotten.
        ledger, folder = self._context.ledger, self._history.folder
        newest = types.decode(StreamState, note) if (note := await ledger.note(STREAM)) is not None else None
        own = bool(folder) and checkpoint.is_of(self._context.folder, Path(folder))
        behind = own and position.stream.ordinal > (newest.ordinal if newest is not None else 0)
        restored = await ledger.restore(position.version.step, position.trained, self.buffer.needs, own, behind)
        if newest is not None and not restored.damaged:
            self._stream.restore(newest)
        else:  # use the checkpoint: the groups under way are in the ledger of another folder, or lost
            self._stream.lose(position.pending, restored.following)
        self.buffer.load(restored.groups)
        await self._lose_blobs(position.version.step, self._history.best_step)
        evaluation.forget_after(self._context.folder, position.version.step)
        if self._dynamic is not None:
            self._dynamic.judge_restored()
        self.buffer.incarnation = max(restored.incarnation, position.version.incarnation + 1)
        self._checkpoints.resume(position)
        if folder:
            command = Restore(folder, types.encode(position), self.buffer.incarnation)
            await asyncio.gather(*(model.post(command) for model in self._roles.models))


def run_figures(config: Config, register: Register, progress: Progress, run: TrainingRun | None) -> RunFigures:
    """Collect the figures. `run`: None before it begins, and for an evaluation alone."""
    units = register.units()
    states = {state.value: len(register.units(ROLLOUT, state)) for state in UnitState}
    lost, restarts = Counter[str](), Counter[str]()
    for unit in units:
        lost[unit.role] += unit.state is UnitState.LOST
        restarts[unit.role] += unit.incarnation
    there = [unit for unit in units if unit.state is not UnitState.DISMISSED]
    of_run: dict[str, Any] = {}
    if run is not None:
        recorder = run.attempt.recorder
        stepped, alarms = recorder.stepped and run.context.epoch + recorder.stepped, run.context.history.alarms
        newest = recorder.newest | recorder.evaluated
        of_run = {"groups": run.buffer.counts(), "newest": newest, "stepped": stepped, "alarms": alarms}
    return RunFigures(
        progress=progress,
        processes=[process for unit in there for process in unit.processes if process is not None],
        staleness=config.training.staleness,
        folder=config.run.dir,
        rollouts=states,
        lost=dict(lost),
        restarts=dict(restarts),
        **of_run,
    )


log = logging.getLogger("sluice")


async def _taken_up(context: RunContext, register: Register, course: RunState) -> FailoverState | None:
    """Bring trainer and critic to the state after `course`. They are started again if one is in another state or is lost, and
    then look for it in memory. Return None if it is not there: the run goes back to a checkpoint, and both are new."""
    config, tries = context.config, 2
    while True:
        try:
            return await failover.take_up(config, register, course)
        except SluiceError as error:
            tries -= not isinstance(error, Unreachable)
            back = not tries or isinstance(error, NotInMemory) or config.checkpoint.in_memory == "off"
            what = "the run goes back to its newest checkpoint" if back else "trainer and critic are started again"
            log.warning("%s: %s", what, error)
            await started_anew(config, register, str(error))
        if back:
            context.history.go_back()
            return None


class TrainingRun:
    """One run. `stop` ends it in order; `execute` does the work."""

    def __init__(self, context: RunContext, register: Register, taken_up: FailoverState | None = None):
        """Create the run. `taken_up`: from an earlier coordinator. Raises Unreachable without trainer or critic."""
        self.context, self._started = context, now()
        self.pool = rollout_pool(context.config, register, context.keys, context.term)
        self.attempt = Attempt(context, self.pool, taken_up)

    @classmethod
    async def taken_up(cls, context: RunContext, register: Register, course: RunState) -> TrainingRun:
        """Go on after `course`, or without its trainer or critic from the newest checkpoint. Raises DeadlineExceeded."""
        history = context.history
        history.rl_began = now() - course.rl_seconds if course.rl_seconds else 0.0
        if (found := await _taken_up(context, register, course)) is None:
            history.lost(history.version.step)
            await _require_whole(history)
            await models_back(context.config, register)
        return cls(context, register, found)

    def stop(self, reason: str) -> None:
        self.attempt.stop(reason)

    @property
    def buffer(self) -> Buffer:
        return self.attempt.buffer

    def gauges(self) -> dict[str, float]:
        membership = self.pool.membership
        counts = {name: float(number) for name, number in self.buffer.counts().items()}
        return counts | {"epoch": membership.epoch.number, "rollouts": len(membership.serving)}

    def status_lines(self) -> Iterator[str]:
        """Yield the status lines: the oldest wait, the rollouts, the transport of weights, and problems."""
        if (group := self.buffer.oldest_wait()) is not None:
            seconds = self.context.time() - group.since
            yield f"waits for group {group.group_id} ({group.state.phase.value}, {asked_of(group)}, {seconds:.1f} s)"
        yield str(self.pool)
        publisher = self.attempt.publisher
        if publisher.group.transport:
            yield f"weights by {publisher.group.transport}"
        if apart := gap(self.attempt.recorder.figures):
            yield apart
        if self.context.history.alarm:
            yield f"ALARM: {self.context.history.alarm}"
        if publisher.abort:
            yield f"last abort: {publisher.abort}"

    async def execute(self) -> Summary:
        """Run all attempts. Raises ServiceFault, UserError (a full disk), InvariantViolated."""
        while await self.attempt.execute():
            if self.attempt.follows is None:
                await _require_whole(self.context.history)
                await models_back(self.context.config, self.pool.register)  # one may be lost meanwhile
            self.attempt = Attempt(self.context, self.pool, self.attempt.follows)
            if self.context.supervisor.interrupted:
                self.attempt.stop(INTERRUPTED)
        return self._summary()

    def _summary(self) -> Summary:
        history, config = self.context.history, self.context.config
        with LedgerReader(self.context.ledger.folder) as reader:
            # A resumed run may have begun in another folder, or with other groups per step.
            groups = reader.check_final(None if config.run.resume else config.training.groups_per_step)
            dropped = reader.dropped()
        final = {name: number for name, number in groups.items() if number or name in ("retired", "dropped")}
        return history.totals.summary(
            rl_seconds=history.rl_seconds,
            stop_reason=self.buffer.stop_reason,
            accuracy_before=history.accuracy_before,
            accuracy_after=self.attempt.accuracy_after,
            total_seconds=now() - self._started,
            startup=self.context.startup.phases,
            startup_processes=self.context.startup.processes,
            groups=final,
            mismatch_alarm=history.alarm,
            mismatch_alarms=history.alarms,
            dropped=dropped,
            peak_pss_bytes=0,
        )


async def _require_whole(history: RunHistory) -> None:
    """Raise UserError if the checkpoint of the next attempt has changed since it was written."""
    if history.folder and (why := await asyncio.to_thread(checkpoint.fault, Path(history.folder))):
        raise UserError(f"the run cannot go back to {history.folder}: {why}; run.resume=auto takes an earlier checkpoint")
