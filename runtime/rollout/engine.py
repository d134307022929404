"""What the rollout service asks of a generation engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from runtime.types import GeneratedGroup, GroupRequest, PolicyVersion

if TYPE_CHECKING:
    import torch


class EngineStats(Struct, kw_only=True):
    """Counters since the start, and gauges of now."""

    running: int = 0
    waiting: int = 0
    slots: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    decode_steps: int = 0
    busy_seconds: float = 0.0


class RolloutEngine(ABC):
    """Token in, token out. Called on one event loop, one call at a time but for `stage`; `advance` may run long.

    New weights are staged beside generation, and `swap` takes them over between two steps.
    """

    adopts = False
    """Whether the engine generates from the staged memory itself after a swap, which must stay unchanged until the next one."""

    @abstractmethod
    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """Queue groups. Raises InvalidMessage, queueing nothing, when one cannot fit the engine's context length."""

    @abstractmethod
    async def advance(self, interrupted: Callable[[], bool]) -> list[GeneratedGroup]:
        """Generate until some groups are finished, and return those; return early, perhaps empty, once `interrupted()`."""

    @abstractmethod
    def abort(self, group_ids: Sequence[int]) -> list[int]:
        """Forget groups, waiting or running; returns those that were known."""

    @property
    @abstractmethod
    def has_work(self) -> bool:
        """Whether `advance` would do something now."""

    @property
    @abstractmethod
    def version(self) -> PolicyVersion: ...

    @abstractmethod
    def hold(self, held: bool) -> None:
        """While held, no sequence is begun, and `advance` returns once those that are running have finished."""

    torn = False
    """Whether the weights are of no version, as a swap failed in the middle. Nothing is generated until another swap; what was
    running goes on then."""

    @abstractmethod
    async def stage(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Prepare new weights (Hugging Face names and shapes) for `swap`, in place of those staged before.

        May run beside every other call; not beside itself. `tensors` must stay unchanged until `swap`, and longer where the
        engine `adopts`. Raises InvalidMessage, changing nothing; UserError when the device has not the memory.
        """

    @abstractmethod
    async def swap(self, version: PolicyVersion, recompute: bool = False) -> None:
        """Take over the weights that were staged. Raises InvariantViolated, changing nothing, when none were.

        Running sequences go on with the keys and values that they have or, with `recompute`, with those that the new weights
        give their tokens so far.
        """

    @abstractmethod
    async def sleep(self) -> None:
        """Give back the memory of keys and values, and of more where the engine can, until `wake`. Nothing may be running;
        nothing is begun, and no weights are swapped meanwhile. Raises InvariantViolated, changing nothing."""

    @abstractmethod
    async def wake(self, cache: bool = True) -> None:
        """Take the memory again; groups that waited are begun. Without `cache` that of keys and values is left, and so are
        groups: weights may be staged, loaded and swapped."""

    @abstractmethod
    def stats(self) -> EngineStats: ...

    @abstractmethod
    async def close(self) -> None:
        """Free the engine's threads and memory."""
