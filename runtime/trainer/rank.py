"""One rank of the trainer group: besides the steps, what it takes to publish and to export the policy."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import torch
from msgspec.structs import replace

from runtime.cluster.topology import alternates, takes_turns
from runtime.commands import Apply, Export, SendWeights
from runtime.config import Config
from runtime.errors import ServiceFault
from runtime.ledger import checkpoint
from runtime.process import platform
from runtime.trainer.group_rank import join_group, require_memory
from runtime.trainer.step import ModelTrainer, policy_trainer
from runtime.trainer.update_rank import UpdateRank
from runtime.types import StepResult
from runtime.weights.plan import GroupAddress, Manifest, TensorSpec, roots
from runtime.weights.sender import SendResult, WeightSender
from runtime.weights.sending import SendingMember


class TrainRank(UpdateRank):
    role = "trainer"
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
        self.member: SendingMember | None = None
        """Of the weight sync's group, where this rank sends."""
        if rank in ranks:
            settings = config.publication
            pin, number = device.type == "cuda", ranks.index(rank)
            sender = WeightSender(self.manifest, number=number, pin=pin, whole=settings.overlap)
            self.member = SendingMember(sender, self.senders[number], settings.join_timeout, settings.transfer_timeout)

    def address_of(self, address: GroupAddress) -> GroupAddress:
        """Its own, in the group that rank 0 hosts."""
        name = f"{self.role}-{self.rank}"
        return replace(address, rank=self.senders.index(name)) if name in self.senders else address

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

    def apply(self, command: Apply) -> StepResult:
        gaps = self.engine.compare(command.probes) if command.probes else []
        return replace(super().apply(command), probes=gaps)

    def send_weights(self, command: SendWeights) -> Future[SendResult] | None:
        """Gather the weights, which takes every rank, and send this one's part as it becomes whole. Raises ServiceFault, phase
        "snapshot", for a version that the engine is past."""
        if command.version < self.version:
            name, phase = f"{self.role}-{self.rank}", "snapshot"
            raise ServiceFault(name, phase, f"version {command.version} was not kept: {self.version} is there")
        self.version = command.version
        tensors = self.engine.gather(self._targets)
        if self.member is not None:
            return self.member.gather(tensors, command.version, command.epoch)
        for _ in tensors:
            pass
        return None

    def export(self, command: Export) -> None:
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
