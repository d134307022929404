"""One rank of the trainer group: besides the steps, what it takes to publish and to export the policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from runtime.cluster.topology import alternates, takes_turns
from runtime.commands import (
    AbortWeights,
    Accumulate,
    ApplyProbed,
    BeginStep,
    Export,
    MeetWeights,
    Offload,
    Onload,
    ResendWeights,
    Restore,
    Save,
    SendWeights,
)
from runtime.config import Config
from runtime.ledger import checkpoint
from runtime.process import platform
from runtime.trainer.group_rank import join_group, require_memory
from runtime.trainer.step import ModelTrainer, policy_trainer
from runtime.trainer.update_rank import UpdateRank
from runtime.weights.part import SenderPart
from runtime.weights.plan import Manifest, TensorSpec, roots
from runtime.weights.sender import WeightSender

_ASIDE = MeetWeights | AbortWeights | ResendWeights  # past those that wait


class TrainRank(UpdateRank):
    role = "trainer"
    relayed = Restore | BeginStep | Accumulate | ApplyProbed | SendWeights | Save | Export | Onload | Offload | _ASIDE
    last = SendWeights
    seconds_of = {  # noqa: RUF012
        "onload": "timing/resharding_to_train",
        "offload": "timing/offload",
        "save": "timing/save",
    }

    def __init__(self, engine: ModelTrainer, config: Config, rank: int, world_size: int, device: torch.device):
        super().__init__(engine, config, rank, world_size, takes_turns(config) or alternates(config))
        # Members that share a device have neither NCCL nor HCCL.
        backend = "gloo" if takes_turns(config) else config.publication.backend
        self.publication_backend = platform.collective_backend(backend, device)
        ranks, specs = self._senders()
        self.manifest = Manifest(tuple(specs), config.publication.bucket_bytes, len(ranks))
        self.senders = tuple(f"{self.role}-{sender}" for sender in ranks)
        """What they are called, rank 0 first."""
        self._targets = [ranks[root] for root in roots(self.manifest)]
        self.sender: WeightSender | None = None
        self._part: SenderPart | None = None
        if rank in ranks:
            number = ranks.index(rank)
            whole = config.publication.overlap
            self.sender = WeightSender(self.manifest, number=number, pin=device.type == "cuda", whole=whole)
            if rank:
                self._part = SenderPart(self.sender, number, self.senders[number], config.publication.transfer_timeout)

    def _senders(self) -> tuple[list[int], list[TensorSpec]]:
        """The ranks that send, and the tensors as they are on the wire, with who can send each."""
        settings = self.config.publication
        specs = self.engine.tensor_specs()
        if settings.dtype != "auto":
            specs = [replace(spec, dtype=settings.dtype) for spec in specs]
        if settings.senders == "one":
            return [0], specs
        holders = self.engine.holders()
        ranks = sorted({0}.union(*holders))
        held_by = [tuple(ranks.index(holder) for holder in each) for each in holders]
        return ranks, [replace(spec, held_by=each) for spec, each in zip(specs, held_by, strict=True)]

    def carry_out(self, command: Any) -> Any:
        if isinstance(command, ApplyProbed) and command.probes:
            gaps = self.engine.compare(command.probes)
            return replace(super().carry_out(command), probes=gaps)
        if isinstance(command, SendWeights):
            self.version = command.version
            self._gather(command)
            return None
        if isinstance(command, Export):
            self._export(command)
            return None
        return super().carry_out(command)

    def aside(self, command: Any) -> None:
        if self._part is not None:  # rank 0 tells all others
            self._part.aside(command)

    def close(self) -> None:
        if self._part is not None:
            self._part.close()

    def _gather(self, command: SendWeights) -> None:
        tensors = self.engine.gather(self._targets)
        if self._part is not None:
            self._part.gather(tensors, command.version, command.epoch)
        elif self.sender is not None:
            self.sender.fill(tensors)
        else:
            for _ in tensors:
                pass

    def _export(self, command: Export) -> None:
        if self.rank:
            self.engine.export(command.folder)
            return
        with checkpoint.atomic_folder(Path(command.folder)) as partial:
            self.engine.export(str(partial))


def make(config: Config, rank: int, world_size: int) -> TrainRank:
    """Build this rank's engine; with several ranks, join torchrun's default group first. Raises UserError for a bad model."""
    device = join_group("trainer", config.services.trainer, world_size, config.deadlines.train)
    require_memory("trainer", config, config.model.path, device)
    engine = policy_trainer(config, rank=rank, world_size=world_size, device=device)
    return TrainRank(engine, config, rank, world_size, device)
