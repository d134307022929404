"""The rollout engine over vLLM, which batches and generates in processes of its own.

Sluice splits groups into requests of one sample each. At most `slots` requests are in vLLM at a time, and one more for a probe,
so Sluice can order, hold and withdraw waiting samples. Every token gets the version of the weights that made it: weights are
swapped only while vLLM is paused and all earlier outputs have arrived.

vLLM's cache shares prefixes only among requests of one version: the version is the salt of the cache's keys. A request without
a token at a swap starts anew under the new version. So no sequence begins on keys and values of other weights. Running
sequences keep their own or, with `recompute`, lose all. `GroupRequest.keep` needs nothing more: the cache keeps finished texts
until their room is needed, and drops the least recently used first. A text of two versions has the salt of its first version.

Data-parallel ranks are schedulers of their own, each with a cache. They pause, load and resume together, and die together.

An engine may span nodes. On the first is a `VLLMRolloutEngine`, with the requests. On each other one a `VLLMFollower` starts
vLLM's processes of that node, and stages weights there. A load reaches all workers through vLLM.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from runtime import timeouts
from runtime.commands import Level
from runtime.config import RolloutParallel
from runtime.errors import DeadlineExceeded, InvalidMessage, InvariantViolated, ServiceFault, UserError
from runtime.models.adapters import merged
from runtime.models.forward import dtype_of
from runtime.models.hf_folder import WeightFiles, packs, read_config
from runtime.models.limits import kv_cache_bytes
from runtime.process import os_process, platform
from runtime.process.spans import work
from runtime.rollout.engine import EngineGroup, EngineStats, RolloutEngine, are_adapters, check_requests, make_sample, misfit
from runtime.rollout.vllm.arguments import UnitPlace, as_vllm, check_temperature, sample_seed
from runtime.rollout.vllm.shim import Core, CoreFollower, Output, check_version, prepare_environment
from runtime.rollout.vllm.worker import LOCATIONS, MENDABLE, Location, locate, write_locations
from runtime.types import FinishReason, GeneratedGroup, GroupRequest, PolicyVersion, RolloutLoad, RoutedExperts
from runtime.weights.group import arena

# ---- Shared weights. The weights that vLLM's workers load at the next swap: a whole set in shared memory.

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"

Tensors = Mapping[str, torch.Tensor]


class SharedWeights:
    def __init__(self, files: WeightFiles, tied: bool, dtype: torch.dtype):
        """Prepare for a model. `files`: of its folder; `tied`: whether its head is its embedding; `dtype`: the engine's."""
        self._files, self._is_tied, self._dtype = files, tied, dtype
        self._whole: dict[str, torch.Tensor] = {}  # the result of `_merged`; {} before its first call

    def prepare(self, tensors: Tensors, part: bool = False) -> tuple[list[Location], list[torch.Tensor]]:
        """Return the locations of the weights, and the copies made here, to be kept until the workers have read them. `part`:
        some tensors may be missing. Raises InvalidMessage for a set that is neither whole nor adapters to the folder's."""
        if are_adapters(tensors):
            tensors = self._merged(tensors)
        else:
            self._check(tensors, part)
        # vLLM may keep a converted copy of a tied head, and renews it only if the head is given by its own name.
        head = {_HEAD: tensors[_EMBEDDING]} if self._is_tied and _EMBEDDING in tensors else {}
        return locate({**head, **tensors})

    def _merged(self, adapters: Tensors) -> Tensors:
        """Merge the adapters into the policy's weights, in reused memory. This happens here, during generation: each worker
        would read the whole base, and generation stops while workers load."""
        if not self._whole:
            shapes = self._files.shapes
            dtypes = {name: dtype_of(name, self._dtype) for name in shapes}
            buffers = arena([math.prod(shapes[name]) * dtypes[name].itemsize for name in shapes])
            self._whole = {name: one.view(dtypes[name]).view(shapes[name]) for name, one in zip(shapes, buffers, strict=True)}
        for name, weight in merged(self._files, adapters):
            self._whole[name].copy_(weight)
        return self._whole

    def _check(self, tensors: Tensors, part: bool) -> None:
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        head = {name: shapes[name] for name in shapes if name == _HEAD and self._is_tied}
        expected = {name: shape for name, shape in self._files.shapes.items() if not part or name in shapes}
        fault = misfit(head | expected, shapes, _HEAD if self._is_tied else "")
        if fault:
            raise InvalidMessage(f"weights do not fit the model: {fault}")


