"""One rank of a group of processes that share a model: the commands of each role."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from msgspec.structs import replace

from runtime import commands, types
from runtime.cluster.topology import alternates, takes_turns
from runtime.config import Config, Trainer
from runtime.errors import DeadlineExceeded, ServiceFault
from runtime.ledger import checkpoint
from runtime.models.adapters import base_of
from runtime.process import platform
from runtime.process.waiting import in_thread
from runtime.trainer.backend import TrainedRole
from runtime.trainer.rank_group import NodePart, join_group, require_memory
from runtime.trainer.step import ModelTrainer, critic_trainer, policy_trainer, timed
from runtime.types import PolicyVersion, StepResult, snake
from runtime.weights.delta import FULL_EVERY, ShardDelta, TensorChanges
from runtime.weights.plan import Manifest, TensorSpec, roots
from runtime.weights.sender import SendBuffers, WeightSender


class GroupRank:
    """All methods run in the engine's thread, in the same order on every rank. A subclass has a method for each command, by the
    command's name in snake case. It returns the answer: a future if the work goes on beside the next commands."""

    role: ClassVar[str]

    def __init__(self, config: Config, rank: int, world_size: int):
        self.config = config
        self.rank = rank
        self.world_size = world_size
        self.version = PolicyVersion()  # version of the present weights

    def execute(self, command: Any) -> Any:
        """Carry out one command and return its answer."""
        return getattr(self, snake(type(command).__name__))(command)


log = logging.getLogger("sluice")

BETWEEN_STEPS = (commands.Export, commands.Save)
OF_A_STEP = (commands.BeginStep, commands.Accumulate, commands.Apply)


