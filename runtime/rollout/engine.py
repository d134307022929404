"""The interface of the generation engines to the rollout service, and their shared parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec import Struct

from runtime import types
from runtime.errors import InvalidMessage, InvariantViolated
from runtime.models.families.adapters import UP
from runtime.types import FinishReason, GeneratedGroup, GroupPayload, GroupRequest, PolicyVersion, Sample, TokenSets, outside

if TYPE_CHECKING:
    import torch


_COUNTERS = ("prefill_tokens", "decode_steps", "busy_seconds", "kv_hits", "kv_misses", "preemptions")
_GAUGES = {"decode_tokens": "tokens_total", **{name: f"{name}_total" for name in _COUNTERS}}


class EngineStats(Struct, kw_only=True, rename=_GAUGES):
    """Counters since the start, and present gauges. They are encoded under the names of a rollout's gauges."""

    running: int = 0
    waiting: int = 0
    slots: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    decode_steps: int = 0
    busy_seconds: float = 0.0
    kv_waiting_bytes: int = 0  # keys and values of conversations that wait for their next turn
    kv_waiting_texts: int = 0
    kv_room: int = 0  # tokens that the texts of conversations that wait may have in the cache
    kv_hits: int = 0  # prompts whose beginning was in the cache
    kv_misses: int = 0  # requests with `keep` whose prompt had no beginning in the cache
    kv_use: float = 0.0  # the part of the room for running sequences that holds keys and values
    kv_shared: bool = False  # whether the room is less than `slots` sequences of the longest length need, and may run out
    preemptions: int = 0  # sequences that lost their keys and values to other sequences, and started anew

    def gauges(self) -> dict[str, float]:
        """Return the gauges of a rollout's status."""
        return {name: float(value) for name, value in msgspec.to_builtins(self).items()}


