"""A rollout's part in a weight sync: it joins an epoch's group, receives versions, and swaps in what is committed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from runtime.commands import (
    AbortWeights,
    CommitWeights,
    HostWeights,
    JoinWeights,
    ReceiveWeights,
    ResendWeights,
    WeightsCommitted,
    WeightsReceived,
)
from runtime.config import Config, Publication
from runtime.errors import Cancelled, DeadlineExceeded, InvalidMessage, ServiceFault
from runtime.process import spans
from runtime.process.aio import in_thread
from runtime.process.spans import PUBLICATION
from runtime.types import PolicyVersion
from services.model_service import Request
from services.weight_sending import PeerSender

if TYPE_CHECKING:
    from runtime.rollout.engine import RolloutEngine
    from runtime.weights.group import WeightGroup
    from runtime.weights.plan import Manifest
    from runtime.weights.receiver import Staged, WeightReceiver


# ---- Staging
#
# Where a rollout receives versions, beside the weights that its engine generates with.


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
        self.receiver: WeightReceiver | None = None
        """Of the newest manifest; None before the first."""
        self._adopts = False
        self._staged: Staged | None = None
        self._wanted: object | None = None  # identifies the reception whose version may be swapped in; None after `forget`

    def prepare(self, manifest: Manifest) -> None:
        """Make a receiver for the tensors of `manifest`. Raises InvalidMessage."""
        from runtime.weights.receiver import WeightReceiver

        if self.receiver is None or self.receiver.manifest != manifest:
            self._adopts = any(spec.dtype == self._engine.adopts for spec in manifest.tensors)
            self.receiver = WeightReceiver(manifest, sets=2 if self._adopts else 1, shared=self._shared)

    async def receive(self, group: WeightGroup, version: PolicyVersion, needed: bool) -> WeightsReceived:
        """Receive and verify `version`. Stage it in the engine if it is `needed`. Returns where the time went.

        Raises the errors of the receiver's future, and Cancelled after `forget`.
        """
        assert self.receiver is not None
        wanted = self._wanted = object()
        staged = await asyncio.wrap_future(self.receiver.receive(group, version, self._settings.transfer_timeout))
        before = time.monotonic()
        try:
            if needed and wanted is self._wanted:
                with spans.log.span("stage", PUBLICATION, step=version.step):
                    await self._engine.stage(staged.tensors())
        except BaseException:
            staged.release()
            raise
        if not needed:
            staged.release(held=not self._adopts)
        elif wanted is self._wanted:
            self._staged = staged
        else:
            staged.release()
            raise Cancelled(f"{self._name}: version {version} was withdrawn while it was staged")
        return replace(staged.took, stage_seconds=time.monotonic() - before)

    def taken_over(self) -> None:
        """To be called once the engine has swapped in the version that was received."""
        if self._staged is not None:
            if self._adopts:
                self._staged.adopt()
            else:
                self._staged.release(held=True)
            self._staged = None

    def forget(self) -> None:
        """Give up the version that was received, or is under way: it will not be swapped in. Idempotent."""
        self._wanted = None
        if self._staged is not None:
            self._staged.release()
            self._staged = None


class ReceivingMember:
    """Answers each request when its work is done, beside generation: at most one join, one reception and one commit at once."""

    def __init__(self, engine: RolloutEngine, config: Config, name: str, shared: bool):
        """`shared`: the engine's workers are processes of their own, which read the weights where they were staged."""
        settings = config.publication
        self.staging = Staging(engine, settings, name, shared)
        self.peer_sender = PeerSender(config, name)
        self.epoch = 0  # of the group that this rollout is in, or is about to join
        self.group: WeightGroup | None = None
        self.swaps = 0
        self._engine = engine
        self._settings = settings
        self._folder = config.model.path
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
            self.peer_sender.leave(message.epoch)
            if message.epoch == self.epoch:
                self.leave()
            request.reply()
        elif isinstance(message, HostWeights):
            self._answer(request, self.peer_sender.host(message, self.staging.receiver))
        elif isinstance(message, ResendWeights):
            self._answer(request, self.peer_sender.resend(message))
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
        self._engine.held = False
        if not request.abandoned:
            try:
                await self._swap(request, since)
            except Exception as error:  # noqa: BLE001 - the error goes to whoever sent the request
                request.fail(error)

    def _join(self, request: Request, message: JoinWeights) -> None:
        """Join the group in a thread of its own, so that generation goes on."""
        self.leave()
        self.peer_sender.leave()
        self.epoch = message.address.epoch
        self._answer(request, self._meet(message))

    async def _meet(self, message: JoinWeights) -> None:
        from runtime.models.adapters import require_base
        from runtime.weights import rendezvous

        if base := message.manifest.base:
            await asyncio.to_thread(require_base, base, self._folder)
        epoch, timeout = message.address.epoch, message.address.timeout
        for before in (self._reception, self.peer_sender.sending):
            if before is not None:  # of the epoch before: its group is aborted, but its thread may still use the buckets
                await asyncio.wait({before}, timeout=timeout)
                if not before.done():
                    raise DeadlineExceeded(self._name, "join", "the transfer before has not ended", timeout)
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
            self._engine.held = True
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
