"""Receivers of weights in processes of their own: what such a process does, and its handle in the test's process."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from runtime.errors import ServiceFault
from runtime.process import platform
from runtime.types import PolicyVersion
from runtime.weights.group import WeightGroup
from runtime.weights.receiver import Staged, WeightReceiver
from runtime.weights.rendezvous import host, join
from tests.loopback.ranks import FORKED, Helper, heard
from tests.loopback.weight_cases import MANIFEST, PATIENCE, same, threads_and_files, transport_and_encoding

ROOT = Path(__file__).parents[2]


SIMULATED_NPU = ROOT / "tests" / "simulated_npu"


class Answers:
    """What a process says, from several threads."""

    def __init__(self, connection: Any):
        self._connection, self._lock = connection, threading.Lock()

    def say(self, *words: Any) -> None:
        with self._lock:
            self._connection.send(words)


def member(connection: Any) -> None:
    """Serve commands until the test ends; answers come as they are ready, the first once it serves."""
    platform.device()
    answers, receiver = Answers(connection), WeightReceiver(MANIFEST)
    answers.say("ready")
    group: WeightGroup | None = None
    for op, *rest in heard(connection):
        if op == "join":
            group = None
            group = join(*rest)
            answers.say("joined", group.rank)
        elif op == "receive":
            assert group is not None
            version, deadline = rest
            receiver.receive(group, PolicyVersion(0, version), deadline).add_done_callback(partial(report, answers))
            answers.say("posted", version)
        elif op == "leave":
            if group is not None:
                group.abort()
            answers.say("left", 0)
        else:
            answers.say("counts", threads_and_files())


def report(answers: Answers, future: Future[Staged]) -> None:
    error = future.exception()
    if isinstance(error, ServiceFault):
        answers.say("fault", error.phase, str(error))
    elif error is not None:
        answers.say("error", repr(error))
    else:
        staged = future.result()
        whole = same(staged.tensors(), staged.version.step)
        staged.release()
        answers.say("staged", staged.version.step, whole)


class Member(Helper):
    def __init__(self, name: str, context: Any = FORKED):
        super().__init__(member, context)
        self.name = name
        self._is_ready = False

    def ready(self) -> None:
        """Return once it serves."""
        if not self._is_ready:
            assert self.hear() == ("ready",)
            self._is_ready = True

    def tell(self, *words: Any) -> None:
        self.ready()
        super().tell(*words)


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
    transport, full_every = transport_and_encoding(transport)
    pending = host(epoch, len(names), "127.0.0.1", backend, timeout, "trainer", transport, folder, full_every, names=names)
    for rank, one in enumerate(members, 1):
        one.tell("join", msgspec.structs.replace(pending.address, rank=rank), one.name)
    group = pending.connect()
    for rank, one in enumerate(members, 1):
        assert one.hear() == ("joined", rank)
    return group


def post(members: list[Member], version: int, deadline: float) -> None:
    for one in members:
        one.tell("receive", version, deadline)
        assert one.hear() == ("posted", version)


def leave(members: list[Member], group: WeightGroup) -> None:
    group.abort()
    for one in members:
        one.tell("leave")
        assert one.hear()[0] == "left"