class RolloutEngine(ABC):
    """Takes tokens and returns tokens. All calls come from one event loop, one at a time except `stage`; `advance` may run
    long. New weights are staged during generation, and `swap` takes them over between two steps."""

    adopts = ""
    """The dtype, by torch's name, of staged tensors that the engine uses in place after a swap. Their memory must stay
    unchanged until the next swap. "" if the engine copies all tensors."""

    thread: Executor | None = None
    """The thread in which the engine computes with torch; None if another process computes."""

    @abstractmethod
    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """Queue groups. Raises InvalidMessage, and queues none, if a group cannot fit the engine's context length."""

    @abstractmethod
    async def advance(self, interrupted: Callable[[], bool]) -> list[GeneratedGroup]:
        """Generate until some groups are finished, and return them; return early, perhaps none, once `interrupted()`."""

    @abstractmethod
    def abort(self, group_ids: Sequence[int]) -> list[int]:
        """Forget groups, waiting or running; return the ids of the groups that the engine had."""

    @property
    @abstractmethod
    def has_work(self) -> bool:
        """Whether `advance` would do any work now."""

    version = PolicyVersion()
    """The version of the weights."""

    held = False
    """While True, no sequence starts, and `advance` returns once the running sequences have finished."""

    torn = False
    """Whether the weights mix two versions, as a swap failed midway. Generation stops until the next swap; running sequences
    then go on."""

    @abstractmethod
    async def stage(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Prepare new weights (Hugging Face names and shapes) for `swap`. They replace weights staged before. May run during
        any other call except itself. `tensors` must stay unchanged until `swap`, and longer if the engine `adopts` them.
        Raises InvalidMessage, and changes nothing; UserError if the device lacks the memory."""

    async def load(self, tensors: Mapping[str, torch.Tensor], first: bool, last: bool) -> None:
        """Load a part of new weights over those in use, in the place of `stage`: the `first` part, others, and the `last`. No
        sequence may run. The engine is `torn` from the first part until `swap`. `tensors` must stay unchanged until the end.
        Raises as `stage` and `swap` do."""
        raise InvariantViolated("this engine does not load a version in parts")

    @abstractmethod
    async def swap(self, version: PolicyVersion, recompute: bool = False) -> None:
        """Take over the staged weights. Raises InvariantViolated, and changes nothing, if no weights are staged. Running
        sequences keep their keys and values or, with `recompute`, get those that the new weights give for their tokens so
        far."""

    @abstractmethod
    async def sleep(self) -> None:
        """Give back the memory of keys and values until `wake`, and more memory if the engine can. No sequence starts, and no
        weights are swapped meanwhile. Running sequences go on after `wake`, with recomputed keys and values."""

    @abstractmethod
    async def wake(self, cache: bool = True) -> None:
        """Take the memory again, and start waiting groups. Without `cache`, leave the memory of keys and values, and the
        groups; weights may then be staged, loaded and swapped."""

    @abstractmethod
    def stats(self) -> EngineStats: ...

    @abstractmethod
    async def close(self) -> None:
        """Free the engine's threads and memory."""


# ----------------------------------------------------------------------------------------------------------------------
# Shared by the rollout engines: which weights and requests are refused, and how finished replies become samples and groups.


def are_adapters(names: Iterable[str]) -> bool:
    """Return whether tensors of these names are adapters, not a model's weights."""
    return any(name.endswith(UP) for name in names)


def misfit(expected: Mapping[str, Sequence[int]], shapes: Mapping[str, Sequence[int]], optional: str = "") -> str | None:
    """Return what is wrong with weights of the names and `shapes`, in one line. Return None if they are as `expected`; the
    tensor `optional` may be missing."""
    missing = sorted(expected.keys() - shapes.keys() - {optional})
    unknown = sorted(shapes.keys() - expected.keys())
    if missing or unknown:
        faults = [f"{what} {', '.join(names[:4])}" for what, names in (("missing", missing), ("unknown", unknown)) if names]
        return f"{len(missing)} tensors missing, {len(unknown)} unknown: {'; '.join(faults)}"
    for name, shape in shapes.items():
        if tuple(shape) != tuple(expected[name]):
            return f"{name} has shape {list(shape)}, must be {list(expected[name])}"
    return None


class EngineGroup:
    """A group in an engine. `samples` [n]: None for a sample that is not finished."""

    load: types.RolloutLoad | None = None  # set by the engine with the first token, if the request says `keep`

    def __init__(self, request: GroupRequest):
        self.request = request
        self.samples: list[Sample | None] = [None] * request.n

    def finish(self, index: int, sample: Sample) -> GeneratedGroup | None:
        """Take sample `index`. With the last sample, return the group's header and encoded payload. Versions never decrease
        along a sample."""
        self.samples[index] = sample
        request, samples = self.request, [each for each in self.samples if each is not None]
        if len(samples) < request.n:
            return None
        return GeneratedGroup(
            group_id=request.group_id,
            prompt_tokens=len(request.prompt),
            response_tokens=[len(each.tokens) for each in samples],
            truncated=sum(each.finish_reason == "length" for each in samples),
            oldest=PolicyVersion.unpack(int(min(each.versions[0] for each in samples))),
            newest=PolicyVersion.unpack(int(max(each.versions[-1] for each in samples))),
            load=self.load,
            payload=types.encode(GroupPayload.of(request.group_id, request.prompt, samples)),
        )


def check_requests(requests: Sequence[GroupRequest], here: Iterable[int], context: int, vocabulary: int) -> None:
    """Check groups. Raises InvalidMessage for one that is already `here`, does not fit, or has invalid sampling parameters."""
    known = set(here)
    for request in requests:
        prompt, sampling = request.prompt, request.sampling
        total = len(prompt) + sampling.max_new_tokens
        faults = {
            "group_id is already here": request.group_id in known,
            f"n is {request.n}, must be at least 1": request.n < 1,
            f"first is {request.first}, must be at least 0": request.first < 0,
            f"max_new_tokens is {sampling.max_new_tokens}, must be at least 1": sampling.max_new_tokens < 1,
            "the prompt is empty": len(prompt) == 0,
            f"prompt and max_new_tokens are {total} tokens, at most {context} fit": total > context,
            f"token ids outside of 0..{vocabulary - 1}": outside(prompt, vocabulary),
            f"temperature is {sampling.temperature}, must be at least 0": not sampling.temperature >= 0,
            f"top_p is {sampling.top_p}, must be above 0 and at most 1": not 0 < sampling.top_p <= 1,
            f"min_p is {sampling.min_p}, must be within 0 and 1": not 0 <= sampling.min_p <= 1,
            f"top_k is {sampling.top_k}, must be at least 0": sampling.top_k < 0,
        }
        for fault, present in faults.items():
            if present:
                raise InvalidMessage(f"group {request.group_id}: {fault}")
        known.add(request.group_id)


def make_sample(
    tokens: np.ndarray, logprobs: np.ndarray, versions: np.ndarray, reason: FinishReason, kept: TokenSets | None = None
) -> Sample:
    """Return a reply whose tokens all come from the model."""
    return Sample(
        tokens=tokens,
        loss_mask=np.ones(len(tokens), np.uint8),
        logprobs=logprobs,
        versions=versions,
        finish_reason=reason,
        kept=kept,
    )
