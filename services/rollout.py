"""The rollout role: a generation engine behind an actor, and its part in weight syncs. `python -m services.rollout`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from runtime.cluster.topology import replicas, takes_turns
from runtime.commands import (
    AbortWeights,
    CommitWeights,
    JoinWeights,
    Level,
    Move,
    ReceiveWeights,
    WeightsCommitted,
    WeightsReceived,
)
from runtime.config import Config, Publication
from runtime.errors import Cancelled, DeadlineExceeded, InvalidMessage, ServiceFault
from runtime.process import os_process, spans
from runtime.process.spans import PUBLICATION
from runtime.status import State
from runtime.types import GroupRequest, PolicyVersion
from services import process
from services.models import Actor, Request
from services.rpc import contract
from services.rpc.server import Handler

if TYPE_CHECKING:
    from runtime.rollout.engine import RolloutEngine
    from runtime.weights.group import WeightGroup
    from runtime.weights.plan import Manifest
    from runtime.weights.receiver import Staged, WeightReceiver


# ----------------------------------------------------------------------------------------------------------------------
# A rollout's part in a weight sync: it joins an epoch's group, receives versions, and swaps in what is committed.


class Subscription:
    """Answers each request when its work is done, beside generation: at most one join, one reception and one commit at once."""

    def __init__(self, engine: RolloutEngine, settings: Publication, name: str, shared: bool):
        """`shared`: the engine's workers are processes of their own, which read the weights where they were staged."""
        self.staging = Staging(engine, settings, name, shared)
        self.epoch = 0  # of the group that this rollout is in, or is about to join
        self.group: WeightGroup | None = None
        self.swaps = 0
        self._engine = engine
        self._settings = settings
        self._name = name
        self._received: PolicyVersion | None = None  # verified, and neither committed nor withdrawn
        self._committed: PolicyVersion | None = None
        self._commit: tuple[Request, float] | None = None  # it waits for running sequences since this time
        self._reception: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def handle(self, request: Request) -> None:
        message = request.message
        if isinstance(message, JoinWeights):
            self._join(request, message)
        elif isinstance(message, ReceiveWeights):
            self._receive(request, message)
        elif isinstance(message, CommitWeights):
            await self._commit_weights(request, message)
        elif isinstance(message, AbortWeights):
            if message.epoch == self.epoch:
                self.leave()
            request.reply()
        else:
            raise InvalidMessage(f"a rollout takes no {type(message).__name__}")

    def leave(self) -> None:
        """Leave the group and forget the version that is under way; the engine's weights stay as they are."""
        if self._commit is not None and not self._commit[0].abandoned:
            self._commit[0].fail(ServiceFault(self._name, "commit", "was aborted while sequences were still running"))
        self._received = None
        self.epoch = 0
        if self.group is not None:
            self.group.abort()
            self.group = None
        self.staging.forget()

    async def advanced(self) -> None:
        """To be called whenever the engine has advanced: carry out a commit that waited for running sequences, once none is
        left. A commit that was given up meanwhile, at its deadline or by an abort, is dropped."""
        if self._commit is None or self._engine.stats().running:
            return
        (request, since), self._commit = self._commit, None
        self._engine.hold(False)
        if not request.abandoned:
            try:
                await self._swap(request, since)
            except Exception as error:  # noqa: BLE001 - the error goes to whoever sent the request
                request.fail(error)

    def _join(self, request: Request, message: JoinWeights) -> None:
        """Join the group in a thread of its own, so that generation goes on."""
        self.leave()
        self.epoch = message.address.epoch
        self._answer(request, self._meet(message))

    async def _meet(self, message: JoinWeights) -> None:
        from runtime.weights import rendezvous
        from runtime.weights.sender import in_thread

        epoch, timeout = message.address.epoch, message.address.timeout
        if self._reception is not None:  # of the epoch before: its group is aborted, but its thread may still use the buckets
            await asyncio.wait({self._reception}, timeout=timeout)
            if not self._reception.done():
                raise DeadlineExceeded(self._name, "join", "the reception before has not ended", timeout)
        met = await asyncio.wrap_future(in_thread("join-weights", lambda: rendezvous.join(message.address, self._name)))
        if epoch != self.epoch:  # this rollout was told to leave meanwhile
            met.abort()
            raise Cancelled(f"{self._name}: epoch {epoch} was given up")
        self.group = met
        self.staging.prepare(message.manifest)

    def _receive(self, request: Request, message: ReceiveWeights) -> None:
        if self.group is None or message.epoch != self.epoch:
            raise ServiceFault(self._name, "receive", f"is not a member of the publication group of epoch {message.epoch}")
        if self._reception is not None and not self._reception.done():
            raise ServiceFault(self._name, "receive", "is receiving another version")
        self._reception = self._answer(request, self._take_in(self.group, message))

    async def _take_in(self, group: WeightGroup, message: ReceiveWeights) -> WeightsReceived:
        took = await self.staging.receive(group, message.version, not self._has(message.version))
        if message.epoch != self.epoch:
            raise Cancelled(f"{self._name}: epoch {message.epoch} was given up")
        self._received = message.version
        return took

    def _has(self, version: PolicyVersion) -> bool:
        """Whether the engine has `version` already, which is then sent again for a newcomer."""
        return version == self._committed and not self._engine.torn

    async def _commit_weights(self, request: Request, message: CommitWeights) -> None:
        if self._received != message.version or message.epoch != self.epoch:
            raise ServiceFault(self._name, "commit", f"version {message.version} is not staged")
        now = asyncio.get_running_loop().time()
        if self._has(message.version):
            self._received = None
            request.reply(WeightsCommitted(0.0))
        elif self._settings.in_flight == "drain" and self._engine.stats().running:
            self._engine.hold(True)
            self._commit = request, now
        else:
            await self._swap(request, now)

    async def _swap(self, request: Request, since: float) -> None:
        assert self._received is not None
        with spans.log.span("swap", PUBLICATION, step=self._received.step):
            await self._engine.swap(self._received, self._settings.in_flight == "recompute")
        self._committed, self._received = self._received, None
        self.staging.taken_over()
        self.swaps += 1
        request.reply(WeightsCommitted(asyncio.get_running_loop().time() - since))

    def _answer(self, request: Request, work: Awaitable[Any]) -> asyncio.Task[None]:
        """Do `work` beside the actor, then answer the request."""
        task = asyncio.create_task(request.answer(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class Staging:
    """Receives versions beside the weights in use, so that generation goes on until `RolloutEngine.swap`.

    Used on the event loop, by one reception at a time. The receiver's memory outlives epochs.
    """

    def __init__(self, engine: RolloutEngine, settings: Publication, name: str, shared: bool):
        """`shared`: the engine's workers are processes of their own, which read the weights where they were staged."""
        self._engine = engine
        self._settings = settings
        self._name = name
        self._shared = shared
        self._receiver: WeightReceiver | None = None
        self._adopts = self._copies = False  # something, everything
        self._staged: Staged | None = None
        self._wanted: object | None = None  # identifies the reception whose version may be swapped in; None after `forget`

    def prepare(self, manifest: Manifest) -> None:
        """Make a receiver for the tensors of `manifest`. Raises InvalidMessage."""
        from runtime.weights.receiver import WeightReceiver

        if self._receiver is None or self._receiver.manifest != manifest:
            self._adopts = any(spec.dtype == self._engine.adopts for spec in manifest.tensors)
            self._copies = bool(self._engine.adopts) and not self._adopts
            self._receiver = WeightReceiver(manifest, sets=2 if self._adopts else 1, shared=self._shared)

    async def receive(self, group: WeightGroup, version: PolicyVersion, needed: bool) -> WeightsReceived:
        """Receive and verify `version`. Stage it in the engine if it is `needed`. Returns where the time went.

        Raises the errors of the receiver's future, and Cancelled after `forget`.
        """
        assert self._receiver is not None
        wanted = self._wanted = object()
        copies = needed and self._copies
        reserving = asyncio.ensure_future(self._engine.reserve()) if copies else None
        take_in = self._engine.take_in if copies else None
        receiving = self._receiver.receive(group, version, self._settings.transfer_timeout, take_in)
        staged = await asyncio.wrap_future(receiving)
        before = time.monotonic()
        try:
            if reserving is not None:
                await reserving
            if needed and wanted is self._wanted:
                with spans.log.span("stage", PUBLICATION, step=version.step):
                    await self._engine.stage(staged.tensors())
        except BaseException:
            staged.release()
            raise
        if not needed:
            staged.release()
        elif wanted is self._wanted:
            self._staged = staged
        else:
            staged.release()
            raise Cancelled(f"{self._name}: version {version} was withdrawn while it was staged")
        return replace(staged.took, stage_seconds=staged.took.stage_seconds + time.monotonic() - before)

    def taken_over(self) -> None:
        """To be called once the engine has swapped in the version that was received."""
        if self._staged is not None:
            if self._adopts:
                self._staged.adopt()
            else:
                self._staged.release()
            self._staged = None

    def forget(self) -> None:
        """Give up the version that was received, or is under way: it will not be swapped in. Idempotent."""
        self._wanted = None
        if self._staged is not None:
            self._staged.release()
            self._staged = None


# ----------------------------------------------------------------------------------------------------------------------


def make_engine(config: Config, name: str) -> RolloutEngine:
    """The engine of the rollout `name`, as its fleet has it. Takes seconds, with vLLM up to a minute; raises UserError."""
    from runtime.models.limits import longest_text
    from runtime.process import platform

    settings, device = replicas(config)[name], platform.device()
    dtype = platform.resolve_dtype(settings.dtype, device)
    longest = longest_text(config)
    if settings.engine == "torch":
        from runtime.rollout.torch.engine import TorchRolloutEngine

        return TorchRolloutEngine(
            config.model.path,
            device=device,
            dtype=dtype,
            slots=settings.slots,
            max_model_len=longest,
            kv_for_waiting=settings.kv_for_waiting,
        )
    from runtime.rollout.vllm.engine import VLLMRolloutEngine

    return VLLMRolloutEngine(
        config.model.path,
        name=name,
        device=device,
        dtype=dtype,
        slots=settings.slots,
        max_model_len=longest,
        tensor_parallel=settings.tensor_parallel,
        engine_args=settings.engine_args,
        swap_timeout=config.publication.commit_timeout,
        sleeps=takes_turns(config) and device.type != "cpu",
    )


class RolloutService(process.Service):
    """A request stays open until the engine has finished its group. Weights are staged meanwhile, and swapped between steps."""

    role = "rollout"
    service = "Rollout"
    libraries = process.TORCH

    def __init__(self, config: Config, name: str, rank: int):
        super().__init__(config, name, rank)
        self._engine: RolloutEngine
        self.weights: Subscription
        self._level = Level.AWAKE
        self._actor = Actor(name, self, batch=1024)
        self._open: dict[int, Request] = {}
        self._withdrawn: list[int] = []

    def load(self) -> None:
        self.use(make_engine(self.config, self.name))

    def use(self, engine: RolloutEngine) -> None:
        shared = replicas(self.config)[self.name].engine == "vllm"
        self._engine = engine
        self.weights = Subscription(engine, self.config.publication, self.name, shared)

    async def start(self) -> None:
        """A rollout that takes turns with the trainer starts asleep: the coordinator tells it when it has the devices."""
        if takes_turns(self.config):
            await self._move(Level.ASLEEP)
        self.background = asyncio.create_task(self._actor.run())

    async def close(self) -> None:
        if self.background is not None:
            self.background.cancel()
            await asyncio.gather(self.background, return_exceptions=True)
        if hasattr(self, "_engine"):
            self.weights.leave()
            await self._engine.close()

    @property
    def busy(self) -> bool:
        return self._engine.has_work or bool(self._withdrawn)

    @property
    def version(self) -> PolicyVersion:
        return self._engine.version

    @property
    def state(self) -> State:
        if self._engine.torn:
            return "torn"
        return "ready" if self._level == Level.AWAKE else "asleep"

    def torch_thread(self) -> Executor | None:
        return self._engine.thread

    def gauges(self) -> dict[str, float]:
        stats = self._engine.stats()
        return {
            "running": stats.running,
            "waiting": stats.waiting,
            "slots": stats.slots,
            "tokens_total": stats.decode_tokens,
            "prefill_tokens_total": stats.prefill_tokens,
            "decode_steps_total": stats.decode_steps,
            "busy_seconds_total": stats.busy_seconds,
            "kv_waiting_bytes": stats.kv_waiting_bytes,
            "kv_waiting_texts": stats.kv_waiting_texts,
            "kv_hits_total": stats.kv_hits,
            "kv_misses_total": stats.kv_misses,
            "kv_use": stats.kv_use,
            "kv_shared": float(stats.kv_shared),
            "preemptions_total": stats.preemptions,
            "swaps_total": self.weights.swaps,
            "torn": float(self._engine.torn),
        }

    def handler(self, method: contract.Method) -> Handler:
        return partial(self._actor.send, priority=method.priority)

    async def receive(self, requests: Sequence[Request]) -> None:
        message = requests[0].message
        if isinstance(message, GroupRequest):
            self._submit(requests)
        elif isinstance(message, Move):
            await self._move(Level(message.level))
            requests[0].reply()
        else:
            await self.weights.handle(requests[0])

    async def advance(self, interrupted: Callable[[], bool]) -> None:
        self._abort_withdrawn()
        await self._generate(interrupted)
        await self.weights.advanced()

    async def _generate(self, interrupted: Callable[[], bool]) -> None:
        for group in await self._engine.advance(lambda: interrupted() or bool(self._withdrawn)):
            request = self._open.pop(group.group_id, None)  # None: withdrawn as it was finished
            if request is not None:
                request.reply(group)

    def _submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            group_id = request.message.group_id
            if group_id in self._open:
                request.fail(InvalidMessage(f"group {group_id} is being generated already"))
                continue
            self._engine.submit([request.message])
            self._open[group_id] = request
            request.future.add_done_callback(partial(self._settled, group_id))

    def _settled(self, group_id: int, future: asyncio.Future[Any]) -> None:
        if (future.cancelled() or future.exception() is not None) and self._open.pop(group_id, None) is not None:
            self._withdrawn.append(group_id)

    async def _move(self, level: Level) -> None:
        """Reach `level`. Before it puts a rollout to sleep, the coordinator withdraws all groups that are under way. This
        command may arrive before the withdrawals, so those groups are ended here."""
        if level == self._level:
            return
        if level == Level.ASLEEP:
            for request in list(self._open.values()):
                request.fail(Cancelled("the rollout was put to sleep"))
            await asyncio.sleep(0)  # the requests' futures tell `_settled`
            self._abort_withdrawn()
            await self._engine.sleep()
        else:
            await self._engine.wake(cache=level == Level.AWAKE)
        self._level = level

    def _abort_withdrawn(self) -> None:
        self._engine.abort(self._withdrawn)
        self._withdrawn.clear()


if __name__ == "__mp_main__":  # vLLM's engine is started by multiprocessing, which imports this: it must not outlive us
    os_process.follow_parent()
if __name__ == "__main__":
    os_process.lead_children()
    process.main(RolloutService)
