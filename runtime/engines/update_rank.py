"""One rank of a group under training, whichever model it trains: the engine, and the commands that trainer and critic share."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
import torch.distributed as dist
from msgspec.structs import replace

from runtime import checkpoint, platform
from runtime.commands import Accumulate, Apply, BeginStep, Save
from runtime.config import Config, Trainer
from runtime.engines.train_base import UpdateEngine
from runtime.errors import InvalidMessage
from runtime.spmd import Relay
from runtime.types import PolicyVersion

Engine = TypeVar("Engine", bound=UpdateEngine)


class UpdateRank(Generic[Engine]):
    """Every method runs in the engine's thread, in the same order on every rank.

    A subclass names its `role` and the commands that rank 0 relays, and adds those that are its own to `execute`.
    """

    role: ClassVar[str]
    relayed: ClassVar[Any]  # a union of commands

    def __init__(self, engine: Engine, config: Config, rank: int, world_size: int):
        self.engine = engine
        self.config = config
        self.rank = rank
        self.world_size = world_size
        self.version = PolicyVersion()
        """Of the weights as they are."""
        if config.run.resume:
            folder = Path(config.run.resume)
            self.version = checkpoint.read_position(folder).version
            engine.load(str(self.state(folder)))

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
        """Carry out one command; returns its answer. Raises InvalidMessage for what is no command of this role."""
        if isinstance(command, Accumulate):
            self.engine.accumulate(command.groups)
        elif isinstance(command, BeginStep):
            self.engine.begin_step(command.step)
        elif isinstance(command, Apply):
            result = self.engine.apply()
            self.version = replace(self.version, step=command.step + 1)
            return result
        elif isinstance(command, Save):
            with checkpoint.full_disk_told(Path(command.folder)):
                self.engine.save(command.folder)
        else:
            raise InvalidMessage(f"a {self.role} takes no {type(command).__name__}")
        return None


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
