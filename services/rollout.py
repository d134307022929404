"""The rollout role: a generation engine behind an actor. `python -m services.rollout`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from runtime import os_process
from runtime.actor import Letter
from runtime.commands import AbortWeights, Cancel, CommitWeights, JoinWeights, ReceiveWeights, WeightsCommitted
from runtime.config import Config
from runtime.errors import Cancelled, InvalidMessage, ServiceFault
from runtime.topology import replicas
from runtime.types import GroupRequest, PolicyVersion
from services import process

if TYPE_CHECKING:
    from runtime.engines.rollout_base import RolloutEngine
    from runtime.weights.group import WeightGroup
    from runtime.weights.receiver import Staged, WeightReceiver


def make_engine(config: Config, name: str) -> RolloutEngine:
    """The engine of the rollout `name`, as its fleet has it. Takes seconds, with vLLM up to a minute; raises UserError."""
    from runtime import platform

    settings, device = replicas(config)[name], platform.device()
    dtype = platform.resolve_dtype(settings.dtype, device)
    longest = config.data.max_prompt_tokens + max(config.sampling.max_new_tokens, config.evaluation.max_new_tokens)
    if settings.engine == "torch":
        from runtime.engines.rollout_torch import TorchRolloutEngine

        path, slots = config.model.path, settings.slots
        return TorchRolloutEngine(path, device=device, dtype=dtype, slots=slots, max_model_len=longest)
    from runtime.engines.rollout_vllm import VLLMRolloutEngine

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
    )


class RolloutService(process.Service):
    """Letters of groups stay open until the engine has finished them; weights are staged beside it and swapped in between."""

    role = "rollout"
    service = "Rollout"
    batch = 1024

    def __init__(self, config: Config, name: str, rank: int):
        super().__init__(config, name, rank)
        self._engine: RolloutEngine
        self._group: WeightGroup | None = None
        self._receiver: WeightReceiver | None = None
        self._staged: Staged | None = None
        self._epoch = 0  # of the group that it is in, or about to join
        self._committed: PolicyVersion | None = None
        self._commit: tuple[Letter, float] | None = None  # waits for running sequences, since then on the loop's clock
        self._open: dict[int, Letter] = {}
        self._withdrawn: list[int] = []
        self._swaps = 0

    def load(self) -> None:
        self._engine = make_engine(self.config, self.name)

    async def close(self) -> None:
        self._leave()
        if hasattr(self, "_engine"):
            await self._engine.close()

    @property
    def busy(self) -> bool:
        return self._engine.has_work or bool(self._withdrawn)

    @property
    def version(self) -> PolicyVersion:
        return self._engine.version

    def gauges(self) -> dict[str, float]:
        stats = self._engine.stats()
        return {
            "running": stats.running,
            "waiting": stats.waiting,
            "slots": stats.slots,
            "tokens_total": stats.decode_tokens,
            "prefill_tokens_total": stats.prefill_tokens,
            "busy_seconds_total": stats.busy_seconds,
            "swaps_total": self._swaps,
        }

    async def receive(self, letters: Sequence[Letter]) -> None:
        message = letters[0].message
        if isinstance(message, GroupRequest):
            self._submit(letters)
        else:
            await self._control(letters[0], message)

    async def advance(self, interrupted: Callable[[], bool]) -> None:
        if self._withdrawn:
            self._engine.abort(self._withdrawn)
            self._withdrawn.clear()
        for group in await self._engine.advance(interrupted):
            letter = self._open.pop(group.group_id, None)  # None: withdrawn as it was finished
            if letter is not None:
                letter.reply(group)
        if self._commit is not None:
            await self._commit_once_drained(*self._commit)

    def _submit(self, letters: Sequence[Letter]) -> None:
        for letter in letters:
            group_id = letter.message.group_id
            if group_id in self._open:
                letter.fail(InvalidMessage(f"group {group_id} is being generated already"))
                continue
            self._engine.submit([letter.message])
            self._open[group_id] = letter
            letter.future.add_done_callback(partial(self._settled, group_id))

    def _settled(self, group_id: int, future: asyncio.Future[Any]) -> None:
        if (future.cancelled() or future.exception() is not None) and self._open.pop(group_id, None) is not None:
            self._withdrawn.append(group_id)

    async def _control(self, letter: Letter, message: Any) -> None:
        if isinstance(message, Cancel):
            for group_id in message.group_ids:
                if group_id in self._open:
                    self._open[group_id].fail(Cancelled(f"group {group_id} was cancelled"))
            letter.reply()
        elif isinstance(message, JoinWeights):
            self._join(letter, message)
        elif isinstance(message, ReceiveWeights):
            self._receive_weights(letter, message)
        elif isinstance(message, CommitWeights):
            await self._commit_weights(letter, message)
        elif isinstance(message, AbortWeights):
            if message.epoch == self._epoch:
                self._leave()
            letter.reply()
        else:
            raise InvalidMessage(f"a rollout takes no {type(message).__name__}")

    def _join(self, letter: Letter, message: JoinWeights) -> None:
        """Meet the others in a thread of its own: generation goes on."""
        from runtime.weights import group
        from runtime.weights.sender import in_thread

        self._leave()
        self._epoch = message.address.epoch
        loop = asyncio.get_running_loop()

        def done(future: Future[WeightGroup]) -> None:
            loop.call_soon_threadsafe(self._joined, letter, message, future)

        in_thread("join-weights", lambda: group.join(message.address, self.name)).add_done_callback(done)

    def _joined(self, letter: Letter, message: JoinWeights, future: Future[WeightGroup]) -> None:
        from runtime.weights.receiver import WeightReceiver

        error = future.exception()
        if error is not None:
            letter.fail(error if isinstance(error, Exception) else ServiceFault(self.name, "join", repr(error)))
        elif message.address.epoch != self._epoch:  # it was told to leave meanwhile
            future.result().abort()
            letter.fail(Cancelled(f"{self.name}: epoch {message.address.epoch} was given up"))
        else:
            # vLLM's workers are processes of their own, which read the weights where they were staged.
            shared = replicas(self.config)[self.name].engine == "vllm"
            self._group, self._receiver = future.result(), WeightReceiver(message.manifest, shared=shared)
            letter.reply()

    def _leave(self) -> None:
        if self._commit is not None and not self._commit[0].abandoned:
            self._commit[0].fail(ServiceFault(self.name, "commit", "was aborted while sequences were still running"))
        self._staged = None
        self._epoch = 0
        if self._group is not None:
            self._group.abort()
            self._group = self._receiver = None

    def _receive_weights(self, letter: Letter, message: ReceiveWeights) -> None:
        if self._receiver is None or self._group is None or message.epoch != self._epoch:
            raise ServiceFault(self.name, "receive", f"is not a member of the publication group of epoch {message.epoch}")
        loop = asyncio.get_running_loop()

        def done(future: Future[Staged]) -> None:
            loop.call_soon_threadsafe(self._received, letter, message.epoch, future)

        receiving = self._receiver.receive(self._group, message.version, self.config.publication.transfer_timeout)
        receiving.add_done_callback(done)

    def _received(self, letter: Letter, epoch: int, future: Future[Staged]) -> None:
        error = future.exception()
        if error is not None:
            letter.fail(error if isinstance(error, Exception) else ServiceFault(self.name, "receive", repr(error)))
        elif epoch != self._epoch:
            letter.fail(Cancelled(f"{self.name}: epoch {epoch} was given up"))
        else:
            self._staged = future.result()
            letter.reply()

    async def _commit_weights(self, letter: Letter, message: CommitWeights) -> None:
        if self._staged is None or self._staged.version != message.version or message.epoch != self._epoch:
            raise ServiceFault(self.name, "commit", f"version {message.version} is not staged")
        now = asyncio.get_running_loop().time()
        if message.version == self._committed:  # sent once more, for a newcomer
            self._staged.release()
            self._staged = None
            letter.reply(WeightsCommitted(0.0))
            return
        if self.config.publication.in_flight == "drain" and self._engine.stats().running:
            self._engine.hold(True)
            self._commit = letter, now
        else:
            await self._swap(letter, now)

    async def _commit_once_drained(self, letter: Letter, since: float) -> None:
        """Swap once no sequence is running any more, unless the commit was given up meanwhile: its deadline passed, or it was
        aborted."""
        if self._engine.stats().running:
            return
        self._commit = None
        self._engine.hold(False)
        if not letter.abandoned:
            try:
                await self._swap(letter, since)
            except Exception as error:  # noqa: BLE001 - the error goes to whoever sent the letter
                letter.fail(error)

    async def _swap(self, letter: Letter, since: float) -> None:
        assert self._staged is not None
        recompute = self.config.publication.in_flight == "recompute"
        await self._engine.swap(self._staged.tensors(), self._staged.version, recompute)
        self._committed = self._staged.version
        self._staged.release()
        self._staged = None
        self._swaps += 1
        letter.reply(WeightsCommitted(asyncio.get_running_loop().time() - since))


if __name__ == "__mp_main__":  # vLLM's engine is started by multiprocessing, which imports this: it must not outlive us
    os_process.follow_parent()
if __name__ == "__main__":
    os_process.lead_children()
    process.main(RolloutService)
