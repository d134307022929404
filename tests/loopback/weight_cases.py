"""Weights that a seed determines, members in this process and in others, and what a transfer may leave behind."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial, wraps
from pathlib import Path
from typing import Any

import msgspec
import torch

from runtime.coordinator.pools import RolloutPool
from runtime.coordinator.register import ROLLOUT
from runtime.errors import Cancelled, ServiceFault
from runtime.process import platform
from runtime.process.waiting import in_thread
from runtime.types import PolicyVersion
from runtime.weights.group import Shard
from runtime.weights.plan import GroupAddress, Manifest, TensorSpec
from runtime.weights.receiver import StagedWeights
from runtime.weights.sender import SendBuffers, WeightGroup, join_rendezvous, open_rendezvous
from tests.loopback.ranks import FORKED, Helper, heard

ROOT = Path(__file__).parents[2]
SIMULATED_NPU = ROOT / "tests" / "simulated_npu"

SPECS = (
    TensorSpec("embed", "bfloat16", (50, 128)),
    TensorSpec("bias", "float32", (7,)),
    TensorSpec("scale", "float32", ()),
    TensorSpec("steps", "int64", (3, 5)),
    *(TensorSpec(f"layer.{index}", "float32", (64, 100)) for index in range(8)),
    TensorSpec("tail", "bfloat16", (3,)),
)
MANIFEST = Manifest(SPECS, 48 << 10)  # more buckets than are under way at once

PATIENCE = 60.0  # seconds for what is to happen, on however busy a machine

# Each transport with each encoding; and both, as two receivers are on another machine.
WAYS = ("collective", "shared_memory", "relay", "collective+delta", "shared_memory+delta", "relay+delta")
SOME_WAYS = ("collective+delta", "shared_memory")  # each transport, and an encoding around one
VERSION = PolicyVersion(0, 1)
DEADLINE = 100.0  # seconds that one test may take


def on_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """The test on an event loop of its own, which ends it at its deadline."""

    @wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        async def within() -> None:
            await asyncio.wait_for(test(*arguments, **named), DEADLINE)

        asyncio.run(within())

    return run


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - the test's own deadline ends it
        await asyncio.sleep(0.001)


def come(pool: RolloutPool, rollout: Any) -> None:
    """It is connected, and joins the sync group."""
    pool.register.add(ROLLOUT, rollout)
    pool.register.join(rollout)


def transport_and_encoding(way: str) -> tuple[str, int]:
    """The transport of one of `WAYS`, and `full_every`."""
    transport, _, delta = way.partition("+")
    return transport, 50 if delta else 0


def fill(tensors: list[torch.Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors:
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 100)


def expected(seed: int) -> dict[str, torch.Tensor]:
    tensors = [torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in SPECS]
    fill(tensors, seed)
    return dict(zip((spec.name for spec in SPECS), tensors, strict=True))


def gather(sender: SendBuffers, seed: int) -> None:
    """Another version is in the sender's buckets."""
    sender.begin(PolicyVersion(0, seed), PATIENCE)
    sender.fill(shards_of(expected(seed).values()))


def shards_of(tensors: Iterable[torch.Tensor]) -> list[Shard]:
    """The tensors of a manifest, which one sender holds whole."""
    return [Shard(index, (), tensor) for index, tensor in enumerate(tensors)]


def machines_of(transport: str, senders: int, world_size: int) -> tuple[str, ...]:
    """Where members are that go by `transport`. `relay`: the receivers are on another machine than the senders."""
    if transport == "relay":
        return ("here",) * senders + ("there",) * (world_size - senders)
    return ("here" if transport == "shared_memory" else "",) * world_size


def same(tensors: dict[str, torch.Tensor], seed: int) -> bool:
    want = expected(seed)
    return tensors.keys() == want.keys() and all(
        tensors[name].dtype == want[name].dtype and torch.equal(tensors[name], want[name]) for name in want
    )


def threads_and_files() -> list[int]:
    return [len(list(Path("/proc/self/task").iterdir())), len(list(Path("/proc/self/fd").iterdir()))]


