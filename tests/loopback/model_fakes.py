"""Trainer and critic in memory, for the pipeline's real logic: they take the time they are told to take."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from msgspec.structs import replace

from runtime import codec
from runtime.commands import WeightsHosted, WeightsSent
from runtime.ledger import checkpoint
from runtime.types import GroupPayload, PolicyVersion, StepResult, TrainGroup, ValueRequest
from runtime.weights.plan import GroupAddress, Manifest
from tests.loopback.losable import Losable

T = TypeVar("T")

BYTES = 4096  # of one publication
GATHERED = 0.75  # seconds
MANIFEST = Manifest(tensors=(), bucket_bytes=1)
STATE = "state"  # what a model leaves in a checkpoint


def no_time() -> float:
    return 0.0


class Weights:
    """What the trainer has broadcast: receivers wait here for a version."""

    def __init__(self) -> None:
        self._sent: dict[PolicyVersion, asyncio.Event] = {}

    def of(self, version: PolicyVersion) -> asyncio.Event:
        return self._sent.setdefault(version, asyncio.Event())


class FakeModel(Losable):
    """A model under training: carries out commands one after the other, in the order in which they were posted.

    `posted` and `done` are those orders; `done_when_posted[i]` is what was done when command i was posted.
    """

    def __init__(self, apply_seconds: Callable[[], float] = no_time, incarnation: int = 0):
        super().__init__(incarnation)
        self.restored = ""
        self.posted: list[tuple[str, int]] = []
        self.done: list[tuple[str, int]] = []
        self.done_when_posted: list[frozenset[tuple[str, int]]] = []
        self.batches: dict[int, list[TrainGroup]] = {}
        self.events: dict[tuple[str, int], asyncio.Event] = {}
        """Each is set once its command is posted."""
        self.parts: list[str] = []
        """What ranks speak for, where nodes share no folder."""
        self.places: list[tuple[bytes, tuple[int, ...]]] = []
        self._apply_seconds = apply_seconds
        self._last: asyncio.Task[Any] | None = None

    def restore(self, folder: str, place: bytes, incarnation: int) -> Coroutine[Any, Any, None]:
        assert not self.posted  # it is the first command
        self.restored, self.places = folder, [(place, (incarnation,))]
        return self.reached(self._nothing())

    def begin_step(self, step: int) -> Coroutine[Any, Any, None]:
        return self._post("begin", step, lambda: self._nothing())

    def accumulate(self, step: int, groups: list[TrainGroup], last: bool) -> Coroutine[Any, Any, None]:
        self.batches.setdefault(step, []).extend(groups)
        return self._post("accumulate", step, lambda: self._nothing())

    def apply(self, step: int, probes: Sequence[bytes] = ()) -> Coroutine[Any, Any, StepResult]:
        return self._post("apply", step, lambda: self.applied(step))

    def save(self, folder: str, place: bytes, keep: tuple[int, ...]) -> Coroutine[Any, Any, list[str]]:
        self.places.append((place, keep))
        return self._post("save", checkpoint_step(folder), lambda: self.write(Path(folder)))

    def onload(self) -> Coroutine[Any, Any, None]:
        return self._post("onload", 0, lambda: self._nothing())

    def offload(self) -> Coroutine[Any, Any, None]:
        return self._post("offload", 0, lambda: self._nothing())

    async def applied(self, step: int) -> StepResult:
        seconds = self._apply_seconds()
        await asyncio.sleep(seconds)
        return StepResult(metrics=self.metrics(), seconds=seconds)

    def metrics(self) -> dict[str, float]:
        return {"actor/grad_norm": 1.0}

    async def write(self, folder: Path) -> list[str]:
        leave_state(folder, self.name)
        return self.parts

    async def _nothing(self) -> None:
        return None

    def _post(self, name: str, step: int, work: Callable[[], Awaitable[T]]) -> Coroutine[Any, Any, T]:
        command, previous = (name, step), self._last
        self.posted.append(command)
        self.done_when_posted.append(frozenset(self.done))
        if command in self.events:
            self.events[command].set()

        async def in_turn() -> T:
            if previous is not None:
                await asyncio.wait({previous})
            value = await work()
            self.done.append(command)
            return value

        task = self._last = asyncio.ensure_future(in_turn())
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # whoever waited may have gone

        async def answer() -> T:
            return await self.reached(asyncio.shield(task))

        return answer()


def hosted(epoch: int, transport: str, names: Sequence[str]) -> WeightsHosted:
    address = GroupAddress(
        epoch=epoch,
        host="127.0.0.1",
        port=1,
        rank=0,
        world_size=len(names),
        backend="gloo",
        timeout=1.0,
        key=b"",
        transport=transport,
    )
    return WeightsHosted(address, MANIFEST)


class FakeTrainer(FakeModel):
    name = "trainer-0"
    machines = MappingProxyType({"trainer-0": "here"})

    def __init__(self, weights: Weights, apply_seconds: Callable[[], float] = no_time, incarnation: int = 0):
        super().__init__(apply_seconds, incarnation)
        self.calls: list[tuple[str, Any]] = []
        self.probed: dict[int, list[int]] = {}
        """By step, the step of the weights that each probe was sampled with."""
        self._weights = weights

    async def host_weights(self, epoch: int, world_size: int, transport: str, names: Sequence[str]) -> WeightsHosted:
        await self.reached(self._nothing())
        return hosted(epoch, transport, names)

    def apply(self, step: int, probes: Sequence[bytes] = ()) -> Coroutine[Any, Any, StepResult]:
        """What a rollout with other weights than those of `step` says is 1 nat off."""
        self.probed[step] = [int(codec.decode(GroupPayload, probe).samples[0].logprobs[0]) for probe in probes]
        gaps = [float(weights != step) for weights in self.probed[step]]
        return self._post("apply", step, lambda: self._compared(step, gaps))

    async def _compared(self, step: int, gaps: list[float]) -> StepResult:
        return replace(await self.applied(step), probes=gaps)

    def send_weights(self, version: PolicyVersion, epoch: int) -> Coroutine[Any, Any, WeightsSent]:
        return self._post("send_weights", version.step, lambda: self.send(version))

    def resend_weights(self, version: PolicyVersion, epoch: int) -> Coroutine[Any, Any, WeightsSent]:
        return self.send_weights(version, epoch)

    def export(self, folder: str) -> Coroutine[Any, Any, None]:
        return self._post("export", 0, lambda: self._nothing())

    async def abort_weights(self, version: PolicyVersion, epoch: int) -> None:
        await self.reached(self._nothing())
        self.calls.append(("abort", version.step))

    async def send(self, version: PolicyVersion) -> WeightsSent:
        self._weights.of(version).set()
        return WeightsSent(BYTES, 0.0, GATHERED)


class FakeCritic(FakeModel):
    """Its metrics have one of the trainer's names among them, which must not get through."""

    name = "critic-0"

    def __init__(self, apply_seconds: Callable[[], float] = no_time, incarnation: int = 0):
        super().__init__(apply_seconds, incarnation)
        self.asked: list[ValueRequest] = []

    async def values(self, request: ValueRequest) -> bytes:
        self.asked.append(request)
        await self.reached(asyncio.sleep(self._apply_seconds()))
        return b"values of " + request.payload

    def metrics(self) -> dict[str, float]:
        return {"critic/loss": 0.25, "actor/grad_norm": -1.0}


def leave_state(folder: Path, name: str) -> None:
    """In a folder that exists and is empty."""
    assert [*folder.iterdir()] in ([], [folder / checkpoint.CRITIC])
    (folder / STATE).write_text(name)


def checkpoint_step(folder: str) -> int:
    """The step of a checkpoint, of whose temporary folder, or a part of it, this is the name."""
    (step,) = re.findall(r"/\.step-(\d+)\.partial", folder)
    return int(step)
