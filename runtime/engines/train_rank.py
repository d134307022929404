"""One rank of the trainer group: the engine, and what it takes to carry out the coordinator's commands with it."""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from msgspec.structs import replace

from runtime import checkpoint, platform
from runtime.commands import Accumulate, Apply, BeginStep, Export, Save, SendWeights
from runtime.config import Config
from runtime.engines.train_base import TrainEngine
from runtime.errors import InvalidMessage
from runtime.spmd import Relay
from runtime.types import PolicyVersion
from runtime.weights.plan import Manifest
from runtime.weights.sender import WeightSender

log = logging.getLogger("sluice")

Relayed = BeginStep | Accumulate | Apply | SendWeights | Save | Export


class TrainRank:
    """Every method runs in the engine's thread, in the same order on every rank."""

    def __init__(self, engine: TrainEngine, config: Config, rank: int, world_size: int, device: torch.device):
        self._engine = engine
        self._config = config
        self._rank = rank
        self._world_size = world_size
        self._version = PolicyVersion()
        if config.run.resume:
            folder = Path(config.run.resume)
            position = checkpoint.read_position(folder)
            engine.load(str(folder))
            self._version = position.version
        self.publication_backend = platform.collective_backend(config.publication.backend, device)
        dtype = config.publication.dtype
        specs = engine.tensor_specs()
        if dtype != "auto":
            specs = [replace(spec, dtype=dtype) for spec in specs]
        self.manifest = Manifest(tuple(specs), config.publication.bucket_bytes)
        self.sender = WeightSender(self.manifest, pin=device.type == "cuda") if rank == 0 else None

    @property
    def version(self) -> PolicyVersion:
        """Of the weights as they are."""
        return self._version

    def connect_relay(self, name: str) -> Relay[Any] | None:
        """The command relay of this group; None when there is but one rank."""
        if self._world_size == 1:
            return None
        store = dist.distributed_c10d._get_default_store()
        return Relay(store, self._rank, self._world_size, Relayed, name="trainer", interface=self._config.network.interface)

    def execute(self, command: Any) -> Any:
        """Carry out one command; returns its answer. Raises InvalidMessage for what is no command of a trainer."""
        engine = self._engine
        if isinstance(command, Accumulate):
            engine.accumulate(command.groups)
        elif isinstance(command, BeginStep):
            engine.begin_step(command.step)
        elif isinstance(command, Apply):
            result = engine.apply()
            self._version = replace(self._version, step=command.step + 1)
            return result
        elif isinstance(command, SendWeights):
            self._version = command.version
            timeout = self._config.publication.transfer_timeout
            engine.snapshot(self.sender.views(timeout) if self.sender is not None else None)
        elif isinstance(command, Save):
            self._save(command)
        elif isinstance(command, Export):
            self._export(command)
        else:
            raise InvalidMessage(f"a trainer takes no {type(command).__name__}")
        return None

    def _save(self, command: Save) -> None:
        if self._rank:
            self._engine.save(command.folder)
            return
        with checkpoint.atomic_folder(Path(command.folder)) as partial:
            self._engine.save(str(partial))
            (partial / checkpoint.POSITION).write_bytes(command.position)

    def _export(self, command: Export) -> None:
        if self._rank:
            self._engine.export(command.folder)
            return
        with checkpoint.atomic_folder(Path(command.folder)) as partial:
            self._engine.export(str(partial))


def make(config: Config, rank: int, world_size: int) -> TrainRank:
    """Build this rank's engine; with several ranks, join torchrun's default group first. Raises UserError for a bad model."""
    from runtime.engines.train_torch import TorchTrainEngine

    device = platform.device(index=int(os.environ.get("LOCAL_RANK", "0")))
    if world_size > 1:
        backend = platform.collective_backend("auto", device)
        dist.init_process_group(backend, timeout=timedelta(seconds=config.deadlines.train))
    engine = TorchTrainEngine(config, rank=rank, world_size=world_size, device=device)
    return TrainRank(engine, config, rank, world_size, device)
