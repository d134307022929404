"""One rank of a group under training, whichever model it trains: the engine, and the commands that trainer and critic share."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
import torch.distributed as dist
from msgspec.structs import replace

from runtime import checkpoint, platform
from runtime.commands import Accumulate, Apply, BeginStep, Export, Save
from runtime.config import Config, Trainer
from runtime.engines.train_base import UpdateEngine
from runtime.errors import DeadlineExceeded, InvalidMessage
from runtime.spmd import Relay
from runtime.types import PolicyVersion
from runtime.weights.sender import in_thread

log = logging.getLogger("sluice")

BETWEEN_STEPS = (Export, Save)
Engine = TypeVar("Engine", bound=UpdateEngine)


class UpdateRank(Generic[Engine]):
    """Every method runs in the engine's thread, in the same order on every rank.

    A subclass names its `role` and the commands that rank 0 relays, and adds those that are its own to `execute`.
    """

    role: ClassVar[str]
    relayed: ClassVar[Any]  # a union of commands
    last: ClassVar[type]  # of the commands of a step
    seconds_of: ClassVar[dict[str, str]]  # the metrics of what `onload`, `offload` and `save` take of the engine's time

    def __init__(self, engine: Engine, config: Config, rank: int, world_size: int):
        self.engine = engine
        self.config = config
        self.rank = rank
        self.world_size = world_size
        self.version = PolicyVersion()
        """Of the weights as they are."""
        settings: Trainer = getattr(config.services, self.role)
        self._offloads, self._away = bool(settings.offloaded), False
        self._seconds: dict[str, float] = {}
        self._saving: Future[None] | None = None
        if config.run.resume:
            folder = Path(config.run.resume)
            self.version = checkpoint.read_position(folder).version
            before = time.monotonic()
            engine.load(str(self.state(folder)))
            log.info("restored %s in %.1f s", self.state(folder), time.monotonic() - before)

    def state(self, folder: Path) -> Path:
        """Where in the checkpoint `folder` this role's state lies. Raises UserError when it is not there."""
        return folder

    def connect_relay(self) -> Relay[Any] | None:
        """The command relay of this group; None when there is but one rank."""
        if self.world_size == 1:
            return None
        store = dist.distributed_c10d._get_default_store()
        interface = self.config.network.interface
        return Relay(store, self.rank, self.world_size, self.relayed, name=self.role, interface=interface)

    def execute(self, command: Any) -> Any:
        """Carry out one command; returns its answer, or the future of one that comes while others are carried out. Raises
        InvalidMessage for what is no command of this role."""
        with self._at_hand(command):
            return self.carry_out(command)

    def carry_out(self, command: Any) -> Any:
        """`execute`, with the engine's state where it belongs."""
        if isinstance(command, Accumulate):
            self.engine.accumulate(command.groups, command.last)
        elif isinstance(command, BeginStep):
            self.engine.begin_step(command.step)
        elif isinstance(command, Apply):
            result = self.engine.apply()
            self.version = replace(self.version, step=command.step + 1)
            seconds, self._seconds = self._seconds, {}
            return replace(result, metrics=result.metrics | seconds)
        elif isinstance(command, Save):
            return self._save(Path(command.folder))
        else:
            raise InvalidMessage(f"a {self.role} takes no {type(command).__name__}")
        return None

    def _save(self, folder: Path) -> Future[None] | None:
        with self._counted("save"), checkpoint.full_disk_told(folder):
            self._require_saved()
            write = self.engine.begin_save(str(folder))
            if not self.config.checkpoint.async_save:
                write()
                return None

        def told() -> None:
            with checkpoint.full_disk_told(folder):
                write()

        self._saving = in_thread("save", told)
        return self._saving

    def _require_saved(self) -> None:
        """The checkpoint before is answered for by all ranks: on this one nothing is left to be done, but perhaps to say so."""
        timeout = self.config.deadlines.save
        try:
            if self._saving is not None:
                self._saving.result(timeout)
        except FutureTimeout as error:
            raise DeadlineExceeded(f"{self.role} rank {self.rank}", "save", "still writes the one before", timeout) from error

    @contextlib.contextmanager
    def _at_hand(self, command: Any) -> Iterator[None]:
        """Around a command that needs all of the engine's state: between steps the device may be lent out."""
        if self._away:
            with self._counted("onload"):
                self.engine.onload()
            self._away = False
        yield
        if self._offloads and isinstance(command, (self.last, *BETWEEN_STEPS)):
            with self._counted("offload"):
                self.engine.offload()
            self._away = True

    @contextlib.contextmanager
    def _counted(self, what: str) -> Iterator[None]:
        """Account the block's seconds to the next step."""
        before, metric = time.perf_counter(), self.seconds_of[what]
        yield
        self._seconds[metric] = self._seconds.get(metric, 0.0) + time.perf_counter() - before


def join_group(config: Config, world_size: int) -> torch.device:
    """This rank's device; with several ranks, join torchrun's default group first."""
    device = platform.device(index=int(os.environ.get("LOCAL_RANK", "0")))
    if world_size > 1:
        backend = platform.collective_backend("auto", device)
        dist.init_process_group(backend, timeout=timedelta(seconds=config.deadlines.train))
    return device


def use_megatron(settings: Trainer, device: torch.device) -> bool:
    """Whether the engine is on megatron-core, which is then ready to be imported. Raises UserError when it is missing."""
    if settings.engine != "megatron":
        return False
    from runtime.engines.megatron import facade

    facade.prepare(device)
    return True
