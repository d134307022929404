"""Recovery of a run that loses trainer or critic, and the end of its patience (`Recovery`). The checkpoints for it: when one is
due, its content, and which are kept (`Checkpoints`).

::

    an attempt trains … ✗ the trainer is lost → the critic is given up → wait until both are started again
                                                                                      ↓
        both find their state in memory (`failover.take_up`): the next attempt takes up the run where it was
        otherwise the next attempt goes on from the newest checkpoint (`RunHistory.folder`)

    kept         rollouts; the ledger with all groups, their replies and scores; groups under way; evaluations
    done again   the step under way; from a checkpoint, the steps after it, and replies that were in generation

A loss ends the run in four cases: lost processes are not started again; the first version is not published yet; the run is
interrupted; more attempts in a row than `services.trainer.restarts` made no progress.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from runtime import timeouts, types
from runtime.cluster.placement import backoff
from runtime.cluster.topology import alternates
from runtime.commands import Offload, RolePort, Save
from runtime.config import Config
from runtime.coordinator.buffer import Buffer
from runtime.coordinator.metrics_recorder import RunContext, save_run_state
from runtime.coordinator.pools import Roles, models, wait_for
from runtime.coordinator.register import Register, UnitChange
from runtime.data.prompts import PromptStream
from runtime.errors import DeadlineExceeded, ServiceFault, StorageFull, Unreachable
from runtime.ledger import checkpoint
from runtime.ledger.checkpoint import Position
from runtime.ledger.reader import CheckpointSaved
from runtime.process.waiting import first_error, now
from runtime.status import Progress
from runtime.telemetry.summary import Totals

log = logging.getLogger("sluice")


class Recovery:
    """Watches trainer and critic during one attempt; the loss of one gives up both. `begun`: the first version is published."""

    def __init__(self, context: RunContext, roles: Roles, register: Register):
        self._models = roles.models
        self.begun = context.history.attempts > 0
        self._context, self._register = context, register
        self._loss: asyncio.Future[Unreachable] = asyncio.get_running_loop().create_future()
        self._waiting: asyncio.Future[None] | None = None

    def interrupt(self) -> None:
        """End the wait for restarts: the loss ends the run."""
        if self._waiting is not None:
            self._waiting.cancel()

    async def run_until_lost(self, work: Coroutine[Any, Any, None]) -> ServiceFault | None:
        """Do `work`, once. Return the loss of a model that will be started again, or None. Raises what ends the run."""
        self._register.subscribe(self._look)
        self._look()
        working = asyncio.ensure_future(work)
        either: set[asyncio.Future[Any]] = {working, self._loss}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                error = working.exception()
                if error is None:
                    return None
                self._find_lost(first_error(error))
                if not (self._loss.done() and self._replaced()):
                    raise error
            if not self._replaced():
                raise self._loss.result()
            return self._loss.result()
        finally:
            self._register.unsubscribe(self._look)
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    def check_progress(self, loss: ServiceFault, step: int) -> None:
        """Record that the attempt ended at `step`. Raises `loss` if too many attempts in a row made no progress."""
        history = self._context.history
        history.lost(step)
        if (fruitless := history.attempts_without_progress) > self._context.config.services.trainer.restarts:
            message = f"{loss.reason}; {fruitless} times in a row before any step after {history.best_step}"
            raise ServiceFault(loss.service, loss.phase, message) from loss

    async def wait_restarted(self, loss: ServiceFault) -> None:
        """Wait until the models of the next attempt serve. Raises `loss` if the run is interrupted, DeadlineExceeded with the
        missing models after `deadlines.start` plus the longest delay that `restarts` puts before a start."""
        self._waiting = asyncio.ensure_future(models_back(self._context.config, self._register))
        try:
            await self._waiting
        except asyncio.CancelledError:
            if self._context.supervisor.interrupted:
                raise loss from None
            raise

    def _look(self, _: UnitChange | None = None) -> None:
        for model in self._models:
            unit = self._register.find(model.name)
            if unit is not None and unit.port is not model and not self._loss.done():
                self._loss.set_result(Unreachable(model.name, "run", unit.reason))
                for other in self._models:
                    if other is not model and self._replaced():
                        self._register.lose(other, f"starts again with {model.name}")

    def _replaced(self) -> bool:
        """Return True if lost models are started again, False if a loss ends the run."""
        supervisor = self._context.supervisor
        return supervisor.restarts and self.begun and not supervisor.interrupted

    def _find_lost(self, error: BaseException) -> None:
        if isinstance(error, ServiceFault) and error.phase == "publish":  # a model failed a weight sync
            for model in [each for each in self._models if each.name in error.service.split(", ")]:
                self._register.lose(model, error.reason)


async def models_back(config: Config, register: Register) -> None:
    """Wait until trainer and critic serve. Raises DeadlineExceeded as `Recovery.wait_restarted` does."""
    allowed = max(getattr(config.services, unit.role).restarts for unit in models(register))
    timeout = config.deadlines.start + backoff(max(0, allowed - 1))

    late = await wait_for(register, lambda: [unit.name for unit in models(register) if unit.port is None], now() + timeout)
    if late:
        raise DeadlineExceeded(", ".join(late), "restart", "did not register again", timeout)


async def started_anew(config: Config, register: Register, why: str) -> None:
    """Give up trainer and critic, unless they are lost, and wait until new ones serve. Raises DeadlineExceeded."""
    for unit in models(register):
        register.lose(unit, why)
    await models_back(config, register)


# ---- Checkpoints


class Checkpoints:
    """Saves and prunes checkpoints. The best one is that of the best evaluation."""

    def __init__(self, context: RunContext, roles: Roles, stream: PromptStream, buffer: Buffer):
        config = context.config
        self._context, self._roles, self._stream, self._buffer = context, roles, stream, buffer
        self._folder, self._settings, self._seconds = context.folder, config.checkpoint, config.deadlines.save
        self._lineage = checkpoint.lineage(config)
        self._history, self._spans = context.history, context.spans
        self._alarm = ""  # the newest alarm about missing room

    def take_up(self) -> None:
        """Go on. A checkpoint that was being written as the coordinator was lost counts if it is complete."""
        with _as_service_fault(self._folder):
            checkpoint.sweep(self._folder)

    def resume(self, position: Position) -> None:
        """Go on after `position`. Later checkpoints are set aside: their steps are made again."""
        step = position.version.step
        self.take_up()
        with _as_service_fault(self._folder):
            if left := checkpoint.set_aside(self._folder, step, self._buffer.incarnation):
                steps = ", ".join(map(str, left))
                log.warning("the run goes on from step %d: its checkpoints of steps %s are set aside", step, steps)
        if position.best_step is not None and position.best_accuracy is not None:
            self._history.accuracy[position.best_step] = position.best_accuracy

    async def position(self, step: int) -> Position:
        """Return the run's position at version `step`. Call it before this step is applied, when all its groups are taken."""
        accuracy = self._history.accuracy
        best = self._best(accuracy)
        untrained = [group for group in self._buffer if group.taken is None or group.taken >= step]
        return Position(
            version=self._buffer.version(step),
            stream=self._stream.state(),
            trained=await self._context.ledger.trained(step),
            pending=[group.ticket.problem for group in sorted(untrained, key=lambda group: group.group_id)],
            accuracy=self._history.newest_accuracy,
            best_accuracy=None if best is None else accuracy[best],
            best_step=best,
            run=self._lineage,
        )

    async def save_end(self, step: int) -> None:
        """Save version `step` at the end of the run. If it is saved already, only write the run's position again."""
        folder, position = checkpoint.folder_for(self._folder, step), await self.position(step)
        if not self._history.is_at(folder):
            await self.until_room(lambda: self.save(step, position))
            return
        with _as_service_fault(folder):
            await self._on_disk(asyncio.to_thread(checkpoint.reposition, folder, position), folder)

    async def until_room(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do `work`. Repeat it while the disk has no room."""
        while True:
            try:
                return await work()
            except StorageFull as error:
                self._no_room(f"waiting for room in {Path(error.path).parent}")
                step, steps = self._buffer.committed, self._buffer.last_step
                self._context.supervisor.report(Progress(phase="saving", step=step, steps=steps, alarm=self._alarm))
                await asyncio.sleep(timeouts.SAVE_RETRY)

    async def unless_full(self, step: int, saving: Awaitable[None]) -> None:
        """Await `saving` of version `step`. Without room, go on with the checkpoint before as the newest."""
        try:
            with self._spans.span("checkpoint"):
                await saving
        except StorageFull as error:
            self._no_room(f"no checkpoint of step {step}: no room in {Path(error.path).parent}")

    def _no_room(self, alarm: str) -> None:
        """Log the alarm, and show it until a checkpoint is complete."""
        log.warning("%s", alarm)
        self._history.alarm = self._alarm = alarm

    def save(
        self,
        step: int,
        position: Position,
        recorded: asyncio.Future[Totals] | None = None,
        written: asyncio.Future[None] | None = None,
    ) -> Coroutine[Any, Any, None]:
        """Order the checkpoint of version `step`, behind the commands before. Done once old checkpoints are pruned.

        The checkpoint counts only once its step is recorded, as an attempt that begins with it does not repeat this step:
        `recorded` gets the totals up to this step; None: it is recorded. `written` is done once the models no longer need
        their devices for the checkpoint. Awaiting raises StorageFull if there is no room."""
        folder, roles = checkpoint.folder_for(self._folder, step), self._roles
        try:
            with _as_service_fault(folder):
                partial = checkpoint.begin(folder.absolute())
                if roles.critic is not None:
                    (partial / checkpoint.CRITIC).mkdir()
        except StorageFull as error:
            return _raised(error)
        own = Save(str(partial), types.encode(position), tuple(checkpoint.steps(self._folder)))
        saves = (own, replace(own, folder=str(partial / checkpoint.CRITIC)))
        if alternates(self._context.config):
            saving = [self._one_by_one(*saves, *roles.models)]
        else:
            saving = [model.post(save) for model, save in zip(roles.models, saves, strict=False)]

        async def written_parts() -> tuple[Position, Totals]:
            # The processes write their parts. Then wait until the step is recorded, else a resume would repeat a saved step.
            try:
                parts = [part for found in await asyncio.gather(*saving) for part in found]
                if written is not None:
                    written.set_result(None)
                return replace(position, parts=parts), self._history.totals.copy() if recorded is None else await recorded
            except BaseException:
                checkpoint.discard(partial)
                raise

        return self._complete(step, folder, partial, written_parts())

    async def _one_by_one(self, own: Save, critics: Save, trainer: RolePort, critic: RolePort) -> list[str]:
        """Save the critic, then the trainer, which have the same devices."""
        # Each call waits until the model has moved or written: only one has its state on the devices at a time.
        await trainer.call(Offload())
        found = await critic.call(critics)
        await critic.call(Offload())
        return [*found, *await trainer.call(own)]

    async def _complete(self, step: int, folder: Path, partial: Path, parts: Awaitable[tuple[Position, Totals]]) -> None:
        """Complete the checkpoint once its `parts` are written, and prune old ones."""
        position, totals = await parts
        # The folder gets its name and the position: from here on the checkpoint counts.
        with _as_service_fault(folder):
            completing = asyncio.ensure_future(asyncio.to_thread(checkpoint.complete, partial, folder, position))
            try:
                await self._on_disk(asyncio.shield(completing), folder)
            finally:  # wait: a thread cannot be cancelled, and the checkpoint counts if the thread completes it
                await asyncio.wait({completing}, timeout=self._seconds)
                if completing.done() and completing.exception() is None:
                    self._history.saved(folder, totals)
                    if self._history.alarm == self._alarm:
                        self._history.alarm = ""
        at, incarnation = self._context.time(), self._buffer.incarnation
        self._context.ledger.record(CheckpointSaved(step=step, incarnation=incarnation, path=str(folder), at=at))
        save_run_state(self._context, self._roles)
        await self._context.ledger.flush()
        # Prune old checkpoints and the ledger's data for them, now that no attempt would go back to these.
        kept = set(checkpoint.steps(self._folder)) if self._settings.keep_best else set()
        best = self._best(self._history.accuracy.keys() & kept)
        with _as_service_fault(folder):
            await self._on_disk(asyncio.to_thread(checkpoint.prune, self._folder, self._settings.keep, (step, best)), folder)
        oldest = min(checkpoint.steps(self._folder), default=step)
        await self._context.ledger.trim(oldest, self._context.config.ledger.retain_bytes)

    async def _on_disk(self, work: Awaitable[None], folder: Path) -> None:
        """Await `work`. Raises DeadlineExceeded if the file system does not answer within `deadlines.save`."""
        try:
            await asyncio.wait_for(work, self._seconds)
        except TimeoutError:
            raise DeadlineExceeded("coordinator", "save", f"{folder}: the file system does not answer", self._seconds) from None

    def _best(self, steps: Iterable[int]) -> int | None:
        return max(steps, key=lambda step: self._history.accuracy[step], default=None)


async def _raised(error: StorageFull) -> None:
    raise error


@contextmanager
def _as_service_fault(folder: Path) -> Iterator[None]:
    with checkpoint.as_storage_full(folder):
        try:
            yield
        except OSError as error:
            raise ServiceFault("coordinator", "save", str(error)) from error
