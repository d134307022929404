"""One rank of a group under training, whichever model it trains: the engine, and the commands that trainer and critic share."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any, ClassVar

from msgspec.structs import replace

from runtime.commands import Accumulate, Apply, BeginStep, Export, Offload, Onload, Restore, Save
from runtime.config import Config, Trainer
from runtime.errors import DeadlineExceeded
from runtime.ledger import checkpoint
from runtime.trainer.group_rank import GroupRank
from runtime.trainer.step import ModelTrainer
from runtime.types import StepResult
from runtime.weights.sender import in_thread

log = logging.getLogger("sluice")

BETWEEN_STEPS = (Export, Save)


class UpdateRank(GroupRank):
    """A subclass adds the commands that are its own."""

    last: ClassVar[type]  # of the commands of a step
    seconds_of: ClassVar[dict[str, str]]  # the metrics of what `onload`, `offload` and `save` take of the engine's time

    def __init__(self, engine: ModelTrainer, config: Config, rank: int, world_size: int, managed_externally: bool):
        """`managed_externally`: its device is another role's as well, and the coordinator says when to take it and when to give
        it up."""
        super().__init__(config, rank, world_size)
        self.engine = engine
        settings: Trainer = getattr(config.services, self.role)
        self._managed_externally = managed_externally
        self._offloads, self._away = bool(settings.offloaded) and not managed_externally, False
        self._begun = False  # a step, whose gradients are on the device
        self._seconds: dict[str, float] = {}
        self._saving: Future[None] | None = None
        if managed_externally:
            self._offload()

    def state(self, folder: Path) -> Path:
        """Where in the checkpoint `folder` this role's state lies. Raises UserError when it is not there."""
        return folder

    def execute(self, command: Any) -> Any:
        """Carry out one command, with the engine's state where it belongs."""
        with self._ensure_on_device(command):
            return super().execute(command)

    def restore(self, command: Restore) -> None:
        before, folder = time.monotonic(), Path(command.folder)
        self.version = checkpoint.read_position(folder).version
        self.engine.load(str(self.state(folder)))
        log.info("restored %s in %.1f s", self.state(folder), time.monotonic() - before)

    def begin_step(self, command: BeginStep) -> None:
        self._begun = True
        self.engine.begin_step(command.step)

    def accumulate(self, command: Accumulate) -> None:
        self.engine.accumulate(command.groups, command.last)

    def apply(self, command: Apply) -> StepResult:
        result = self.engine.apply()
        self._begun = False
        self.version = replace(self.version, step=command.step + 1)
        seconds, self._seconds = self._seconds, {}
        return replace(result, metrics=result.metrics | self.engine.phases | seconds)

    def offload(self, command: Offload) -> None:
        self._offload()

    def onload(self, command: Onload) -> None:
        """Everything is at hand already."""

    def save(self, command: Save) -> Future[None] | None:
        folder = Path(command.folder)
        with self._counted("save"), checkpoint.full_disk_told(folder):
            self._require_saved()
            write = self.engine.begin_save(str(folder))
            if not self.config.checkpoint.async_save:
                write()
                return None

        def write_to_disk() -> None:
            with checkpoint.full_disk_told(folder):
                write()

        self._saving = in_thread("save", write_to_disk)
        return self._saving

    def _require_saved(self) -> None:
        """All ranks have answered for the checkpoint before: on this one nothing is left to be done, but perhaps to say so."""
        timeout = self.config.deadlines.save
        try:
            if self._saving is not None:
                self._saving.result(timeout)
        except FutureTimeout as error:
            raise DeadlineExceeded(f"{self.role} rank {self.rank}", "save", "still writes the one before", timeout) from error

    @contextlib.contextmanager
    def _ensure_on_device(self, command: Any) -> Iterator[None]:
        """Around a command that needs all of the engine's state: between steps the device may be lent out."""
        if self._away and not isinstance(command, Offload):
            with self._counted("onload"):
                self.engine.onload()
            self._away = False
        yield
        if self._offloads and not self._begun and isinstance(command, (self.last, *BETWEEN_STEPS)):
            self._offload()
        if self._managed_externally and isinstance(command, Restore):
            self._offload()  # nobody has said yet that it is this role's turn

    def _offload(self) -> None:
        """Off the device with what the configuration says."""
        if not self._away:
            with self._counted("offload"):
                self.engine.offload()
            self._away = True

    @contextlib.contextmanager
    def _counted(self, what: str) -> Iterator[None]:
        """Account the block's seconds to the next step."""
        before, metric = time.perf_counter(), self.seconds_of[what]
        yield
        self._seconds[metric] = self._seconds.get(metric, 0.0) + time.perf_counter() - before
