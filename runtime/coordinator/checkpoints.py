"""The coordinator's side of checkpoints: when one is due, where the run is then, and which of them stay."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runtime.cluster.topology import alternates
from runtime.commands import Offload, Save
from runtime.coordinator.buffer import Buffer
from runtime.coordinator.recovery import RunHistory
from runtime.coordinator.roles import Roles
from runtime.coordinator.run_context import RunContext
from runtime.data.prompts import PromptStream
from runtime.errors import ServiceFault
from runtime.ledger import checkpoint
from runtime.ledger.position import Position
from runtime.ledger.records import CheckpointSaved
from runtime.ports import RolePort, TrainerPort
from runtime.telemetry.summary import Totals
from runtime.types import PolicyVersion

log = logging.getLogger("sluice")


class Checkpoints:
    """`accuracy` holds what evaluations found, by step: the best checkpoint is the best of those that were evaluated."""

    def __init__(self, context: RunContext, roles: Roles, stream: PromptStream, buffer: Buffer, history: RunHistory):
        config = context.config
        self._folder = context.folder
        self._settings = config.checkpoint
        self._alternates = alternates(config)
        self._retain_bytes = config.ledger.retain_bytes
        self._roles = roles
        self._ledger = context.ledger
        self._stream = stream
        self._buffer = buffer
        self._incarnation = 0
        self._history = history
        self.accuracy = history.accuracy

    def resume(self, incarnation: int, position: Position) -> None:
        """Go on after `position`, as `incarnation`. Later checkpoints, of what is made again from here, are set aside."""
        self._incarnation = incarnation
        step = position.version.step
        with _faults_told(self._folder):
            checkpoint.sweep(self._folder)
            if left := checkpoint.set_aside(self._folder, step, incarnation):
                steps = ", ".join(map(str, left))
                log.warning("the run goes on from step %d: its checkpoints of steps %s are set aside", step, steps)
        if position.best_step is not None and position.best_accuracy is not None:
            self.accuracy[position.best_step] = position.best_accuracy

    @property
    def newest_accuracy(self) -> float | None:
        return self.accuracy[max(self.accuracy)] if self.accuracy else None

    async def due(self, step: int) -> Position | None:
        """Where the run is once version `step` is made, if `save` is to be called for it; asked before that step is applied,
        when every group of it has been taken."""
        if not self._settings.every or step % self._settings.every:
            return None
        return await self.position(step)

    async def position(self, step: int) -> Position:
        """Where the run is once version `step` is made."""
        best = self._best(self.accuracy)
        untrained = [group for group in self._buffer if group.taken is None or group.taken >= step]
        return Position(
            version=PolicyVersion(self._incarnation, step),
            stream=self._stream.state(),
            trained=await self._ledger.trained(step),
            pending=[group.ticket.problem for group in sorted(untrained, key=lambda group: group.group_id)],
            accuracy=self.newest_accuracy,
            best_accuracy=None if best is None else self.accuracy[best],
            best_step=best,
        )

    async def save_end(self, step: int) -> None:
        """The checkpoint of version `step` as the run ends. Where that version is saved already, only where the run is then is
        written anew."""
        folder, position = checkpoint.folder_for(self._folder, step), await self.position(step)
        if not self._history.is_at(folder):
            await self.save(step, position)
            return
        with _faults_told(folder):
            await asyncio.to_thread(checkpoint.reposition, folder, position)

    def save(self, step: int, position: Position, finishing: asyncio.Future[None] | None = None) -> Coroutine[Any, Any, None]:
        """Order the checkpoint of version `step`, behind the commands before; the answer comes once old ones are pruned.

        It counts only once the metrics of its step are recorded, when `finishing` is done: who goes back to it repeats all
        that is not.
        Raises StorageFull when there is no room for it.
        """
        folder, roles = checkpoint.folder_for(self._folder, step), self._roles
        with _faults_told(folder):
            partial = checkpoint.begin(folder.absolute())
            if roles.critic is not None:
                (partial / checkpoint.CRITIC).mkdir()
        if roles.critic is not None and self._alternates:
            return self._saved_at(
                step,
                folder,
                partial,
                [self._one_by_one(partial, roles.trainer, roles.critic)],
                position,
                self._entered(finishing),
            )
        saving = [roles.trainer.post(Save(str(partial)))]
        if roles.critic is not None:
            saving.append(roles.critic.post(Save(str(partial / checkpoint.CRITIC))))
        return self._saved_at(step, folder, partial, saving, position, self._entered(finishing))

    async def _one_by_one(self, partial: Path, trainer: TrainerPort, critic: RolePort) -> None:
        """Where both have the same devices."""
        await trainer.call(Offload())
        await critic.call(Save(str(partial / checkpoint.CRITIC)))
        await critic.call(Offload())
        await trainer.call(Save(str(partial)))

    async def _saved_at(
        self,
        step: int,
        folder: Path,
        partial: Path,
        saving: list[Coroutine[Any, Any, None]],
        position: Position,
        entered: asyncio.Future[Totals],
    ) -> None:
        try:
            await asyncio.gather(*saving)
            totals = await entered
        except BaseException:
            checkpoint.discard(partial)
            raise
        with _faults_told(folder):
            completing = asyncio.ensure_future(asyncio.to_thread(checkpoint.complete, partial, folder, position))
            try:
                await asyncio.shield(completing)
            finally:  # a thread cannot be cancelled: what it completes counts
                await asyncio.wait({completing})
                if completing.exception() is None:
                    self._history.saved(folder, totals)
        self._ledger.record(CheckpointSaved(step=step, incarnation=self._incarnation, path=str(folder), at=time.time()))
        best = self._best(self.accuracy.keys() & set(checkpoint.steps(self._folder))) if self._settings.keep_best else None
        with _faults_told(folder):
            await asyncio.to_thread(checkpoint.prune, self._folder, self._settings.keep, (step, best))
        oldest = min(checkpoint.steps(self._folder), default=step)
        await self._ledger.trim(oldest, self._retain_bytes)

    def _entered(self, finishing: asyncio.Future[None] | None) -> asyncio.Future[Totals]:
        """The totals as they are once `finishing` is done, when the steps after it are not in them."""
        entered: asyncio.Future[Totals] = asyncio.get_running_loop().create_future()

        def copy(finished: asyncio.Future[None] | None = None) -> None:
            if finished is None or not (finished.cancelled() or finished.exception()):
                entered.set_result(self._history.totals.copy())
            else:
                entered.cancel()

        if finishing is None:
            copy()
        else:
            finishing.add_done_callback(copy)
        return entered

    def _best(self, steps: Iterable[int]) -> int | None:
        return max(steps, key=lambda step: self.accuracy[step], default=None)


@contextmanager
def _faults_told(folder: Path) -> Iterator[None]:
    """An error of the file system is a StorageFull or a ServiceFault."""
    with checkpoint.full_disk_told(folder):
        try:
            yield
        except OSError as error:
            raise ServiceFault("coordinator", "save", str(error)) from error
