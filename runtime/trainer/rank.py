"""One rank of a group of processes that share a model: the commands of each role."""

from __future__ import annotations

import contextlib
import logging
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from msgspec.structs import replace

from runtime import commands, types
from runtime.cluster.topology import alternates, takes_turns
from runtime.config import Config, Trainer
from runtime.errors import DeadlineExceeded, ServiceFault
from runtime.ledger import checkpoint
from runtime.models.adapters import base_of
from runtime.models.vllm_sharding import workers_sharding
from runtime.process import platform
from runtime.process.waiting import in_thread
from runtime.trainer.backend import TrainedRole
from runtime.trainer.memory import MemoryCopies
from runtime.trainer.rank_group import NodePart, join_group, require_memory
from runtime.trainer.step import ModelTrainer, critic_trainer, policy_trainer, timed
from runtime.types import PolicyVersion, StepResult, snake
from runtime.weights.delta import FULL_EVERY
from runtime.weights.plan import Manifest, Sharding
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
OF_A_STEP = (commands.BeginStep, commands.Accumulate, commands.Apply, commands.Keep)


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
        keeps = config.checkpoint.in_memory != "off"
        self._copies = MemoryCopies(engine, config.deadlines.train) if keeps else None
        self._result = StepResult(metrics={}, seconds=0.0)  # of the newest step
        self._recalled: PolicyVersion | None = None  # the version that this process has found in memory
        self._keeping: tuple[PolicyVersion, Future[None]] | None = None  # the version that it copied last
        self._last = commands.Keep if keeps and self.last is commands.Apply else self.last
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
            ended = self._offloads and not self._begun and isinstance(command, (self._last, *BETWEEN_STEPS))
            # After Restore and Recall the coordinator has not yet given the device to this role.
            if ended or (self._managed_externally and isinstance(command, (commands.Restore, commands.Recall))):
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
        """Make the step, or return its result if the state in memory was that after the step."""
        if command.step < self.version.step:
            return self._result
        result = self.engine.apply()
        self._begun = False
        self.version = replace(self.version, step=command.step + 1)
        seconds, self._seconds = self._seconds, {}
        self._result = replace(result, metrics=result.metrics | self.engine.phases | seconds)
        return self._result

    def keep(self, command: commands.Keep) -> Future[None] | None:
        """Copy the state. The version that this process has found in memory has its copies already. Those of a lost node come
        back with the next version."""
        self.version = command.version
        if self._copies is None or command.version == self._recalled:
            return None
        if self._keeping is not None and command.version == self._keeping[0]:  # a new coordinator asks again
            return self._keeping[1]
        with self._counted("keep"):
            copied = self._copies.keep(command.version, types.encode(self._result))
        self._keeping = command.version, in_thread("keep", copied)
        return self._keeping[1]

    def recall(self, command: commands.Recall) -> commands.Recalled:
        """Do what `commands.Recall` says. Collective."""
        if self._copies is None:
            return commands.Recalled(None, "checkpoint.in_memory is off")
        before = time.monotonic()
        found = self._copies.recall(command.version)
        if found.version is not None:
            self.version = self._recalled = found.version
            self._failed = None
            if found.result:  # not on a further rank of a group that has grown
                self._result = types.decode(StepResult, found.result)
            log.info("%s has version %s from memory, in %.1f s", self.role, found.version, time.monotonic() - before)
        return commands.Recalled(found.version, found.reason)

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
        delta, names = settings.encoding == "delta", tuple(f"{self.role}-{rank}" for rank in range(self.world_size))
        self.manifest = self._manifest()
        buffers = SendBuffers(self.manifest, number=self.rank, pin=device.type == "cuda", takes_changes=delta)
        # Members that share a device cannot use NCCL or HCCL.
        backend = platform.collective_backend("gloo" if takes_turns(config) else settings.backend, device)
        full_every = FULL_EVERY if delta else 0
        self.sender = WeightSender(buffers, config, names[self.rank], backend=backend, names=names, full_every=full_every)

    def _manifest(self) -> Manifest:
        """Return the manifest of a weight sync: each rank sends of what it holds, each worker takes of what it needs."""
        settings, specs, cuts = self.config.weight_sync, self.backend.tensor_specs(), self.backend.cuts()
        if settings.dtype != "auto":
            specs = [replace(spec, dtype=settings.dtype) for spec in specs]
        return Manifest(
            tuple(specs),
            settings.bucket_bytes,
            source=Sharding.of(self.world_size, cuts),
            target=workers_sharding(self.config, specs),
            window_bytes=settings.staging_bytes // 2,
            base=base_of((spec.name for spec in specs), self.config.model.path),
        )

    def apply(self, command: commands.Apply) -> StepResult:
        if command.probes and command.step == self.version.step:
            gaps = self.engine.compare(command.probes)
            return replace(super().apply(command), probes=gaps)
        return super().apply(command)

    def send_weights(self, command: commands.SendWeights) -> Future[commands.WeightsSent]:
        """Send what this rank holds and the plan has it send. Raises ServiceFault for an older version."""
        if command.version < self.version:
            name, phase = f"{self.role}-{self.rank}", "snapshot"
            raise ServiceFault(name, phase, f"version {command.version} was not kept: {self.version} is there")
        self.version = command.version
        return self.sender.gather(self.backend.shards(), command.version, command.epoch)

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
