"""One process of `sluice bench weight_sync`: `python -m benchmarks.weight_sync.trial FOLDER RANK WORLD`.

Rank 0 is the trainer's place, the others are rollouts. It takes JSON lines {"id": N, "what": NAME, ...}, each the call of a
method of `Trial`, and answers each with {"id": N, "answer": ...} or {"id": N, "error": LINE}, not necessarily in order.
Weights are published by the trainer's and the rollouts' own services, without gRPC around them; nobody trains the weights.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import uvloop
import xxhash

from benchmarks.weight_sync.tensors import uneven
from benchmarks.weight_sync.ways import Ways
from runtime.config import Config
from runtime.process import os_process
from runtime.rollout.engine import EngineStats
from runtime.trainer.backend import RankInfo
from runtime.trainer.rank import TrainRank
from runtime.types import PolicyVersion
from runtime.weights.group import Shard
from runtime.weights.plan import Cut, TensorSpec
from services import process
from services.rollout import RolloutService
from services.rpc import contract
from services.trainer import TrainerService

LINE = 16 << 20  # bytes: a manifest is one


class Untrained:
    """In the place of rank `rank` of `ranks` training engines that hold the rows. Its weights are what lies in the sender's
    buckets, so a copy of them takes no time; `Trial.fill` and `Trial.alter` make them, and `Trial.gather` measures what it
    takes otherwise. For encoding `delta`, which compares the two, they lie elsewhere."""

    def __init__(self, specs: Sequence[TensorSpec], rank: int, ranks: int):
        self.backend = self
        self.rank_info = RankInfo(rank, ranks, torch.device("cpu"))
        self._specs = list(specs)
        self.parts: list[Shard] = []

    def tensor_specs(self) -> list[TensorSpec]:
        return self._specs

    def cuts(self) -> list[Cut]:
        ranks = self.rank_info.world_size
        rows = tuple((rank,) for rank in range(ranks))
        return [Cut(rows, 0, -(-spec.shape[0] // ranks)) if ranks > 1 else Cut() for spec in self._specs]

    def shards(self) -> Iterator[Shard]:
        return iter(self.parts)


class Unused:
    """In the place of a generation engine: to take over a version is to look at it, when told to."""

    version = PolicyVersion()
    has_work = torn = False
    adopts = ""
    thread = None

    def __init__(self) -> None:
        self.look = False
        self.digest = 0

    def stats(self) -> EngineStats:
        return EngineStats()

    async def stage(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if self.look:
            self.digest = digest(list(tensors.values()))

    async def swap(self, version: PolicyVersion, recompute: bool = False) -> None:
        self.version = version

    async def close(self) -> None:
        """There is nothing to free."""


class Sender(TrainerService):
    _engine: Any

    def __init__(self, config: Config, specs: Sequence[TensorSpec], rank: int = 0, ranks: int = 1):
        super().__init__(config, f"trainer-{rank}", rank)
        self._specs, self._ranks = specs, ranks

    def load(self) -> None:
        self._engine = Untrained(self._specs, self.rank, self._ranks)
        self._worker = TrainRank(self._engine, self.config)
        delta = self.config.weight_sync.encoding == "delta"
        self._engine.parts = [each._replace(block=each.block.clone()) if delta else each for each in self.buckets()]

    def buckets(self) -> list[Shard]:
        """Return the parts in the buckets, in the manifest's order."""
        pieces = self._worker.sender.buffers._pieces
        return [Shard(index, piece.span, view) for index in sorted(pieces) for _, piece, view in pieces[index]]

    def views(self) -> list[torch.Tensor]:
        return [each.block for each in self.buckets()]

    def weights(self) -> list[torch.Tensor]:
        return [each.block for each in self._engine.shards()]


class Receiver(RolloutService):
    def load(self) -> None:
        self.unused = Unused()
        self.use(self.unused)  # type: ignore[arg-type]


