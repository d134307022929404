"""A run from its first evaluation to its last check: the coordinator's logic, above the ports."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from runtime import checkpoint, codec, evaluation, layout
from runtime.aio import TaskGroup
from runtime.chosen_algorithm import choose, groups_per_update, streams
from runtime.config import Computing, Config, Rollout
from runtime.data.held_out import HeldOut
from runtime.data.prompts import Prompts, PromptStream, StreamState
from runtime.errors import UserError
from runtime.evaluation import EvaluationResult
from runtime.generations import TextDecoder
from runtime.ledger import Ledger
from runtime.ledger_reader import LedgerReader
from runtime.ledger_records import Note
from runtime.metrics import SpanClock
from runtime.pipeline.accounting import Books, BusyMeter
from runtime.pipeline.buffer import Buffer
from runtime.pipeline.checkpoints import Checkpoints
from runtime.pipeline.dynamic_sampling import DynamicSampling
from runtime.pipeline.evaluation import Evaluator
from runtime.pipeline.groups import STREAM, GroupStage
from runtime.pipeline.publisher import Publisher
from runtime.pipeline.roles import Roles
from runtime.pipeline.rollouts import RolloutPool
from runtime.pipeline.states import Mark
from runtime.pipeline.training import TrainedStep, TrainStage
from runtime.pipeline.turn_stage import TurnStage
from runtime.pipeline.turn_taking import TurnTaking
from runtime.pipeline.updates import AlternatingUpdates, Updates
from runtime.ports import Replaceable
from runtime.position import Position
from runtime.status import Loss, Progress
from runtime.summary import Summary
from runtime.topology import alternates, members, reference_takes_part, replicas, slots, takes_turns, uses_reference
from runtime.trackers import Trackers
from runtime.types import PolicyVersion

WHY_ENDED = "run ended"
INTERRUPTED = "interrupted"


@dataclass
class Material:
    """What a run is made of, besides its roles."""

    config: Config
    folder: Path
    ledger: Ledger
    trackers: Trackers
    train: Prompts
    held_out: list[HeldOut]
    text: TextDecoder
    stop_token_ids: tuple[int, ...]
    report: Callable[[Progress], None]
    launched: float  # when the run was asked for, on the clock of time.monotonic
    lost: Callable[[Loss], None] = lambda loss: None  # told of every process that the run does without
    seconds: dict[str, float] = field(default_factory=dict)  # of the start-up, by phase


class Run:
    """One run. `stop` ends it in order; everything else happens in `execute`."""

    def __init__(self, material: Material, roles: Roles):
        config = material.config
        self._material, self._config, self._roles = material, config, roles
        self._started = time.monotonic()
        self._stream = PromptStream(
            material.train.problems, config.run.seed, config.data.shuffle, material.train.shares, config.data.curriculum
        )
        self._position = self._restored_position()
        first = self._position.version.step if self._position else 0
        self._incarnation = 0
        self._needs = _needs(config)
        self._buffer = Buffer(
            needs=self._needs,
            groups_per_step=config.training.groups_per_step,
            staleness=config.training.staleness,
            journal=material.ledger.record,
            step=first,
        )
        self._checkpoints = Checkpoints(material.folder, config, roles, material.ledger, self._stream, self._buffer)
        self._spans = SpanClock()
        self._pool = RolloutPool(roles.rollouts, slots(config), config.deadlines.start, material.lost)
        self._publisher = Publisher(roles.trainer, self._pool, config.publication, config.deadlines.train)
        self._meter = BusyMeter(self._pool, config.deadlines.silence)
        limit = config.algorithm.dynamic_sampling_limit * config.training.groups_per_step
        self._dynamic = DynamicSampling(self._buffer, limit, self.stop) if config.algorithm.dynamic_sampling else None
        self._books = Books(
            material.trackers, self._spans, self._buffer, self._meter, accelerators(config), self._pool, self._dynamic
        )
        self._groups = GroupStage(
            config,
            roles,
            self._pool,
            self._buffer,
            material.ledger,
            self._stream,
            material.train,
            material.stop_token_ids,
            self._spans,
            self._dynamic,
        )
        self._turns = self._turn_taking() if takes_turns(config) else None
        self._training = self._train_stage()
        self._evaluator = (
            Evaluator(config, material.held_out, roles, self._pool, material.text, material.stop_token_ids)
            if material.held_out and config.rewards.rules
            else None
        )
        self._evaluating: asyncio.Task[Any] | None = None
        self._skipped_evaluations = 0
        self._stop_reason = ""
        self._rl_began = 0.0

    # ------------------------------------------------------------------------------------------ from outside

    def stop(self, reason: str) -> None:
        """End after the step under way and save. Asked for from outside, it also ends an evaluation, and there is no other."""
        if not self._stop_reason:
            self._stop_reason = reason
            self._training.stop()
        if reason == INTERRUPTED and self._evaluating is not None:
            self._evaluating.cancel()

    @property
    def buffer(self) -> Buffer:
        return self._buffer

    @property
    def pool(self) -> RolloutPool:
        return self._pool

    @property
    def last_abort(self) -> str:
        """Why the newest publication that was aborted was, or ""."""
        return self._publisher.abort

    @property
    def transport(self) -> str:
        """Which one the weights of the newest epoch take, or "" before the first."""
        return self._publisher.transport

    def arrive(self, role: str, replica: Replaceable) -> None:
        """A process has come in the place of one that was lost."""
        if role == "rollout":
            (self._turns or self._pool).arrive(replica)  # type: ignore[arg-type]
        else:
            self._roles.arrive(role, replica)

    async def execute(self) -> Summary:
        """The whole run. Raises ServiceFault, UserError (a full disk), InvariantViolated."""
        config = self._config
        async with TaskGroup() as tasks:
            self._tasks = tasks
            journal = tasks.create_task(self._material.ledger.run(config.ledger.tick))
            await self._begin()
            keepers = [tasks.create_task(self._publisher.run()), tasks.create_task(self._pool.guard())]
            before = await self._evaluate_alone(config.evaluation.before)
            meter = tasks.create_task(self._meter.run())
            seconds = await self._train()
            meter.cancel()
            await self._end_groups()
            after = await self._evaluate_alone(config.evaluation.after)
            await self._save_end()
            for task in (*keepers, journal):
                task.cancel()
        await self._material.ledger.flush()
        return self._summary(before, after, seconds)

    # ------------------------------------------------------------------------------------------ the course of the run

    async def _begin(self) -> None:
        """Restore, connect the publication group, and bring the first version to every rollout."""
        self._report("starting")
        if self._position is not None:
            await self._restore(self._position)
        before, version = time.monotonic(), PolicyVersion(self._incarnation, self._buffer.step)
        if self._turns is None:
            await self._publisher.publish(version)
        else:
            await self._turns.take()
            await self._turns.give(version)
        self._material.seconds["first publication"] = time.monotonic() - before

    async def _train(self) -> float:
        """Admission and training until the last step; returns the seconds."""
        self._rl_began = time.monotonic()
        self._spans.close_step()
        self._report("training")
        if self._stop_reason:
            return 0.0
        self._training.last_step = self._config.training.steps
        admission = self._tasks.create_task(self._groups.run(self._tasks, lambda: self._training.last_step))
        await self._training.run(self._tasks, self._config.training.steps)
        admission.cancel()
        await self._evaluation_over()
        self._stop_reason = self._stop_reason or "all steps done"
        return time.monotonic() - self._rl_began

    async def _end_groups(self) -> None:
        """Give up what is still on its way; its prompts come first when the run is resumed."""
        await self._groups.close()
        for group in sorted(self._buffer, key=lambda group: group.group_id):
            ticket = self._buffer.drop(group.group_id, WHY_ENDED)
            self._stream.give_back(ticket.problem)
        self._material.ledger.record(Note(key=STREAM, value=codec.encode(self._stream.state())))

    async def _finished(self, trained: TrainedStep) -> None:
        """After each step: the books, a checkpoint's record, an evaluation if one is due, and the conditions to stop."""
        config, step = self._config, trained.step + 1
        await self._books.step(trained)
        if config.stop.hours and time.monotonic() - self._rl_began >= config.stop.hours * 3600:
            self.stop(f"{config.stop.hours:g} hours are over")
        if self._evaluates(step):
            if self._evaluating is not None and not self._evaluating.done():
                self._skipped_evaluations += 1  # training waits for none
            else:
                self._evaluating = self._tasks.create_task(self._evaluate_beside(step))
                self._evaluating.add_done_callback(lambda _: self._buffer.ready_changed.set())
        self._report("training")

    def _evaluates(self, step: int) -> bool:
        """Whether version `step` is to be evaluated beside training."""
        every = self._config.evaluation.every
        return self._evaluator is not None and every > 0 and step % every == 0 and step < self._training.last_step

    def _turn_taking(self) -> TurnTaking:
        refers, brings = reference_takes_part(self._config), not alternates(self._config)
        return TurnTaking(self._roles, self._pool, self._publisher, self._spans, refers=refers, brings=brings)

    def _train_stage(self) -> TrainStage:
        config, roles = self._config, self._roles
        updates = Updates(roles.trainer, roles.critic, self._spans)
        if alternates(config) and roles.critic is not None:
            updates = AlternatingUpdates(roles.trainer, roles.critic, self._spans)
        make: Callable[..., TrainStage] = TrainStage
        if self._turns is not None:
            make = partial(TurnStage, self._turns, self._evaluates, self._is_evaluating, self._dynamic is not None)
        return make(
            updates=updates,
            publisher=self._publisher,
            buffer=self._buffer,
            ledger=self._material.ledger,
            spans=self._spans,
            streams=streams(config),
            groups_per_update=groups_per_update(config),
            checkpoint=self._checkpoints.due,
            finished=self._finished,
        )

    def _is_evaluating(self) -> bool:
        return self._evaluating is not None and not self._evaluating.done()

    async def _evaluate_beside(self, step: int) -> None:
        assert self._evaluator is not None
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
        if self._evaluator is None or not wanted or self._stop_reason == INTERRUPTED:
            return None
        step = self._buffer.committed

        def report(done: int, total: int) -> None:
            self._report("evaluating", done, total)

        evaluating = self._evaluating = self._tasks.create_task(self._evaluator.run(step, alone=True, progress=report))
        await self._evaluation_over()
        if evaluating.cancelled():
            return None
        found = evaluating.result()
        self._material.seconds.setdefault("evaluation", found.seconds)
        await self._note(step, found)
        return found.accuracy

    async def _note(self, step: int, found: EvaluationResult) -> None:
        self._checkpoints.accuracy[step] = found.accuracy
        await self._books.evaluation(step, {**evaluation.metrics(found), "eval/skipped": float(self._skipped_evaluations)})

    # ------------------------------------------------------------------------------------------ the end, and a new start

    async def _save_end(self) -> None:
        self._report("saving")
        step = self._buffer.committed
        await self._training.saved()  # it may be of the same step
        if self._turns is not None:
            await self._turns.take()
        await self._checkpoints.save(step, await self._checkpoints.position(step))
        folder = self._material.folder / layout.MODEL
        await self._roles.trainer.export(str(folder.absolute()))

    def _restored_position(self) -> Position | None:
        if not self._config.run.resume:
            return None
        position = checkpoint.read_position(Path(self._config.run.resume))
        self._stream.restore(position.stream)
        return position

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
        self._incarnation = self._training.incarnation = max(restored.incarnation, position.version.incarnation + 1)
        self._checkpoints.resume(self._incarnation, position)

    # ------------------------------------------------------------------------------------------ what is said of it

    def _report(self, phase: str, done: int = 0, total: int = 0) -> None:
        figures = {name: value for name, value in self._books.newest.items() if isinstance(value, float)}
        if (newest := self._checkpoints.newest_accuracy) is not None:
            figures["eval/accuracy"] = newest
        step, steps = self._buffer.committed, self._config.training.steps
        if phase == "training":
            done, total = step, steps
        self._material.report(Progress(phase=phase, step=step, steps=steps, done=done, total=total, detail=_line(figures)))

    def _summary(self, before: float | None, after: float | None, seconds: float) -> Summary:
        with LedgerReader(self._material.ledger.folder) as reader:
            # A resumed run may have begun in another folder, or with other groups per step.
            groups = reader.check_final(None if self._position else self._config.training.groups_per_step)
            dropped = reader.dropped()
        final = {name: number for name, number in groups.items() if number or name in ("retired", "dropped")}
        return self._books.totals.summary(
            rl_seconds=seconds,
            stop_reason=self._stop_reason,
            accuracy_before=before,
            accuracy_after=after,
            total_seconds=time.monotonic() - self._started,
            startup={**self._material.seconds, "to first step": self._training.first_applied - self._material.launched},
            groups=final,
            dropped=dropped,
            peak_pss_bytes=0,
        )


def _line(figures: dict[str, float]) -> str:
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


def _needs(config: Config) -> Mark:
    """What a group must have before it is trained on. Raises UserError for an advantage whose critic is missing."""
    needs = Mark.SCORED
    if uses_reference(config):
        needs |= Mark.REFERENCED
    if config.critic is not None:
        needs |= Mark.VALUED
    elif choose(config).advantage.needs_values:
        raise UserError(f"critic: missing; algorithm.advantage {config.algorithm.advantage} needs one")
    return needs


def accelerators(config: Config) -> int:
    """All devices of the run: of a rollout those that its tensors are spread over, one of each other process that computes.
    What lies on another role's devices has none of its own."""
    fleets = replicas(config)
    roles = [fleets.get(member.name) or getattr(config.services, member.role) for member in members(config)]
    own = [role for role in roles if isinstance(role, Computing) and not role.colocate]
    return sum(role.tensor_parallel if isinstance(role, Rollout) else 1 for role in own)
