"""The rollout engine over vLLM, which batches and generates in processes of its own.

Sluice's part: groups become requests of one sample each, at most `slots` of them in vLLM at a time and one more for a probe, so
that what waits is ours to order, hold and withdraw; and every token is stamped with the version of the weights that made it,
since weights are swapped only while vLLM is paused and all that it gave before is here.

Prefixes are shared by vLLM's cache among requests of one version alone: the version is the salt of the cache's keys. A request
that has no token yet at a swap is begun anew under the new version. So no sequence begins on keys and values of other
weights, and those that are running keep theirs or, with `recompute`, none are left at all. `GroupRequest.keep` asks for
nothing more: that cache keeps whatever has ended until the room is needed, those that were not used for the longest time
leaving first, and a text that two versions computed has the salt of the one that it began under.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from runtime import timeouts
from runtime.commands import Level
from runtime.errors import DeadlineExceeded, InvalidMessage, InvariantViolated, ServiceFault, UserError
from runtime.models.adapters import are_adapters, merged
from runtime.models.families.family import dtype_of
from runtime.models.hf_config import packs, read_config
from runtime.models.hf_weights import WeightFiles, misfit
from runtime.models.limits import kv_cache_bytes
from runtime.process import platform
from runtime.process.spans import work
from runtime.rollout.engine import EngineGroup, EngineStats, RolloutEngine, check_requests, make_sample
from runtime.rollout.vllm.arguments import as_vllm, check_temperature, sample_seed
from runtime.rollout.vllm.shim import Core, Output, check_version, prepare_environment
from runtime.rollout.vllm.worker import MENDABLE
from runtime.types import FinishReason, GeneratedGroup, GroupRequest, PolicyVersion, RoutedExperts
from runtime.weights.group import Location, arena, locate

# ---- Shared weights
#
# What vLLM's workers load at the next swap: a whole set of weights in shared memory.

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"

Tensors = Mapping[str, torch.Tensor]


class SharedWeights:
    def __init__(self, files: WeightFiles, tied: bool, dtype: torch.dtype):
        """`files`: of the model folder. `tied`: whether the model's head is its embedding. `dtype`: the engine's."""
        self._files, self._is_tied, self._dtype = files, tied, dtype
        self._whole: dict[str, torch.Tensor] = {}  # what `_merged` gives; {} before the first time

    def prepare(self, tensors: Tensors) -> tuple[list[Location], list[torch.Tensor]]:
        """Where they lie, and what of them was made here: to be kept until they have been read.

        Raises InvalidMessage for what is no whole set of weights, nor adapters to those of the folder.
        """
        if are_adapters(tensors):
            tensors = self._merged(tensors)
        else:
            self._check(tensors)
        return locate({**self._tied(tensors), **tensors})

    def _merged(self, adapters: Tensors) -> Tensors:
        """The policy, in memory that is used again. It is made here, beside generation: each worker would read all of the base,
        and nothing is generated while they load."""
        if not self._whole:
            shapes = self._files.shapes
            dtypes = {name: dtype_of(name, self._dtype) for name in shapes}
            buffers = arena([math.prod(shapes[name]) * dtypes[name].itemsize for name in shapes])
            self._whole = {name: one.view(dtypes[name]).view(shapes[name]) for name, one in zip(shapes, buffers, strict=True)}
        for name, weight in merged(self._files, adapters):
            self._whole[name].copy_(weight)
        return self._whole

    def _tied(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """The head of a model that ties it to its embedding, by its own name: vLLM may keep a converted copy of it, which it
        renews only when it is told to, and ignores the name otherwise."""
        return {_HEAD: tensors[_EMBEDDING]} if self._is_tied and _EMBEDDING in tensors else {}

    def _check(self, tensors: Tensors) -> None:
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        head = {name: shapes[name] for name in shapes if name == _HEAD and self._is_tied}
        fault = misfit(head | self._files.shapes, shapes, _HEAD if self._is_tied else "")
        if fault:
            raise InvalidMessage(f"weights do not fit the model: {fault}")


_INITIAL = PolicyVersion()
_CPU_STEP = 2048  # tokens that a step computes at most, or those of the longest sequence
_CPU_BLOCK = 128  # tokens of a block of vLLM's cache on CPUs
_WEIGHTS, _CACHE = "weights", "kv_cache"  # vLLM's tags of what it wakes
_WITH_CACHE = {Level.ASLEEP: (_WEIGHTS, _CACHE), Level.WEIGHTS: (_CACHE,), Level.AWAKE: ()}
_WORKER = "runtime.rollout.vllm.worker.WeightLoading"


@dataclass
class _Sequence:
    """A sample that vLLM has, or that waits for it."""

    group: EngineGroup
    index: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    experts: list[np.ndarray] = field(default_factory=list)
    forgotten: bool = False  # its keys and values were taken away by a swap, which vLLM will tell as a preemption


class VLLMRolloutEngine(RolloutEngine):
    """A swap that fails in the middle leaves weights of two versions: nothing is generated until a whole set has arrived."""

    def __init__(
        self,
        model_path: str,
        *,
        name: str,
        device: torch.device,
        dtype: torch.dtype,
        slots: int,
        max_model_len: int,
        tensor_parallel: int = 1,
        engine_args: Mapping[str, Any] | None = None,
        swap_timeout: float,
        sleeps: bool = False,
        version: PolicyVersion = _INITIAL,
        worker: str = _WORKER,
        replays: bool = False,
    ):
        """Starts vLLM's processes: 10 to 60 s. Not to be called on an event loop.

        `swap_timeout`: seconds for the workers to load weights. `sleeps`: whether `sleep` takes the weights off the device, for
        which vLLM has an allocator of its own on accelerators. `worker`: the extension of its workers. `replays`: whether
        requests may ask for the experts that tokens took.

        Raises UserError for a vLLM that is missing or of another version, for arguments that it does not take, and for
        whatever keeps it from starting: a model that it does not support, too little memory.
        """
        model = json.loads((Path(model_path) / "config.json").read_text(encoding="utf-8"))
        self._shared = SharedWeights(WeightFiles(model_path), bool(model.get("tie_word_embeddings")), dtype)
        self._name = name
        self._context = max_model_len
        self._slots = slots
        self._swap_timeout = swap_timeout
        self.version = version
        self._groups: dict[int, EngineGroup] = {}
        self._waiting: deque[_Sequence] = deque()
        self._running: dict[str, _Sequence] = {}  # by vLLM's request id
        self._withdrawn: list[str] = []  # request ids that vLLM does not know yet to be forgotten
        self._finished: list[GeneratedGroup] = []
        self._requests = 0
        self._told = -1  # of the steps, when it was told last that they go on
        self._level = Level.AWAKE
        self._sleeps = sleeps
        self._staged: tuple[list[Location], list[torch.Tensor]] | None = None  # and the copies that some lie in
        self._stats = EngineStats(slots=slots)
        prepare_environment(device.type == "cpu")
        check_version(replays)
        experts = read_config(model_path).experts if replays else None
        self._sparse = sorted(experts.layers) if experts else []  # the layers that have some
        own = _arguments(model_path, model, device, dtype, slots + 1, max_model_len, tensor_parallel)
        own |= {"worker_extension_cls": worker, "enable_sleep_mode": sleeps}
        own |= {"enable_return_routed_experts": True} if self._sparse else {}
        self._core = Core(own, engine_args or {})

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        check_requests(requests, self._groups, self._context, self._core.vocabulary)
        for request in requests:
            check_temperature(request)
        for request in requests:
            group = self._groups[request.group_id] = EngineGroup(request)
            sequences = [_Sequence(group, index) for index in range(request.n)]
            (self._waiting.extendleft if request.purpose == "probe" else self._waiting.extend)(sequences)

    async def advance(self, interrupted: Callable[[], bool]) -> list[GeneratedGroup]:
        """vLLM goes on by itself between two calls; this feeds it and takes what it has made."""
        started = time.perf_counter()
        self._check_alive()
        await self._flush()
        while self._can_step and not self._finished and not interrupted():
            await self._feed()
            self._tell_progress()
            self._record(await self._outputs())
        self._tell_progress()
        self._stats.busy_seconds += time.perf_counter() - started
        finished, self._finished = self._finished, []
        return finished

    def _tell_progress(self) -> None:
        """Its work goes on with each output while vLLM has any."""
        if not self._running:
            work.end(self)
            self._told = -1
        elif self._stats.decode_steps != self._told:
            self._told = self._stats.decode_steps
            work.begin(self, "decode")

    @property
    def _can_step(self) -> bool:
        return not (self.torn or self._level < Level.AWAKE) and bool(self._running or (self._waiting and not self.held))

    async def _outputs(self) -> list[Output]:
        try:
            return await self._core.outputs(timeouts.VLLM_POLL)
        except Exception as error:
            raise self._death() from error

    def _check_alive(self) -> None:
        if self._core.dead:
            raise self._death()

    def _death(self) -> ServiceFault:
        return ServiceFault(self._name, "generate", f"vLLM's engine has died: {self._core.cause}")

    async def _feed(self) -> None:
        """Hand over as many samples as there are slots for; one more where it is a probe's."""
        while self._waiting and not self.held:
            request = self._waiting[0].group.request
            if len(self._running) >= self._slots + (request.purpose == "probe"):
                break
            sequence = self._waiting.popleft()
            self._requests += 1
            request_id = str(self._requests)
            self._running[request_id] = sequence
            seed = sample_seed(request.seed, request.first + sequence.index)
            sampling = as_vllm(request.sampling, seed)
            await self._core.add(request_id, request.prompt.tolist(), sampling, str(self.version))

    async def _flush(self) -> None:
        """Tell vLLM what it is to forget."""
        withdrawn, self._withdrawn = self._withdrawn, []
        if withdrawn:
            await self._core.abort(withdrawn)

    def _record(self, outputs: Iterable[Output]) -> None:
        """Add a step's tokens to their sequences, as those of the version that the engine has."""
        packed = self.version.pack()
        stepped = False
        for output in outputs:
            sequence = self._running.get(output.request_id)
            if sequence is None:  # withdrawn meanwhile
                continue
            stepped = True
            if not sequence.tokens:
                request = sequence.group.request
                self._stats.prefill_tokens += len(request.prompt) - output.cached
                self._stats.kv_hits += request.keep and output.cached > 0
                self._stats.kv_misses += request.keep and not output.cached
            self._stats.preemptions += max(0, output.preemptions - sequence.forgotten)
            sequence.forgotten = False
            self._stats.decode_tokens += len(output.tokens)
            sequence.tokens.extend(output.tokens)
            sequence.logprobs.append(output.logprobs)
            sequence.versions.extend([packed] * len(output.tokens))
            sequence.experts += [] if output.experts is None else [output.experts]
            if output.finish:
                del self._running[output.request_id]
                self._finish(sequence, output.finish)
        self._stats.decode_steps += stepped

    def _finish(self, sequence: _Sequence, reason: str) -> None:
        if reason not in ("stop", "length"):
            raise ServiceFault(self._name, "generate", f"vLLM ended a sequence with {reason!r}")
        known: FinishReason = "stop" if reason == "stop" else "length"
        tokens = np.array(sequence.tokens, np.int32)
        logprobs = np.concatenate(sequence.logprobs)
        group = sequence.group
        sample = make_sample(tokens, logprobs, np.array(sequence.versions, np.int64), known)
        if group.request.sampling.experts_from >= 0 and (taken := sequence.experts):
            sample = msgspec.structs.replace(sample, experts=RoutedExperts.of(np.concatenate(taken)[:, self._sparse]))
        if (finished := group.finish(sequence.index, sample)) is not None:
            del self._groups[finished.group_id]
            self._finished.append(finished)

    def abort(self, group_ids: Sequence[int]) -> list[int]:
        known = [group_id for group_id in group_ids if self._groups.pop(group_id, None)]
        self._waiting = deque(each for each in self._waiting if each.group.request.group_id in self._groups)
        self._withdraw([id for id, each in self._running.items() if each.group.request.group_id not in self._groups])
        return known

    def _withdraw(self, request_ids: Sequence[str]) -> list[_Sequence]:
        """Forget requests; vLLM hears of it with the next flush."""
        self._withdrawn += request_ids
        return [self._running.pop(request_id) for request_id in request_ids]

    @property
    def has_work(self) -> bool:
        return bool(self._can_step or self._finished or self._withdrawn or self._core.dead)

    async def stage(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """The workers read them at the swap, from shared memory, into which they are copied unless they lie there."""
        self._staged = None
        self._staged = await asyncio.to_thread(self._shared.prepare, tensors)

    async def swap(self, version: PolicyVersion, recompute: bool = False) -> None:
        """Raises ServiceFault when a worker fails in the middle: the engine then waits for another whole version; UserError
        when vLLM's model has other weights."""
        self._check_alive()
        if self._level == Level.ASLEEP:
            raise InvariantViolated("weights are swapped while the engine is asleep")
        staged, self._staged = self._staged, None
        if staged is None:
            raise InvariantViolated(f"version {version} is to be swapped in, and is not staged")
        locations, copies = staged
        try:
            await asyncio.wait_for(self._swap(locations, version, recompute), self._swap_timeout)
        except Exception as error:
            self.torn = True
            if isinstance(error, (ServiceFault, UserError)):
                raise
            late = isinstance(error, asyncio.TimeoutError)
            fault = f"version {version} was not loaded: {'no answer from vLLM' if late else error}"
            raise (DeadlineExceeded if late else ServiceFault)(self._name, "swap", fault, self._swap_timeout) from error
        finally:
            del copies  # not before: the workers read them

    async def _swap(self, locations: Sequence[Location], version: PolicyVersion, recompute: bool) -> None:
        work.end(self)  # until it is fed again
        self._told = -1
        if self._level == Level.AWAKE:  # otherwise it stands still, and nothing is running
            await self._core.pause(forget=recompute)
        await self._settle(recompute)
        faults = await self._core.load(locations)
        if mistakes := [fault.partition(MENDABLE)[2] for fault in faults if MENDABLE in fault]:
            raise UserError(f"model.path: {mistakes[0]}")
        if faults:
            raise ServiceFault(self._name, "swap", f"version {version} was not loaded: {'; '.join(faults)}")
        self.version, self.torn = version, False
        if self._level == Level.AWAKE:
            await self._core.resume()

    async def _settle(self, forgotten: bool) -> None:
        """While vLLM stands still: record what it made before, and take back what it has not begun. `forgotten`: the keys and
        values of the others are gone."""
        self._record(await self._core.outstanding())
        for sequence in self._running.values():
            sequence.forgotten = sequence.forgotten or forgotten
        unbegun = self._withdraw([id for id, sequence in self._running.items() if not sequence.tokens])
        self._waiting.extendleft(reversed(unbegun))
        await self._flush()

    async def sleep(self) -> None:
        """With `sleeps` the weights leave the device as well."""
        self._level = Level.ASLEEP
        await (self._core.sleep() if self._sleeps else self._core.pause(forget=True))
        await self._settle(forgotten=True)

    async def wake(self, cache: bool = True) -> None:
        if self._sleeps:
            await self._core.wake(_WITH_CACHE[self._level] if cache else (_WEIGHTS,))
        elif cache:
            await self._core.resume()
        self._level = Level.AWAKE if cache else Level.WEIGHTS

    def stats(self) -> EngineStats:
        """`running` and `waiting` count samples, those that vLLM has and does not run as both; `decode_steps` its outputs."""
        told, any_runs = self._core.told, bool(self._running)  # where nothing runs, what it told last is of before
        return msgspec.structs.replace(
            self._stats,
            running=len(self._running),
            waiting=len(self._waiting) + any_runs * told.waiting,
            kv_use=any_runs * told.kv_use,
            kv_shared=told.room < self._slots * self._context,
        )

    async def close(self) -> None:
        await self._core.close()


def _arguments(
    path: str, model: Mapping[str, Any], device: torch.device, dtype: torch.dtype, slots: int, length: int, ways: int
) -> dict[str, Any]:
    """What vLLM is told of the model, and of how it is to run."""
    own: dict[str, Any] = {
        "model": path,
        "skip_tokenizer_init": True,
        "dtype": str(dtype).removeprefix("torch."),
        "max_model_len": length,
        "max_num_seqs": slots,
        "tensor_parallel_size": ways,
        "logprobs_mode": "processed_logprobs",  # of the distribution sampled from: temperature and filters included
        "disable_log_stats": True,
        "enable_prefix_caching": True,
        "enforce_eager": device.type == "cpu",
        "distributed_executor_backend": "mp" if ways > 1 else "uni",
    }
    if device.type == "cpu":
        own |= {
            # Of a prompt in parts vLLM takes back what was drawn before its last part, which generators of CPUs cannot. Of
            # layers with a recurrent state it caches prefixes in parts alone.
            "enable_chunked_prefill": False,
            "enable_prefix_caching": packs(model),
            "max_num_batched_tokens": max(_CPU_STEP, length, slots),
            "kv_cache_memory_bytes": _cpu_cache_bytes(model, slots, length, dtype, ways),
        }
    return own


def _cpu_cache_bytes(model: Mapping[str, Any], slots: int, length: int, dtype: torch.dtype, ways: int) -> int:
    """The cache of one worker that holds `slots` sequences whole, or half of the machine's free memory when that is less: where
    accelerators give vLLM a share of their memory, it would otherwise take as much of the machine's. 1 GiB where sizes
    have other names."""
    whole = (-(-length // _CPU_BLOCK) + 1) * _CPU_BLOCK
    needed = kv_cache_bytes(model, slots, whole, dtype.itemsize) if "num_attention_heads" in model else 1 << 30
    return min(needed, platform.memory(torch.device("cpu")).available // 2) // ways