class WeightSyncTrial:
    def __init__(self, folder: Path, rank: int, world_size: int):
        self._folder, self._rank, self._world_size = folder, rank, world_size
        self._ways: Ways
        self._service: process.Service
        self._serving = False

    # ------------------------------------------------------------------------------------------ the plain ways

    async def prepare(self, megabytes: int) -> None:
        specs = uneven(megabytes)
        self._ways = await asyncio.to_thread(Ways, self._rank, self._world_size, self._folder, specs, megabytes)

    async def run(self, way: str) -> tuple[float, float]:
        return await asyncio.to_thread(self._ways.run, way)

    async def forget(self) -> None:
        self._ways.forget()

    async def digest(self) -> int:
        return self._ways.digest()

    async def rates(self, piece: int) -> dict[str, float]:
        return self._ways.rates(piece)

    # ------------------------------------------------------------------------------------------ the weight sync

    async def open(self, config: Any, megabytes: int) -> None:
        """A service that has, or is to have, the tensors."""
        settings = msgspec.convert(config, Config)
        service = Receiver(settings, f"rollout-{self._rank - 1}", 0) if self._rank else Sender(settings, uneven(megabytes))
        await self._serve(service)

    async def call(self, method: str, command: Any) -> Any:
        row = contract.METHODS[self._service.service, method]
        return msgspec.to_builtins(await self._service.handler(row)(msgspec.convert(command, row.command)))

    async def fill(self) -> None:
        """The sender: other weights than before."""
        generator = torch.Generator().manual_seed(len(self._sender.weights()))
        for weight in self._sender.weights():
            weight.view(torch.int16).random_(-(1 << 15), 1 << 15, generator=generator)

    async def alter(self, share: float, seed: int) -> None:
        """The sender: the lowest bit of about `share` of all elements, as a small step of training has it."""
        generator = torch.Generator().manual_seed(seed)
        for weight in self._sender.weights():
            places = torch.randint(weight.numel(), (int(weight.numel() * share),), generator=generator)
            weight.view(torch.int16)[places] ^= 1

    async def sent(self) -> int:
        """The sender: xxh3-64 of its tensors."""
        return digest(self._sender.views())

    async def look(self) -> None:
        """A receiver: take xxh3-64 of what is staged next."""
        self._receiver.unused.look = True

    async def seen(self) -> int:
        """A receiver: what `look` asked for."""
        self._receiver.unused.look = False
        return self._receiver.unused.digest

    async def gather(self) -> float:
        """The sender: seconds in which an engine's float32 masters become the bfloat16 tensors in the buckets."""
        views = self._sender.views()
        masters = [view.float() for view in views]
        seconds = []
        for _ in range(2):  # the first is not counted
            began = time.monotonic()
            for view, master in zip(views, masters, strict=True):
                view.copy_(master)
            seconds.append(time.monotonic() - began)
        return seconds[-1]

    async def close(self) -> None:
        if self._serving:
            await self._service.close()
            self._serving = False
            del self._service

    async def _serve(self, service: process.Service) -> None:
        self._service = service
        await asyncio.to_thread(service.load)
        await service.start()
        self._serving = True

    @property
    def _sender(self) -> Sender:
        assert isinstance(self._service, Sender)
        return self._service

    @property
    def _receiver(self) -> Receiver:
        assert isinstance(self._service, Receiver)
        return self._service


def digest(tensors: Sequence[torch.Tensor]) -> int:
    """xxh3-64 of all in their order."""
    state = xxhash.xxh3_64()
    for tensor in tensors:
        state.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return state.intdigest()


async def serve(trial: Any, say: Callable[[Any], None]) -> None:
    """Carry out orders beside each other until the input ends."""
    under_way: set[asyncio.Task[None]] = set()

    async def carry_out(number: int, what: str, arguments: dict[str, Any]) -> None:
        try:
            say({"id": number, "answer": await getattr(trial, what)(**arguments)})
        except Exception as error:  # noqa: BLE001 - the error goes to whoever gave the order
            say({"id": number, "error": f"{type(error).__name__}: {error}".splitlines()[0]})

    orders = asyncio.StreamReader(limit=LINE)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    while line := await orders.readline():
        order = json.loads(line)
        task = asyncio.create_task(carry_out(order.pop("id"), order.pop("what"), order))
        under_way.add(task)
        task.add_done_callback(under_way.discard)


def speak() -> Callable[[Any], None]:
    """What says a JSON line on the standard output; whatever else is printed there goes to the standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(answer: Any) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    return say


def begin() -> None:
    """To be called first: the process computes with one thread, has the services' event loop, and ends with the process that
    started it."""
    os_process.die_with_parent()
    uvloop.install()
    torch.set_num_threads(1)


def run(trial: Callable[[Path, int, int], WeightSyncTrial]) -> None:
    """The whole of a process whose arguments are FOLDER RANK WORLD."""
    begin()
    folder, rank, world_size = sys.argv[1:]
    asyncio.run(serve(trial(Path(folder), int(rank), int(world_size)), speak()))


if __name__ == "__main__":
    run(WeightSyncTrial)
