"""The rollout role: a generation engine behind an actor, and its part in weight syncs. `python -m services.rollout`."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from runtime.cluster.topology import replicas, takes_turns, unit_of
from runtime.commands import Level, WeightsCommitted
from runtime.config import Config
from runtime.errors import Cancelled, DeadlineExceeded, InvalidMessage, ServiceFault, UserError
from runtime.process import os_process
from runtime.process.waiting import now
from runtime.status import State
from runtime.types import GATEWAY_GROUPS, PolicyVersion
from services import process
from services.blobs import BlobKeeper
from services.model_service import ActorService, Request
from services.rpc import contract

if TYPE_CHECKING:
    from runtime.rollout.engine import RolloutEngine
    from runtime.weights.receiver import WeightReceiver


def make_engine(config: Config, name: str) -> RolloutEngine:
    """Build the engine of the rollout `name`, by its fleet's settings, in seconds; vLLM takes a minute. Raises UserError."""
    from runtime.models.hf_folder import count_experts, read_raw
    from runtime.models.limits import longest_text
    from runtime.process import platform

    (first, node), device = unit_of(name), platform.device()
    settings = replicas(config)[first]
    common: dict[str, Any] = {
        "device": device,
        "dtype": platform.resolve_dtype(settings.dtype, device, config.model.dtype),
        "slots": settings.max_num_seqs,
        "max_model_len": longest_text(config),
        "replays": config.moe.router_replay == "routing",
    }
    if settings.engine == "torch":
        from runtime.rollout.torch.engine import TorchRolloutEngine

        return TorchRolloutEngine(config.model.path, **common)
    from runtime.rollout.vllm.arguments import UnitPlace, require_spread
    from runtime.rollout.vllm.engine import VLLMFollower, VLLMRolloutEngine

    if device.type == "cpu":
        require_spread(settings.parallel, count_experts(read_raw(config.model.path)) > 0)
    host, *ports = os.environ.get(os_process.MEETING, " 0 0").split(" ")
    place = UnitPlace(node, config.network.interface if host else "", host, (int(ports[0]), int(ports[1])))
    return (VLLMFollower if node else VLLMRolloutEngine)(
        config.model.path,
        name=name,
        parallel=settings.parallel,
        place=place,
        engine_args=settings.engine_args,
        swap_timeout=config.weight_sync.commit_timeout,
        sleeps=takes_turns(config) and device.type != "cpu",
        **common,
    )


