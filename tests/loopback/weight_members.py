"""Receivers of weights in processes of their own: what such a process does, and its handle in the test's process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import torch

from runtime import platform
from runtime.errors import ServiceFault
from runtime.types import PolicyVersion
from runtime.weights.group import WeightGroup, host, join
from runtime.weights.plan import GroupAddress
from runtime.weights.receiver import Staged, WeightReceiver
from tests.loopback.weight_cases import MANIFEST, PATIENCE, same, threads_and_files

ROOT = Path(__file__).parents[2]


SIMULATED_NPU = ROOT / "tests" / "simulated_npu"


def member() -> None:
    """Serve commands, one JSON line each, until stdin ends; answers come as they are ready, the first once it serves."""
    torch.set_num_threads(1)
    platform.device()
    receiver = WeightReceiver(MANIFEST)
    answer("ready")
    group: WeightGroup | None = None
    for line in sys.stdin:
        op, *rest = json.loads(line)
        if op == "join":
            group = None
            group = join(msgspec.convert(rest[0], GroupAddress), rest[1])
            answer("joined", group.rank)
        elif op == "receive":
            assert group is not None
            version, deadline = rest
            receiver.receive(group, PolicyVersion(0, version), deadline).add_done_callback(report)
            answer("posted", version)
        elif op == "leave":
            if group is not None:
                group.abort()
            answer("left", 0)
        else:
            answer("counts", threads_and_files())


def answer(*words: Any) -> None:
    print(json.dumps(words), flush=True)


def report(future: Future[Staged]) -> None:
    error = future.exception()
    if isinstance(error, ServiceFault):
        answer("fault", error.phase, str(error))
    elif error is not None:
        answer("error", repr(error))
    else:
        staged = future.result()
        whole = same(staged.tensors(), staged.version.step)
        staged.release()
        answer("staged", staged.version.step, whole)


class Member:
    def __init__(self, name: str, simulated_npu: bool = False):
        self.name = name
        code = "from tests.loopback.weight_members import member; member()"
        env = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        if simulated_npu:
            env["PYTHONPATH"] = os.pathsep.join((str(SIMULATED_NPU), env.get("PYTHONPATH", "")))
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

        self._is_ready = False

    def ready(self) -> None:
        """Return once it serves."""
        if not self._is_ready:
            assert self.hear() == ["ready"]
            self._is_ready = True

    def tell(self, *words: Any) -> None:
        self.ready()
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()

    def hear(self) -> list[Any]:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def connect(
    members: list[Member],
    epoch: int,
    timeout: float = PATIENCE,
    backend: str = "gloo",
    transport: str = "collective",
    folder: str = "",
) -> WeightGroup:
    for one in members:
        one.ready()
    names = ("trainer", *(one.name for one in members))
    pending = host(epoch, len(names), "127.0.0.1", backend, timeout, "trainer", transport, folder, names=names)
    for rank, one in enumerate(members, 1):
        one.tell("join", msgspec.to_builtins(msgspec.structs.replace(pending.address, rank=rank)), one.name)
    group = pending.connect()
    for rank, one in enumerate(members, 1):
        assert one.hear() == ["joined", rank]
    return group


def post(members: list[Member], version: int, deadline: float) -> None:
    for one in members:
        one.tell("receive", version, deadline)
        assert one.hear() == ["posted", version]


def leave(members: list[Member], group: WeightGroup) -> None:
    group.abort()
    for one in members:
        one.tell("leave")
        assert one.hear()[0] == "left"
