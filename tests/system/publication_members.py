"""The processes of the publications under faults: the real services, each in a process of its own, and what goes wrong in them.

What goes wrong is put around the services from here, and told to each over its test's connection.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import uvloop
import xxhash

from runtime.commands import SendWeights
from runtime.config import Config
from runtime.models.hf_weights import WeightFiles
from runtime.process import os_process
from runtime.telemetry.startup import Phases
from runtime.types import PolicyVersion
from runtime.weights import rendezvous  # noqa: F401
from runtime.weights.gloo_mesh import _sockets as open_sockets
from runtime.weights.group import WeightGroup
from runtime.weights.plan import Manifest, TensorSpec
from runtime.weights.receiver import WeightReceiver
from runtime.weights.sender import SendingMember, WeightSender
from services.process import Service, ServiceProcess
from services.rollout import RolloutService
from services.trainer import TrainerService
from tests.loopback.ranks import heard

TRAINER = "trainer-0"
# torch's store looks up the name of every address that it connects to, which takes 5 s when a name server is silent.
TORCH = {"TORCH_CPP_LOG_LEVEL": "ERROR", "RES_OPTIONS": "timeout:1 attempts:1"}


def weights_of(version: PolicyVersion, shapes: Mapping[str, Sequence[int]]) -> dict[str, torch.Tensor]:
    """Small random numbers that `version` determines."""
    generator = torch.Generator().manual_seed(version.pack())
    return {name: torch.randn(tuple(shape), generator=generator) * 0.05 for name, shape in shapes.items()}


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """One checksum of all, names and dtypes included."""
    out = xxhash.xxh3_64()
    for name in sorted(tensors):
        out.update(f"{name} {tensors[name].dtype}".encode())
        out.update(tensors[name].contiguous().view(torch.uint8).numpy().data)
    return out.hexdigest()


class Versions:
    """A trainer's engine, as far as publication goes: a version's weights are made from its number."""

    publication_backend = "gloo"
    senders = ("trainer-0",)

    def __init__(self, config: Config, rank: int, world_size: int):
        specs = (TensorSpec(name, "float32", shape) for name, shape in WeightFiles(config.model.path).shapes.items())
        self.manifest = Manifest(tuple(specs), config.publication.bucket_bytes)
        settings, sender = config.publication, WeightSender(self.manifest)
        self.member = SendingMember(sender, TRAINER, settings.join_timeout, settings.transfer_timeout)
        self.version = PolicyVersion()
        self.digest = ""

    def execute(self, command: Any) -> Any:
        assert isinstance(command, SendWeights)
        tensors = weights_of(command.version, {spec.name: spec.shape for spec in self.manifest.tensors})
        self.version, self.digest = command.version, digest(tensors)
        return self.member.gather(tensors.values(), command.version, command.epoch)


class Faulty:
    """One service, what it is made to do wrong, and what it holds, over `connection`."""

    def __init__(self, service: Service, connection: Any):
        self._service = service
        self._armed: dict[str, Any] | None = None  # in the next transfer
        self._random = random.Random(os.getpid())
        self._swapped: list[int] = []
        self._connection = connection

    def watch(self, process: ServiceProcess, coordinator: str) -> None:
        """Serve the connection, from a thread."""
        self._process, self._coordinator = process, int(coordinator.rpartition(":")[2])
        threading.Thread(target=self._serve, name="faults", daemon=True).start()

    def _serve(self) -> None:
        try:
            for (command,) in heard(self._connection):
                if command["do"] == "cut":
                    self._cut()
                elif command["do"] != "report":
                    self._armed = command
                self._connection.send(self._report())
        finally:
            os._exit(0)  # the test has ended, however it did

    def _report(self) -> dict[str, Any]:
        held = {"swapped": self._swapped, "version": self._service.version.pack()}
        if isinstance(self._service, TrainerService):
            return held | {"digest": self._service._worker.digest}  # type: ignore[attr-defined]
        return held | {"digest": digest(self._service._engine._decoder.weights._views)}  # type: ignore[attr-defined]

    def _cut(self) -> None:
        """Every connection but those of gRPC."""
        kept = {int(self._process._address.rpartition(":")[2]), self._coordinator}
        for connection in open_sockets():
            with suppress(OSError):  # not connected, or by now no more
                if not {connection.getsockname()[1], connection.getpeername()[1]} & kept:
                    connection.shutdown(socket.SHUT_RDWR)

    def around(self, end: type, method: str, how: str) -> None:
        """Let this process's transfers, which `method` of `end` begins, go wrong when that is armed."""
        begin = getattr(end, method)

        def faulty(one: Any, group: WeightGroup, version: PolicyVersion, deadline: float) -> Any:
            self._spoil(group, how, len(one.buckets))
            return begin(one, group, version, deadline)

        setattr(end, method, faulty)

    def swaps(self, swap: Callable[..., Any]) -> Callable[..., Any]:
        """`swap`, and a note of the version."""

        async def noted(*args: Any, **options: Any) -> None:
            await swap(*args, **options)
            self._swapped.append(self._service.version.pack())

        return noted

    def _spoil(self, group: WeightGroup, how: str, buckets: int) -> None:
        """Have one bucket of the next transfer over `group` go wrong, if that is armed."""
        if self._armed is None or (self._armed["do"] == "die") != (how == "send" and self._service.name != TRAINER):
            group.__dict__.pop(how, None)
            return
        armed, self._armed = self._armed, None
        move, bad = getattr(type(group), how), int(armed["where"] * buckets)

        def spoiled(index: int, buffer: torch.Tensor, *root: int) -> Any:
            if index != bad:
                return move(group, index, buffer, *root)
            if armed["do"] == "die":  # in the middle of what a rollout sends another one
                os.kill(os.getpid(), signal.SIGKILL)
            place = self._random.randrange(buffer.numel())
            if how == "send":  # between its checksum and the wire
                buffer[place] ^= 1
            after = _raise if armed["do"] == "raise" else lambda: buffer[place].bitwise_xor_(1)
            return Then(move(group, index, buffer, *root), after)

        setattr(group, how, spoiled)


class Then:
    """A transfer, and what happens after it."""

    def __init__(self, transfer: Any, after: Callable[[], Any]):
        self._transfer = transfer
        self._after = after

    def wait(self, timeout: float) -> None:
        try:
            self._transfer.wait(timeout)
        finally:
            self._after()


def _raise() -> None:
    raise ArithmeticError("a reception that raises, on purpose")


class Rollout(RolloutService):
    faults: Faulty

    def load(self) -> None:
        super().load()
        self._engine.swap = self.faults.swaps(self._engine.swap)  # type: ignore[method-assign]


def serve(connection: Any) -> None:
    """One process, from here to its end."""
    config, logs, name, incarnation, coordinator = connection.recv()
    log = os.open(Path(logs) / f"{name}.{incarnation}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os_process.stacks_on_signal()
    os.environ.update(TORCH | {os_process.INCARNATION: str(incarnation)})
    service: Service
    if name == TRAINER:
        service = TrainerService(config, name, 0)
        service._make_rank = Versions
        faults = Faulty(service, connection)
    else:
        service = Rollout(config, name, 0)
        faults = service.faults = Faulty(service, connection)
        faults.around(WeightReceiver, "receive", "receive")
    faults.around(WeightSender, "send", "send")
    process = ServiceProcess(service, coordinator, Phases())
    faults.watch(process, coordinator)
    uvloop.run(process.run())