class RolloutService(ActorService):
    """A request stays open until the engine has finished its group. Weights are staged meanwhile and swapped between steps. All
    processes of an engine over several nodes take part in weight syncs; the first has the requests."""

    role = "rollout"
    libraries = process.TORCH

    def __init__(self, config: Config, name: str, rank: int):
        super().__init__(config, name, unit_of(name)[1])
        self._engine: RolloutEngine
        self.weights: WeightReceiver
        self._level = Level.AWAKE
        self._open: dict[int, Request] = {}
        self._withdrawn: list[int] = []
        self._commit: tuple[Request, float] | None = None  # waits for running sequences since this time
        self._advanced = asyncio.Event()  # set after each step of the engine
        self._tasks: set[asyncio.Task[None]] = set()

    @cached_property
    def _keeper(self) -> BlobKeeper:
        return BlobKeeper(self.config, self.blobs)

    def load(self) -> None:
        first, timeout = unit_of(self.name)[0], self.config.deadlines.start
        spans = replicas(self.config)[first].parallel.nodes > 1
        late = DeadlineExceeded(self.name, "start", f"vLLM's processes of {first} on other nodes did not come", timeout)
        # vLLM waits for the other processes without a deadline of ours.
        timer = threading.Timer(timeout, os_process.end_at_once, (str(late),))
        timer.daemon = True
        if spans:
            timer.start()
        try:
            self.use(make_engine(self.config, self.name))
        finally:
            timer.cancel()

    def use(self, engine: RolloutEngine) -> None:
        from runtime.weights.receiver import WeightReceiver

        shared = replicas(self.config)[unit_of(self.name)[0]].engine == "vllm"
        self._engine, self.torch_thread = engine, engine.thread
        self.weights = WeightReceiver(engine, self.config, self.name, shared=shared, drain=self._drain)

    async def start(self) -> None:
        """Start the actor. A rollout that takes turns with the trainer starts asleep: the coordinator wakes it."""
        if takes_turns(self.config):
            await self._move(Level.ASLEEP)
        await super().start()

    async def close(self) -> None:
        await super().close()
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

    def gauges(self) -> dict[str, float]:
        return {**self._engine.stats().gauges(), "swaps_total": self.weights.swaps, "torn": float(self._engine.torn)}

    async def receive(self, requests: Sequence[Request]) -> None:
        """Handle requests between two steps of the engine: several of `generate`, or one of another method, by its name."""
        method = contract.method_of("Rollout", requests[0].message)
        await getattr(self, method.handler)(*requests)

    async def generate(self, *requests: Request) -> None:
        for request in requests:
            group_id = request.message.group_id
            if group_id in self._open:
                request.fail(InvalidMessage(f"group {group_id} is being generated already"))
                continue
            self._engine.submit([request.message])
            self._open[group_id] = request
            request.future.add_done_callback(partial(self._settled, group_id))

    async def set_level(self, request: Request) -> None:
        await self._move(Level(request.message.level), request.message.keeps)
        request.reply()

    async def join_weights(self, request: Request) -> None:
        self._give_up_commit()
        asked, address = request.message, request.message.address
        own = replace(asked, address=replace(address, rank=address.rank + self.rank * address.workers))
        await self._beside(request, self.weights.join(own, self._require_base))

    async def receive_weights(self, request: Request) -> None:
        await self._beside(request, self.weights.receive(request.message))

    async def init_weight_group(self, request: Request) -> None:
        await self._beside(request, self.weights.host(request.message))

    async def resend_weights(self, request: Request) -> None:
        await self._beside(request, self.weights.resend(request.message))

    async def abort_weights(self, request: Request) -> None:
        if request.message.epoch == self.weights.epoch:
            self._give_up_commit()
        self.weights.leave(request.message.epoch)
        request.reply()

    async def commit_weights(self, request: Request) -> None:
        """Swap the weights between two steps of the engine: at once, or with `drain` in `advance`. Never beside the actor."""
        if not self.weights.needs_swap(request.message):
            request.reply(WeightsCommitted(0.0))
        elif self.config.weight_sync.in_flight == "drain" and self._engine.stats().running:
            self._engine.held = True
            self._commit = request, now()
        else:
            try:
                request.reply(await self._swapped(now()))
            except UserError as error:  # a replacement would fail in the same way
                os_process.end_at_once(str(error), os_process.MISTAKE)

    async def _beside(self, request: Request, work: Coroutine[Any, Any, Any]) -> None:
        """Do `work` beside the actor, then answer the request."""
        task = asyncio.create_task(request.answer(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # The work runs up to its first await: requests change this rollout's epoch in the order of their arrival.
        await asyncio.sleep(0)

    async def advance(self, interrupted: Callable[[], bool]) -> None:
        self._abort_withdrawn()
        for group in await self._engine.advance(lambda: interrupted() or bool(self._withdrawn)):
            request = self._open.pop(group.group_id, None)  # None: withdrawn as it was finished
            if (load := group.load) is not None:
                stats = self._engine.stats()
                load.samples, load.room = stats.running + stats.waiting, stats.kv_room
                load.used = stats.kv_use * stats.kv_shared
            if request is not None and group.group_id < GATEWAY_GROUPS:  # the gateway joins it with others
                request.reply(group)
            elif request is not None:
                await self._beside(request, self._keeper.kept(group))
        self._advanced.set()
        if self._commit is not None and not self._engine.stats().running:
            (request, since), self._commit = self._commit, None
            self._engine.held = False  # also if it was abandoned
            if not request.abandoned:  # by its deadline, or by an abort
                await request.answer(self._swapped(since))

    async def _drain(self) -> None:
        """Wait until no sequence is running. None starts until the next swap."""
        self._engine.held = True
        while self._engine.stats().running:
            self._advanced.clear()
            await self._advanced.wait()  # until the next step of the engine

    async def _swapped(self, since: float) -> WeightsCommitted:
        await self.weights.swap()
        self._engine.held = False
        return WeightsCommitted(now() - since)

    def _require_base(self, base: str) -> None:
        from runtime.models.adapters import require_base

        require_base(base, self.config.model.path)

    def _give_up_commit(self) -> None:
        if self._commit is not None:
            self._commit[0].fail(ServiceFault(self.name, "commit", "was aborted while sequences were still running"))

    def _settled(self, group_id: int, future: asyncio.Future[Any]) -> None:
        if (future.cancelled() or future.exception() is not None) and self._open.pop(group_id, None) is not None:
            self._withdrawn.append(group_id)

    async def _move(self, level: Level, keeps: bool = False) -> None:
        """Reach `level`. Without `keeps`, groups under way end at ASLEEP: the coordinator's withdrawal may arrive later."""
        if level == Level.ASLEEP and not keeps:
            for request in list(self._open.values()):
                request.fail(Cancelled("the rollout was put to sleep"))
            await asyncio.sleep(0)  # the futures' callbacks call `_settled`
            self._abort_withdrawn()
        if level == self._level:
            return
        if level == Level.ASLEEP:
            await self._engine.sleep()
        else:
            await self._engine.wake(cache=level == Level.AWAKE)
        self._level = level

    def _abort_withdrawn(self) -> None:
        self._engine.abort(self._withdrawn)
        self._withdrawn.clear()


if __name__ == "__mp_main__":  # multiprocessing imports this in vLLM's engine, which must not outlive this process
    os_process.follow_parent()
if __name__ == "__main__":
    os_process.lead_children()
    process.main(RolloutService)
