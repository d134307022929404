"""A rollout's part in a weight sync: it joins an epoch's group, receives versions, and swaps in what is committed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TYPE_CHECKING

from runtime.actor import Request
from runtime.commands import AbortWeights, CommitWeights, JoinWeights, ReceiveWeights, WeightsCommitted
from runtime.config import Publication
from runtime.errors import Cancelled, DeadlineExceeded, InvalidMessage, ServiceFault
from runtime.types import PolicyVersion

if TYPE_CHECKING:
    from runtime.rollout.engine import RolloutEngine
    from runtime.weights.group import WeightGroup
    from runtime.weights.plan import Manifest
    from runtime.weights.receiver import Staged, WeightReceiver


class Subscription:
    """Requests are answered when what they ask for is done, beside generation: at most one join, one reception, one commit."""

    def __init__(self, engine: RolloutEngine, settings: Publication, name: str, shared: bool):
        """`shared`: the engine's workers are processes of their own, which read the weights where they were staged."""
        self.staging = Staging(engine, settings, name, shared)
        self.epoch = 0  # of the group that it is in, or about to join
        self.group: WeightGroup | None = None
        self.swaps = 0
        self._engine = engine
        self._settings = settings
        self._name = name
        self._received: PolicyVersion | None = None  # verified, and neither committed nor withdrawn
        self._committed: PolicyVersion | None = None
        self._commit: tuple[Request, float] | None = None  # waits for running sequences, since then on the loop's clock
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
        """Out of the group, and whatever was on its way is forgotten; the weights stay as they are."""
        if self._commit is not None and not self._commit[0].abandoned:
            self._commit[0].fail(ServiceFault(self._name, "commit", "was aborted while sequences were still running"))
        self._received = None
        self.epoch = 0
        if self.group is not None:
            self.group.abort()
            self.group = None
        self.staging.forget()

    async def advanced(self) -> None:
        """After each time that the engine advanced: swap once no sequence is running any more, unless the commit was given up
        meanwhile: its deadline passed, or it was aborted."""
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
        """Meet the others in a thread of its own: generation goes on."""
        self.leave()
        self.epoch = message.address.epoch
        self._answer(request, self._meet(message))

    async def _meet(self, message: JoinWeights) -> None:
        from runtime.weights import rendezvous
        from runtime.weights.sender import in_thread

        epoch, timeout = message.address.epoch, message.address.timeout
        if self._reception is not None:  # of the epoch before: its group is aborted, but it may still use the buckets
            await asyncio.wait({self._reception}, timeout=timeout)
            if not self._reception.done():
                raise DeadlineExceeded(self._name, "join", "the reception before has not ended", timeout)
        met = await asyncio.wrap_future(in_thread("join-weights", lambda: rendezvous.join(message.address, self._name)))
        if epoch != self.epoch:  # it was told to leave meanwhile
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

    async def _take_in(self, group: WeightGroup, message: ReceiveWeights) -> None:
        await self.staging.receive(group, message.version, not self._has(message.version))
        if message.epoch != self.epoch:
            raise Cancelled(f"{self._name}: epoch {message.epoch} was given up")
        self._received = message.version

    def _has(self, version: PolicyVersion) -> bool:
        """Whether it is sent for a newcomer, and needed by nobody else."""
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
        await self._engine.swap(self._received, self._settings.in_flight == "recompute")
        self._committed, self._received = self._received, None
        self.staging.taken_over()
        self.swaps += 1
        request.reply(WeightsCommitted(asyncio.get_running_loop().time() - since))

    def _answer(self, request: Request, work: Awaitable[None]) -> asyncio.Task[None]:
        """Do `work` beside the actor, then answer the request."""
        task = asyncio.create_task(request.answer(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class Staging:
    """Receives versions beside the weights in use: generation goes on meanwhile, and until `RolloutEngine.swap`.

    Used on the event loop, by one reception at a time. The receiver's memory outlives epochs.
    """

    def __init__(self, engine: RolloutEngine, settings: Publication, name: str, shared: bool):
        """`shared`: the engine's workers are processes of their own, which read the weights where they were staged."""
        self._engine = engine
        self._settings = settings
        self._name = name
        self._shared = shared
        self._receiver: WeightReceiver | None = None
        self._staged: Staged | None = None
        self._wanted: object | None = None  # stands for the reception under way, or what it brought

    def prepare(self, manifest: Manifest) -> None:
        """Have memory for what is sent by `manifest`. Raises InvalidMessage."""
        from runtime.weights.receiver import WeightReceiver

        if self._receiver is None or self._receiver.manifest != manifest:
            self._receiver = WeightReceiver(manifest, sets=2 if self._engine.adopts else 1, shared=self._shared)

    async def receive(self, group: WeightGroup, version: PolicyVersion, needed: bool) -> None:
        """Receive `version` and, if it is `needed`, stage it in the engine; it is verified in any case.

        Raises what the receiver's future does, and Cancelled after `forget`.
        """
        assert self._receiver is not None
        wanted = self._wanted = object()
        staged = await asyncio.wrap_future(self._receiver.receive(group, version, self._settings.transfer_timeout))
        try:
            if needed and wanted is self._wanted:
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

    def taken_over(self) -> None:
        """The engine has swapped in what was received."""
        if self._staged is not None:
            if self._engine.adopts:
                self._staged.adopt()
            else:
                self._staged.release()
            self._staged = None

    def forget(self) -> None:
        """What was received, or is on its way, is not to be swapped in. Idempotent."""
        self._wanted = None
        if self._staged is not None:
            self._staged.release()
            self._staged = None