class UpdateRank(GroupRank):
    """One rank of a group under training: the engine, and the commands that trainer and critic share."""

    last: ClassVar[type]  # last command of a step
    timed_as: ClassVar[str]  # prefix of the metrics of the seconds that `onload`, `offload` and `save` take

    def __init__(self, engine: ModelTrainer, config: Config):
        super().__init__(config, engine.backend.rank_info.rank, engine.backend.rank_info.world_size)
        self.engine, self.backend = engine, engine.backend
        settings: Trainer = getattr(config.services, self.role)
        # Whether the rank shares its device with another role, and the coordinator says when the rank has it.
        self._managed_externally = alternates(config) or (self.role == "trainer" and takes_turns(config))
        self._offloads, self._away = bool(settings.offloaded) and not self._managed_externally, False
        self._begun = False  # a step has begun: its gradients are on the device
        self._failed: Exception | None = None  # the error of a command of the step; the step's gradients are then incomplete
        self._seconds: dict[str, float] = {}
        self._saving: Future[list[str]] | None = None
        self._part = None if config.cluster.shared_folder else NodePart(config, self.role, self.backend.rank_info)
        if self._managed_externally:
            self.offload(commands.Offload())

    def execute(self, command: Any) -> Any:
        """Carry out one command, with the engine's state on the right device. Commands of a step are sent ahead: after one
        has failed, the later ones raise the same error until a checkpoint is restored."""
        of_a_step = isinstance(command, OF_A_STEP)
        if of_a_step and self._failed is not None:
            raise self._failed
        try:
            # Values need nothing that is offloaded.
            if self._away and not isinstance(command, (commands.Offload, commands.ComputeValues)):
                with self._counted("onload"):
                    self.backend.onload()
                self._away = False
            answer = super().execute(command)
            ended = self._offloads and not self._begun and isinstance(command, (self.last, *BETWEEN_STEPS))
            # After Restore the coordinator has not yet given the device to this role.
            if ended or (self._managed_externally and isinstance(command, commands.Restore)):
                self.offload(commands.Offload())
            return answer
        except Exception as error:
            if of_a_step:
                self._failed = error
            raise

    def restore(self, command: commands.Restore) -> None:
        before, folder = time.monotonic(), Path(command.folder)
        if self._part is None:
            self.version = checkpoint.read_position(folder).version
            self.engine.load(str(checkpoint.critic_state(folder) if self.role == "critic" else folder))
        else:
            self.version = self._part.load(command, self.backend.needed, self.engine.load)
        self._failed = None
        log.info("restored %s of %s in %.1f s", self.role, folder, time.monotonic() - before)

    def begin_step(self, command: commands.BeginStep) -> None:
        self._begun = True
        self.engine.begin_step(command.step)

    def accumulate(self, command: commands.Accumulate) -> None:
        self.engine.accumulate(command.groups, command.last)

    def apply(self, command: commands.Apply) -> StepResult:
        result = self.engine.apply()
        self._begun = False
        self.version = replace(self.version, step=command.step + 1)
        seconds, self._seconds = self._seconds, {}
        return replace(result, metrics=result.metrics | self.engine.phases | seconds)

    def offload(self, command: commands.Offload) -> None:
        """Move the state that the configuration names off the device, which may then be lent out."""
        if not self._away:
            with self._counted("offload"):
                self.backend.offload()
            self._away = True

    def onload(self, command: commands.Onload) -> None:
        """Do nothing: `execute` has brought everything back."""

    def save(self, command: commands.Save) -> Future[list[str]] | list[str]:
        folder, part = Path(command.folder), self._part
        with self._counted("save"), checkpoint.as_storage_full(folder):
            self._require_saved()
            own = folder if part is None else part.begin(command)
            write = self.engine.begin_save(str(own))

            def write_to_disk() -> list[str]:
                with checkpoint.as_storage_full(folder):
                    write()
                    if part is not None:
                        return part.complete(own, command)
                    checkpoint.note_sums(own, self.rank)
                    return []

            if not self.config.checkpoint.async_save:
                return write_to_disk()
        self._saving = in_thread("save", write_to_disk)
        return self._saving

    def _require_saved(self) -> None:
        """Wait until the previous checkpoint is written. All ranks have answered for it and reported whether it failed."""
        timeout = self.config.deadlines.save
        try:
            if self._saving is not None:
                self._saving.exception(timeout)
        except TimeoutError as error:
            raise DeadlineExceeded(f"{self.role} rank {self.rank}", "save", "the last save still runs", timeout) from error

    def _counted(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Return a context whose seconds are added to the next step's metrics."""
        return timed(self._seconds, self.timed_as + what)


class TrainRank(UpdateRank):
    """One rank of the trainer group: the steps, the weight sync and the export of the policy."""

    role = "trainer"
    make_engine = staticmethod(policy_trainer)
    last = commands.SendWeights
    timed_as = "timing/"

    def __init__(self, engine: ModelTrainer, config: Config):
        super().__init__(engine, config)
        device, settings = self.backend.rank_info.device, config.weight_sync
        ranks, specs = self._senders()
        base = base_of((spec.name for spec in specs), config.model.path)
        self.manifest = Manifest(tuple(specs), settings.bucket_bytes, len(ranks), base)
        self._targets = [ranks[root] for root in roots(self.manifest)]
        delta = settings.encoding == "delta"
        by_shard = delta and self.world_size > 1
        self._delta = ShardDelta(self.rank, device, self._targets) if by_shard else None
        self.sender: WeightSender | None = None  # None if this rank sends nothing
        if self.rank in ranks:
            number, names = ranks.index(self.rank), tuple(f"{self.role}-{sender}" for sender in ranks)
            buffers = SendBuffers(self.manifest, number=number, pin=device.type == "cuda", takes_changes=by_shard)
            # Members that share a device cannot use NCCL or HCCL.
            backend = platform.collective_backend("gloo" if takes_turns(config) else settings.backend, device)
            full_every = FULL_EVERY if delta else 0
            self.sender = WeightSender(buffers, config, names[number], backend=backend, names=names, full_every=full_every)

    def _senders(self) -> tuple[list[int], list[TensorSpec]]:
        """Return the ranks that send, and the specs of the tensors as sent, each with the senders that can send it."""
        settings = self.config.weight_sync
        specs = self.backend.tensor_specs()
        if settings.dtype != "auto":
            specs = [replace(spec, dtype=settings.dtype) for spec in specs]
        if settings.senders == "one":
            return [0], specs
        holders = self.backend.holders()
        ranks = sorted({0}.union(*holders))
        held_by = [tuple(ranks.index(holder) for holder in each) for each in holders]
        return ranks, [replace(spec, held_by=each) for spec, each in zip(specs, held_by, strict=True)]

    def apply(self, command: commands.Apply) -> StepResult:
        gaps = self.engine.compare(command.probes) if command.probes else []
        return replace(super().apply(command), probes=gaps)

    def send_weights(self, command: commands.SendWeights) -> Future[commands.WeightsSent] | commands.WeightsSent:
        """Gather the weights, which takes every rank, and send this rank's part. Raises ServiceFault for an older version."""
        if command.version < self.version:
            name, phase = f"{self.role}-{self.rank}", "snapshot"
            raise ServiceFault(name, phase, f"version {command.version} was not kept: {self.version} is there")
        self.version = command.version
        tensors = self._gathered()
        if self.sender is not None:
            return self.sender.gather(tensors, command.version, command.epoch)
        for _ in tensors:
            pass
        return commands.WeightsSent(0, 0.0)

    def _gathered(self) -> Iterator[torch.Tensor] | Iterator[TensorChanges]:
        """Return what changed since the last weight sync in the tensors that this rank sends, in order, or whole tensors."""
        current = self.sender is None or self.sender.buffers.filled
        changes = self._delta.find(self.backend.shards(self._targets), current) if self._delta is not None else None
        return changes or self.backend.gather(self._targets)

    def export(self, command: commands.Export) -> None:
        self.engine.export(Path(command.folder))


class CriticRank(UpdateRank):
    """One rank of the critic group: the steps, and the values."""

    role = "critic"
    make_engine = staticmethod(critic_trainer)
    last = commands.Apply
    timed_as = "timing/critic_"

    def compute_values(self, command: commands.ComputeValues) -> list[bytes]:
        """Return the encoded Values of this rank's groups, in their order."""
        return [types.encode(values) for values in self.engine.values(command.groups)]


Trained = TypeVar("Trained", TrainRank, CriticRank)


def make_rank(kind: type[Trained], config: Config, rank: int, world_size: int) -> Trained:
    """Join the group if there are several ranks, and build the engine of a rank. Raises UserError for a bad model."""
    role = kind.role
    device = join_group(role, getattr(config.services, role), world_size, config.deadlines.train)
    require_memory(role, config, TrainedRole(config, role).source, device)
    return kind(kind.make_engine(config, rank=rank, world_size=world_size, device=device), config)
