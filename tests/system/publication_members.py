"""The processes of the publications under faults: the real services, each in a process of its own, and what goes wrong in them.

They are forked from one process that has imported everything, so that another in a dead one's place costs a tenth of a
second. What goes wrong is put around the services from here, and told to each over a socket of its own.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch
import uvloop
import xxhash
from safetensors.torch import save_file

from runtime.commands import SendWeights
from runtime.config import Config
from runtime.models.hf_config import read_config
from runtime.models.hf_weights import WeightFiles
from runtime.process import os_process
from runtime.rollout.torch.decoder_weights import DecoderWeights
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
from tests.system.publication_faults import TRAINER, threads_and_files

MODEL = {
    "model_type": "qwen2",
    "vocab_size": 260,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}  # a million parameters


def write_model(folder: Path) -> None:
    """A model of `MODEL`'s shape with random weights, as a Hugging Face folder."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODEL))
    weights = DecoderWeights.empty(read_config(folder), torch.device("cpu"), torch.float32)._views
    save_file(weights_of(PolicyVersion(), {name: each.shape for name, each in weights.items()}), folder / "model.safetensors")


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
    """One service, what it is made to do wrong, and what it holds, over the socket at `control`."""

    def __init__(self, service: Service, control: str, incarnation: int):
        self._service = service
        self._armed: dict[str, Any] | None = None  # in the next transfer
        self._random = random.Random(os.getpid())
        self._swapped: list[int] = []
        self._control = socket.socket(socket.AF_UNIX)
        self._control.connect(control)
        self._answer(name=service.name, incarnation=incarnation)

    def watch(self, process: ServiceProcess, coordinator: str) -> None:
        """Serve the socket, from a thread."""
        self._process, self._coordinator = process, int(coordinator.rpartition(":")[2])
        threading.Thread(target=self._serve, name="faults", daemon=True).start()

    def _serve(self) -> None:
        with self._control.makefile() as lines:
            for line in lines:
                command = json.loads(line)
                if command["do"] == "cut":
                    self._cut()
                elif command["do"] != "report":
                    self._armed = command
                self._answer(**self._report())

    def _answer(self, **values: Any) -> None:
        self._control.sendall(json.dumps(values).encode() + b"\n")

    def _report(self) -> dict[str, Any]:
        threads, files = threads_and_files()
        held = {"threads": threads, "files": files, "swapped": self._swapped, "version": self._service.version.pack()}
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

    # ------------------------------------------------------------------------------------------ around the transfers

    def receptions(self) -> None:
        """Let this process's receptions go wrong when that is armed."""
        receive = WeightReceiver.receive

        def faulty(receiver: WeightReceiver, group: WeightGroup, version: PolicyVersion, deadline: float) -> Any:
            self._spoil(group, "receive", len(receiver.buckets))
            return receive(receiver, group, version, deadline)

        WeightReceiver.receive = faulty  # type: ignore[method-assign]

    def sends(self) -> None:
        """Let this process's transfers go wrong when that is armed."""
        send = WeightSender.send

        def faulty(sender: WeightSender, group: WeightGroup, version: PolicyVersion, deadline: float) -> Any:
            self._spoil(group, "send", len(sender.buckets))
            return send(sender, group, version, deadline)

        WeightSender.send = faulty  # type: ignore[method-assign]

    def peer_sends(self) -> None:
        """Let this process end in the middle of what it sends another rollout, when that is armed."""
        send = WeightSender.send

        def deadly(sender: WeightSender, group: WeightGroup, version: PolicyVersion, deadline: float) -> Any:
            if self._armed is not None and self._armed["do"] == "die":
                last = int(self._armed["where"] * len(sender.buckets))
                move = group.send
                group.send = lambda index, buffer: _die() if index == last else move(index, buffer)  # type: ignore[method-assign]
            return send(sender, group, version, deadline)

        WeightSender.send = deadly  # type: ignore[method-assign]

    def swaps(self, swap: Callable[..., Any]) -> Callable[..., Any]:
        """`swap`, and a note of the version."""

        async def noted(*args: Any, **options: Any) -> None:
            await swap(*args, **options)
            self._swapped.append(self._service.version.pack())

        return noted

    def _spoil(self, group: WeightGroup, how: str, buckets: int) -> None:
        """Have one bucket of the next transfer over `group` go wrong, if that is armed."""
        armed, self._armed = self._armed, None
        if armed is None:
            group.__dict__.pop(how, None)
            return
        move, bad = getattr(type(group), how), int(armed["where"] * buckets)

        def spoiled(index: int, buffer: torch.Tensor, *root: int) -> Any:
            if index != bad:
                return move(group, index, buffer, *root)
            place = self._random.randrange(buffer.numel())
            if how == "send":  # between its checksum and the wire
                buffer[place] ^= 1
                return Then(move(group, index, buffer), lambda: buffer[place].bitwise_xor_(1))
            if armed["do"] == "raise":
                return Then(move(group, index, buffer, *root), _raise)
            return Then(move(group, index, buffer, *root), lambda: buffer[place].bitwise_xor_(1))

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


def _die() -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def _raise() -> None:
    raise ArithmeticError("a reception that raises, on purpose")


class Rollout(RolloutService):
    faults: Faulty

    def load(self) -> None:
        super().load()
        self._engine.swap = self.faults.swaps(self._engine.swap)  # type: ignore[method-assign]


def serve(config: Config, name: str, incarnation: int, coordinator: str, control: str) -> None:
    """One process, from here to its end."""
    os.environ[os_process.INCARNATION] = str(incarnation)
    service: Service
    if name == TRAINER:
        service = TrainerService(config, name, 0)
        service._make_rank = Versions  # type: ignore[assignment]
        faults = Faulty(service, control, incarnation)
        faults.sends()
    else:
        service = Rollout(config, name, 0)
        faults = service.faults = Faulty(service, control, incarnation)
        faults.receptions()
        faults.peer_sends()
    process = ServiceProcess(service, coordinator, Phases())
    faults.watch(process, coordinator)
    uvloop.run(process.run())


def fork(config: Config, logs: Path, name: str, incarnation: int, coordinator: str, control: str) -> int:
    """The pid of a new process."""
    parent = os.getpid()
    if pid := os.fork():
        return pid
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os_process.die_with_parent(parent)
        nothing = os.open(os.devnull, os.O_RDWR)
        log = os.open(logs / f"{name}.{incarnation}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for descriptor, target in ((nothing, 0), (nothing, 1), (log, 2)):
            os.dup2(descriptor, target)
        os_process.stacks_on_signal()
        serve(config, name, incarnation, coordinator, control)
    except BaseException:  # noqa: BLE001 - it is told, and the copy of the parent's loop is never gone on with
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def main() -> None:
    """`CONFIG.json LOGS`: fork a process for every line of stdin, and say its pid; until stdin ends, and they with it."""
    config, logs = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Config), Path(sys.argv[2])
    os_process.die_with_parent()
    torch.set_num_threads(1)
    write_model(Path(config.model.path))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets those that ended
    for line in sys.stdin:
        print(fork(config, logs, *json.loads(line)), flush=True)


if __name__ == "__main__":
    main()