_CPU_STEP = 2048  # most tokens that a step computes, unless the longest sequence has more
_CPU_BLOCK = 128  # tokens of a block of vLLM's cache on CPUs
_WEIGHTS, _CACHE = "weights", "kv_cache"  # vLLM's tags for waking
_WITH_CACHE = {Level.ASLEEP: (_WEIGHTS, _CACHE), Level.WEIGHTS: (_CACHE,), Level.AWAKE: ()}
_WORKER = "runtime.rollout.vllm.worker.WeightLoading"
_ALONE, _HERE = RolloutParallel(), UnitPlace()


@dataclass
class _Sequence:
    """A sample in vLLM, or waiting for it."""

    group: EngineGroup
    index: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    experts: list[np.ndarray] = field(default_factory=list)
    rank: int = 0  # the data-parallel rank that has it
    forgotten: bool = False  # a swap dropped its keys and values, which vLLM will report as a preemption


class VLLMRolloutEngine(RolloutEngine):
    """A swap that fails midway leaves weights of two versions: the engine generates nothing until a whole set has arrived."""

    def __init__(
        self,
        model_path: str,
        *,
        name: str,
        device: torch.device,
        dtype: torch.dtype,
        slots: int,
        max_model_len: int,
        parallel: RolloutParallel = _ALONE,
        place: UnitPlace = _HERE,
        engine_args: Mapping[str, Any] | None = None,
        swap_timeout: float,
        sleeps: bool = False,
        worker: str = _WORKER,
        replays: bool = False,
    ):
        """Start vLLM's processes, which takes 10 to 60 s. Must not be called on an event loop.

        `place`: of this process among those of an engine that spans nodes; the start ends once all of them are there.
        `swap_timeout`: seconds for the workers to load weights. `sleeps`: whether `sleep` takes the weights off the device, by
        vLLM's own allocator for accelerators. `worker`: the extension of its workers. `replays`: whether requests may ask for
        the tokens' experts.

        Raises UserError if vLLM is missing or unsupported, refuses an argument, or cannot start, as with an unsupported model
        or too little memory; ServiceFault if an engine that spans nodes cannot start.
        """
        model = json.loads((Path(model_path) / "config.json").read_text(encoding="utf-8"))
        self._shared = SharedWeights(WeightFiles(model_path), bool(model.get("tie_word_embeddings")), dtype)
        self._name = name
        self._context = max_model_len
        self._slots = slots
        self._swap_timeout = swap_timeout
        self._groups: dict[int, EngineGroup] = {}
        self._waiting: deque[_Sequence] = deque()
        self._running: dict[str, _Sequence] = {}  # by vLLM's request id
        self._withdrawn: list[str] = []  # request ids that vLLM still has to forget
        self._finished: list[GeneratedGroup] = []
        self._requests = 0
        self._reported_steps = -1  # the number of steps at the last report of progress
        self._level = Level.AWAKE
        self._sleeps = sleeps
        self._staged: tuple[list[Location], list[torch.Tensor]] | None = None  # locations, and the copies made for them
        self._loaded = False  # whether the last part of a version has been loaded
        self._stats = EngineStats(slots=slots)
        prepare_environment(device.type == "cpu", place.address)
        check_version(replays, parallel.nodes)
        experts = read_config(model_path).experts if replays else None
        self._sparse = sorted(experts.layers) if experts else []  # the layers with experts
        self._data = parallel.data
        own = _arguments(model_path, model, device, dtype, slots, max_model_len, parallel)
        own |= {"worker_extension_cls": worker, "enable_sleep_mode": sleeps, **place.arguments(parallel.nodes)}
        own |= {"enable_return_routed_experts": True} if self._sparse else {}
        self._core: Any = self._started(own, engine_args or {})

    def _started(self, arguments: Mapping[str, Any], engine_args: Mapping[str, Any]) -> Any:
        return Core(arguments, engine_args)

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        check_requests(requests, self._groups, self._context, self._core.vocabulary)
        for request in requests:
            check_temperature(request)
        for request in requests:
            group = self._groups[request.group_id] = EngineGroup(request)
            sequences = [_Sequence(group, index) for index in range(request.n)]
            (self._waiting.extendleft if request.purpose == "probe" else self._waiting.extend)(sequences)

    async def advance(self, interrupted: Callable[[], bool]) -> list[GeneratedGroup]:
        """Feed vLLM and take its outputs. vLLM generates on its own between two calls."""
        started = time.perf_counter()
        self._check_alive()
        await self._flush()
        while self._can_step and not self._finished and not interrupted():
            await self._feed()
            self._report_progress()
            self._record(await self._outputs())
        self._report_progress()
        self._stats.busy_seconds += time.perf_counter() - started
        finished, self._finished = self._finished, []
        return finished

    def _report_progress(self) -> None:
        """Report that the engine's work goes on, with each output while vLLM has requests."""
        if not self._running:
            work.end(self)
            self._reported_steps = -1
        elif self._stats.decode_steps != self._reported_steps:
            self._reported_steps = self._stats.decode_steps
            work.begin(self, "decode")

    @property
    def _can_step(self) -> bool:
        return not (self.torn or self._level < Level.AWAKE) and bool(self._running or (self._waiting and not self.held))

    async def _outputs(self) -> list[Output]:
        self._check_alive()
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
        """Hand over as many samples as there are slots, and one more for a probe, each to the rank with the fewest of them."""
        load = Counter(dict.fromkeys(range(self._data), 0))
        load.update(sequence.rank for sequence in self._running.values())
        while self._waiting and not self.held:
            request = self._waiting[0].group.request
            if len(self._running) >= self._slots + (request.purpose == "probe"):
                break
            sequence = self._waiting.popleft()
            self._requests += 1
            request_id = str(self._requests)
            self._running[request_id] = sequence
            sequence.rank = min(load, key=load.__getitem__)
            load[sequence.rank] += 1
            seed = sample_seed(request.seed, request.first + sequence.index)
            sampling = as_vllm(request.sampling, seed)
            await self._core.add(request_id, request.prompt.tolist(), sampling, str(self.version), sequence.rank)

    async def _flush(self) -> None:
        """Have vLLM forget the withdrawn requests."""
        withdrawn, self._withdrawn = self._withdrawn, []
        if withdrawn:
            await self._core.abort(withdrawn)

    def _record(self, outputs: Iterable[Output]) -> None:
        """Add a step's tokens to their sequences, with the engine's version."""
        packed = self.version.pack()
        stepped = False
        for output in outputs:
            sequence = self._running.get(output.request_id)
            if sequence is None:  # withdrawn meanwhile
                continue
            stepped = True
            if not sequence.tokens:
                group, request = sequence.group, sequence.group.request
                self._stats.prefill_tokens += len(request.prompt) - output.cached
                self._stats.kv_hits += request.keep and output.cached > 0
                self._stats.kv_misses += request.keep and not output.cached
                if request.keep and group.load is None:
                    group.load = RolloutLoad(cached=output.cached, prefill_seconds=output.prefill_seconds)
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
        """Forget requests; the next flush withdraws them from vLLM."""
        self._withdrawn += request_ids
        return [self._running.pop(request_id) for request_id in request_ids]

    @property
    def has_work(self) -> bool:
        return bool(self._can_step or self._finished or self._withdrawn or self._core.dead)

    async def stage(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy the weights to shared memory, unless they are there. The workers read them at the swap."""
        self._staged = None
        self._staged = await asyncio.to_thread(self._shared.prepare, tensors)

    async def load(self, tensors: Mapping[str, torch.Tensor], first: bool, last: bool) -> None:
        """Load a part of new weights. Raises ServiceFault and UserError as `swap` does."""
        self._require_weights()
        locations, copies = await asyncio.to_thread(self._shared.prepare, tensors, True)
        self._loaded = False
        await self._in_time(self._load(locations, first, last, False), "a part")
        self.torn, self._loaded = True, last
        del copies  # only now: the workers have read them

    async def swap(self, version: PolicyVersion, recompute: bool = False) -> None:
        """Take over the staged weights. Raises ServiceFault if a worker fails midway: the engine then waits for another whole
        version. Raises UserError if vLLM's model has other weights."""
        self._require_weights()
        staged, self._staged = self._staged, None
        loaded, self._loaded = self._loaded, False
        if staged is None and not loaded:
            raise InvariantViolated(f"version {version} must be staged before it is swapped in")
        if staged is not None:
            locations, copies = staged
            await self._in_time(self._load(locations, True, True, recompute), f"version {version}")
            del copies  # only now: the workers have read them
        self.version, self.torn = version, False
        if self._level == Level.AWAKE:
            await self._core.resume()  # only after a whole load; otherwise vLLM stays paused until the next swap

    async def _in_time(self, loading: Awaitable[None], what: str) -> None:
        try:
            await asyncio.wait_for(loading, self._swap_timeout)
        except Exception as error:
            self.torn = True
            if isinstance(error, (ServiceFault, UserError)):
                raise
            late = isinstance(error, asyncio.TimeoutError)
            fault = f"{what} was not loaded: {'no answer from vLLM' if late else error}"
            raise (DeadlineExceeded if late else ServiceFault)(self._name, "swap", fault, self._swap_timeout) from error

    def _require_weights(self) -> None:
        self._check_alive()
        if self._level == Level.ASLEEP:
            raise InvariantViolated("weights cannot be swapped while the engine is asleep")

    async def _load(self, locations: Sequence[Location], first: bool, last: bool, recompute: bool) -> None:
        if first:
            work.end(self)  # until the next `_feed`
            self._reported_steps = -1
            if self._level == Level.AWAKE:  # otherwise vLLM is paused, and nothing is running
                await self._core.pause(forget=recompute)  # returns between two of vLLM's steps
            await self._settle(recompute)  # outputs of the old version arrive before the version changes
        # All workers load from shared memory, and answer; `swap_timeout` bounds the wait.
        faults = await self._core.load(locations, first, last)
        if mistakes := [fault.partition(MENDABLE)[2] for fault in faults if MENDABLE in fault]:
            raise UserError(f"model.path: {mistakes[0]}")
        if faults:
            raise RuntimeError("; ".join(faults))

    async def _settle(self, forgotten: bool) -> None:
        """Record what vLLM made before a pause, and take back the samples without a token. `forgotten`: the running sequences
        have lost their keys and values."""
        self._record(await self._core.outstanding())
        for sequence in self._running.values():
            sequence.forgotten = sequence.forgotten or forgotten
        unbegun = self._withdraw([id for id, sequence in self._running.items() if not sequence.tokens])
        self._waiting.extendleft(reversed(unbegun))
        await self._flush()

    async def sleep(self) -> None:
        """Give back the cache's memory; with `sleeps`, also the weights'."""
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
        """Return the statistics. `running` and `waiting` count samples; both count a sample that waits within vLLM.
        `decode_steps` counts vLLM's outputs."""
        load, any_runs = self._core.reported, bool(self._running)  # the load is out of date if nothing runs
        return msgspec.structs.replace(
            self._stats,
            running=len(self._running),
            waiting=len(self._waiting) + any_runs * load.waiting,
            kv_use=any_runs * load.kv_use,
            kv_room=load.room,
            kv_shared=load.room < self._slots * self._context,
        )

    async def close(self) -> None:
        await self._core.close()


class VLLMFollower(VLLMRolloutEngine):
    """The processes of an engine on another node than its requests. It stages weights for this node's workers, which load
    them when the engine on the first node swaps."""

    def __init__(self, model_path: str, *, name: str, **options: Any):
        """Start as VLLMRolloutEngine. This process ends when one of the processes does: then the engine has ended."""
        self._locations = os.memfd_create("sluice-locations")
        os.environ[LOCATIONS] = f"/proc/{os.getpid()}/fd/{self._locations}"  # the workers inherit it
        super().__init__(model_path, name=name, **options)
        self._closes = False
        self._core.when_dead(self._end)

    def _started(self, arguments: Mapping[str, Any], engine_args: Mapping[str, Any]) -> Any:
        return CoreFollower(arguments, engine_args)

    def _end(self) -> None:
        if not self._closes:
            os_process.end_at_once(str(self._death()))

    async def stage(self, tensors: Mapping[str, torch.Tensor]) -> None:
        await super().stage(tensors)
        assert self._staged is not None
        write_locations(self._locations, self._staged[0])
        await asyncio.to_thread(self._core.note)

    async def swap(self, version: PolicyVersion, recompute: bool = False) -> None:
        self._check_alive()  # what is staged stays until the next version is: the workers may not have read it yet
        self.version = version

    async def close(self) -> None:
        self._closes = True
        await super().close()
        os.close(self._locations)


def _arguments(
    path: str,
    model: Mapping[str, Any],
    device: torch.device,
    dtype: torch.dtype,
    slots: int,
    length: int,
    parallel: RolloutParallel,
) -> dict[str, Any]:
    """Return vLLM's arguments for the model and the machine. The data-parallel ranks share `slots`, and one more of a probe."""
    slots = slots // parallel.data + 1  # of a rank: the fewest samples of any rank, and one
    own: dict[str, Any] = {
        "model": path,
        "skip_tokenizer_init": True,
        "dtype": str(dtype).removeprefix("torch."),
        "max_model_len": length,
        "max_num_seqs": slots,
        "tensor_parallel_size": parallel.tensor,
        "pipeline_parallel_size": parallel.pipeline,
        "data_parallel_size": parallel.data,
        "enable_expert_parallel": parallel.expert > 1,
        "logprobs_mode": "processed_logprobs",  # of the distribution sampled from: temperature and filters included
        "disable_log_stats": True,
        "enable_prefix_caching": True,
        "enforce_eager": device.type == "cpu",
        "distributed_executor_backend": "mp" if parallel.devices > 1 else "uni",
    }
    if device.type == "cpu":
        own |= {
            # With a prompt in parts vLLM takes back draws before its last part, which generators of CPUs cannot. It caches
            # prefixes of layers with a recurrent state only in parts.
            "enable_chunked_prefill": False,
            "enable_prefix_caching": packs(model),
            "max_num_batched_tokens": max(_CPU_STEP, length, slots),
            "kv_cache_memory_bytes": _cpu_cache_bytes(model, slots, length, dtype, parallel),
        }
    elif device.type == "npu":
        own |= {"additional_config": {"weight_nz_mode": 0}}  # layout ND: new weights cannot be loaded into FRACTAL_NZ
    return own


def _cpu_cache_bytes(model: Mapping[str, Any], slots: int, length: int, dtype: torch.dtype, parallel: RolloutParallel) -> int:
    """Return the bytes of one worker's cache for `slots` whole sequences of a rank, or its part of half of the machine's free
    memory if that is less. Otherwise vLLM takes a share of the machine's memory, as on accelerators. 1 GiB for models with
    unknown names of sizes."""
    whole = (-(-length // _CPU_BLOCK) + 1) * _CPU_BLOCK
    needed = kv_cache_bytes(model, slots, whole, dtype.itemsize) if "num_attention_heads" in model else 1 << 30
    half = platform.memory(torch.device("cpu")).available // 2
    return min(needed // (parallel.tensor * parallel.pipeline), half // parallel.devices_each)