def mappings() -> set[str]:
    """Where memory files of weights are mapped into this process: lines with address and file, so that what a test before left
    to the garbage collector is told from a test's own."""
    return {line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:sluice-weights" in line}


def settles(counts: Callable[[], list[int]], most: list[int]) -> bool:
    """Whether threads that are just ending are gone in time."""
    give_up = time.monotonic() + PATIENCE
    while any(count > limit for count, limit in zip(counts(), most, strict=True)):
        if time.monotonic() > give_up:
            return False
        gc.collect()  # an exception and the frames of its traceback hold each other
        time.sleep(0.01)
    return True


def soon(seconds: float = PATIENCE) -> float:
    return time.monotonic() + seconds


def unhosted(world_size: int = 2, timeout: float = PATIENCE, **more: Any) -> GroupAddress:
    """The address of an epoch before its rendezvous is open."""
    return GroupAddress(**{"epoch": 1, "world_size": world_size, "backend": "gloo", "timeout": timeout, **more})


def connected(
    transport: str, world_size: int = 2, timeout: float = PATIENCE, senders: Sequence[str] = (), workers: int = 1
) -> list[WeightGroup]:
    """The members of one epoch, by rank, all in this process. `workers`: of each rollout."""
    torch.set_num_threads(1)
    transport, full_every = transport_and_encoding(transport)
    first = len(senders) or 1
    machines = machines_of(transport, first, first + (world_size - first) // workers)
    told = {"machines": machines, "full_every": full_every, "senders": first, "workers": workers}
    pending = open_rendezvous(unhosted(world_size, timeout, names=senders, **told), "127.0.0.1", name="trainer")
    names = [*senders, *(f"rollout-{rank}" for rank in range(len(senders), world_size))]
    others = [
        in_thread("join", lambda rank=rank: join_rendezvous(msgspec.structs.replace(pending.address, rank=rank), names[rank]))
        for rank in range(1, world_size)
    ]
    return [pending.connect(), *(other.result(PATIENCE) for other in others)]


def posted(
    staged: StagedWeights, group: WeightGroup | Sequence[WeightGroup], version: PolicyVersion, deadline: float
) -> Future[StagedWeights]:
    """A reception in a thread, which gives the buckets with the version in them. `group`: of each worker, if several."""

    def receive() -> StagedWeights:
        staged.receive([group] if isinstance(group, WeightGroup) else group, version, deadline)
        return staged

    return in_thread(f"receive-{version}", receive)


class Aborts:
    """Epochs of a sender, or several, and two receivers, each of which is left before, or within, its transfer."""

    def __init__(self, transport: str, senders: Sequence[str] = ()) -> None:
        self._transport, self._senders = transport, senders
        self._receivers = [StagedWeights(MANIFEST) for _ in range(2)]
        self._number = 0
        threads, files = threads_and_files()
        for _ in range(2):
            self.one()
        assert settles(threads_and_files, [threads + 2, files + 6])  # torch's own, once for the process
        self.warm = threads_and_files()

    def one(self) -> None:
        first = len(self._senders) or 1
        groups = connected(self._transport, first + 2, senders=self._senders)
        receptions = [
            posted(receiver, group, VERSION, 60.0) for receiver, group in zip(self._receivers, groups[first:], strict=True)
        ]
        self._number += 1
        if self._number % 2:
            for group in groups[:first]:
                group.announce(VERSION)
        for group in groups:
            group.abort()
        for reception in receptions:
            with suppress(ServiceFault, Cancelled):
                reception.result(PATIENCE)  # where a name server is silent, torch takes its time to say that a connection ended


# ------------------------------------------------------------------ receivers in processes of their own
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
    answers, receiver = Answers(connection), StagedWeights(MANIFEST)
    answers.say("ready")
    group: WeightGroup | None = None
    for op, *rest in heard(connection):
        if op == "join":
            group = None
            group = join_rendezvous(*rest)
            answers.say("joined", group.rank)
        elif op == "receive":
            assert group is not None
            version, deadline = rest
            posted(receiver, group, PolicyVersion(0, version), deadline).add_done_callback(partial(report, answers))
            answers.say("posted", version)
        elif op == "leave":
            if group is not None:
                group.abort()
            answers.say("left", 0)
        else:
            answers.say("counts", threads_and_files())


def report(answers: Answers, future: Future[StagedWeights]) -> None:
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
    members: list[Member], epoch: int, timeout: float = PATIENCE, backend: str = "gloo", transport: str = "collective"
) -> WeightGroup:
    for one in members:
        one.ready()
    names = ("trainer", *(one.name for one in members))
    transport, full_every = transport_and_encoding(transport)
    machines = machines_of(transport, 1, len(names))
    told = {"epoch": epoch, "backend": backend, "machines": machines, "full_every": full_every}
    pending = open_rendezvous(unhosted(len(names), timeout, names=names, **told), "127.0.0.1", name="trainer")
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
