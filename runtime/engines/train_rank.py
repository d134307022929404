"""One rank of the trainer group: besides the steps, what it takes to publish and to export the policy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from runtime import checkpoint, platform
from runtime.commands import Accumulate, Apply, BeginStep, Export, Offload, Onload, Restore, Save, SendWeights
from runtime.config import Config
from runtime.engines.group_rank import join_group, use_megatron
from runtime.engines.train_base import TrainEngine
from runtime.engines.update_rank import UpdateRank
from runtime.topology import alternates, takes_turns
from runtime.weights.plan import Manifest
from runtime.weights.sender import WeightSender


class TrainRank(UpdateRank[TrainEngine]):
    role = "trainer"
    relayed = Restore | BeginStep | Accumulate | Apply | SendWeights | Save | Export | Onload | Offload
    last = SendWeights
    seconds_of = {  # noqa: RUF012
        "onload": "timing/resharding_to_train",
        "offload": "timing/offload",
        "save": "timing/save",
    }

    def __init__(self, engine: TrainEngine, config: Config, rank: int, world_size: int, device: torch.device):
        super().__init__(engine, config, rank, world_size, takes_turns(config) or alternates(config))
        # Members that share a device have neither NCCL nor HCCL.
        backend = "gloo" if takes_turns(config) else config.publication.backend
        self.publication_backend = platform.collective_backend(backend, device)
        dtype = config.publication.dtype
        specs = engine.tensor_specs()
        if dtype != "auto":
            specs = [replace(spec, dtype=dtype) for spec in specs]
        self.manifest = Manifest(tuple(specs), config.publication.bucket_bytes)
        self.sender: WeightSender | None = None
        if rank == 0:
            self.sender = WeightSender(self.manifest, pin=device.type == "cuda", whole=config.publication.overlap)

    def carry_out(self, command: Any) -> Any:
        if isinstance(command, SendWeights):
            self.version = command.version
            self._gather()
            return None
        if isinstance(command, Export):
            self._export(command)
            return None
        return super().carry_out(command)

    def _gather(self) -> None:
        if self.sender is not None:
            self.sender.fill(self.engine.gather())
            return
        for _ in self.engine.gather():
            pass

    def _export(self, command: Export) -> None:
        if self.rank:
            self.engine.export(command.folder)
            return
        with checkpoint.atomic_folder(Path(command.folder)) as partial:
            self.engine.export(str(partial))


def make(config: Config, rank: int, world_size: int) -> TrainRank:
    """Build this rank's engine; with several ranks, join torchrun's default group first. Raises UserError for a bad model."""
    device = join_group(world_size, config.deadlines.train)
    engine = engine_type(config, device)(config, rank=rank, world_size=world_size, device=device)
    return TrainRank(engine, config, rank, world_size, device)


def engine_type(config: Config, device: torch.device) -> Callable[..., TrainEngine]:
    """Raises UserError when the engine's package is missing."""
    if use_megatron(config.services.trainer, device):
        from runtime.engines.train_megatron import MegatronTrainEngine

        return MegatronTrainEngine
    from runtime.engines.train_torch import TorchTrainEngine

    return TorchTrainEngine
