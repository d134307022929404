"""The embedded rollout engine: continuous batching over slots, in a thread of its own."""

from __future__ import annotations

import asyncio
import math
import time
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
import torch
from msgspec.structs import replace

from runtime.commands import Level
from runtime.errors import InvariantViolated, UserError
from runtime.models.adapters import HostOffload, merged
from runtime.models.forward import ROUTER_BIAS, cut_by_length, query_rows, ramps, starts, tree_paths
from runtime.models.hf_folder import WeightFiles
from runtime.process import platform
from runtime.process.spans import at
from runtime.rollout.engine import EngineGroup, EngineStats, RolloutEngine, are_adapters, check_requests
from runtime.rollout.torch.decoder import Decoder, KVCache, kv_bytes
from runtime.rollout.torch.decoder_weights import DecoderWeights, require_fit
from runtime.rollout.torch.slots import Prefilled, RowSampling, Slots, as_row, sample, sets_of, streams, to_host
from runtime.types import GeneratedGroup, GroupRequest, PolicyVersion, RolloutLoad, RoutedExperts, Sample, common

# ---- Prefill. Computes several texts at once, packed: whole, or from the point where their keys and values are already known.

SHARED = 16  # least number of common first tokens that are computed once for all texts


class Computed(NamedTuple):
    last: torch.Tensor  # [texts, hidden]: the last layer's output for each text's last token
    keys_values: list[torch.Tensor]  # by text, [layers, parts, heads, its length, width]
    places: list[np.ndarray]  # by text, int64 [its length]: the token's number among the computed ones; -1: known before
    tokens: int  # that were computed


def prefill(decoder: Decoder, texts: Sequence[np.ndarray], begun: Sequence[torch.Tensor] = ()) -> Computed:
    """Compute `texts` (token ids), each behind its first keys and values, `begun` [layers, parts, heads, length, width], which
    cover less than the text. Without them, what all texts begin with, as a system prompt, is computed once."""
    lengths = np.array([len(text) for text in texts])
    shared, before = np.zeros((2, len(texts)), np.int64)
    if begun:
        before[:] = [each.shape[3] for each in begun]
    elif (same := min(common(texts[0][:-1], text[:-1]) for text in texts)) >= SHARED:
        shared[1:] = before[1:] = same
    paths, begins, positions = tree_paths(lengths, shared), starts(lengths), ramps(lengths)
    computed = positions >= np.repeat(before, lengths)
    new = computed if begun else computed[computed]  # of the packed tokens
    asks = np.where(new, np.cumsum(new) - 1, -1)

    def send(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(decoder.device)

    stretches = np.stack([begins, before, lengths - before], 1)
    packing = query_rows(paths, stretches, asks, np.arange(len(asks)), decoder.device)
    kept = torch.empty(decoder.config.layers, len(asks), *decoder.cached, device=decoder.device, dtype=decoder.dtype)
    for begin, each in zip(begins.tolist(), begun, strict=False):
        kept[:, begin : begin + each.shape[3]].copy_(each.permute(0, 3, 1, 2, 4))
    where = slice(None) if new.all() else send(np.flatnonzero(new))
    hidden = decoder.packed(send(np.concatenate(texts)[computed]), send(positions[computed]), packing, (kept, where))
    ways = np.split(paths, begins[1:])
    parts = [kept.index_select(1, send(way)) for way in ways] if shared.any() else kept.split(lengths.tolist(), 1)
    last = hidden.index_select(0, send(asks[paths[begins + lengths - 1]]))
    return Computed(last, [part.permute(0, 2, 3, 1, 4) for part in parts], [asks[way] for way in ways], len(hidden))


# ---- Next weights. The weights of the version that an engine takes over next.

Tensors = Mapping[str, torch.Tensor]


class NextWeights:
    """Prepares the next weights. On CPUs they stay in the memory that received them if that has the engine's dtype. If all of
    it has another dtype, the swap copies it over the weights in use, so there is only one set. Elsewhere they are a copy on the
    device. Adapters alone are merged with the model folder's files; on CPUs that reuses the memory of the version before."""

    def __init__(self, first: DecoderWeights, folder: str):
        """Begin with `first`, the weights in use, of the model `folder`."""
        self._folder = folder
        self._config, self._device, self._dtype = first.config, first.embedding.device, first.embedding.dtype
        self.adopts = str(self._dtype).removeprefix("torch.") if self._device.type == "cpu" else ""
        """The value of `RolloutEngine.adopts`."""
        self.staged: DecoderWeights | Tensors | None = None
        """Decoder weights, or tensors to copy over the weights in use."""
        self._spare: DecoderWeights | None = None  # kept, as new memory is slow on CPUs

    async def stage(self, tensors: Tensors) -> None:
        """Stage weights as `RolloutEngine.stage` does."""
        self.staged = None  # before, so that there is no third set of weights in memory
        self.staged = await asyncio.to_thread(self._prepare, tensors)

    def _prepare(self, tensors: Tensors) -> DecoderWeights | Tensors:
        alone = are_adapters(tensors)
        if not alone:
            require_fit(self._config, tensors)
        if self.adopts and not alone:
            if all(each.dtype != self._dtype for name, each in tensors.items() if not name.endswith(ROUTER_BIAS)):
                return tensors
            return DecoderWeights.adopt(self._config, tensors, self._device, self._dtype)
        try:
            weights = self._spare or DecoderWeights.empty(self._config, self._device, self._dtype)
            self._spare = weights if self.adopts else None
            with platform.beside(self._device):
                weights.load(merged(WeightFiles(self._folder), tensors) if alone else tensors.items())
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"services.rollout.max_num_seqs: a weight sync holds the weights twice on {self._device}, which lacks memory; "
                f"must be lower, or engine vllm ({error})"
            ) from error
        return weights

    def taken(self, before: DecoderWeights, staged: DecoderWeights) -> None:
        """Note that the engine has replaced `before` with `staged`."""
        if staged is self._spare:
            self._spare = before


# ---- Routed. Records the experts of each token, on the host: they travel with the samples that ask for them.


class RoutingRecord:
    """Experts by running sequence and position; L layers with experts, k experts a token. Records nothing without `replays`. A
    token keeps its first experts if its keys and values are recomputed: the tokens after it were sampled with these."""

    def __init__(self, decoder: Decoder, sequences: int, length: int, replays: bool):
        self._decoder, experts = decoder, decoder.config.experts
        self.of: np.ndarray | None = None  # uint8 or uint16 [sequences, length, L, k]
        if replays and experts is not None:
            layers, per_token, count = experts.routes
            self.of = np.zeros((sequences, length, layers, per_token), np.uint8 if count <= 256 else np.uint16)

    def begin(self) -> None:
        """Record what the decoder computes until `taken`."""
        self._decoder.chosen = None if self.of is None else []

    def taken(self) -> np.ndarray:
        """Return the experts of the tokens that were computed, [tokens, L, k]."""
        assert self.of is not None and self._decoder.chosen is not None
        chosen, self._decoder.chosen = self._decoder.chosen, None
        return torch.stack(chosen, 1).cpu().numpy().astype(self.of.dtype)

    def note(self, sequences: np.ndarray, positions: np.ndarray) -> None:
        """Record a step, by each token's sequence and position, int64 [m]."""
        if self.of is not None:
            self.of[sequences, positions] = self.taken()

    def of_texts(self, places: Sequence[np.ndarray]) -> list[np.ndarray | None]:
        """Return for each text, by `places` as in `Computed`, [its length, L, k]; 0 for tokens that were known before."""
        if self.of is None:
            return [None] * len(places)
        taken = np.pad(self.taken(), ((0, 1), (0, 0), (0, 0)))
        return [taken[each] for each in places]


def with_experts(sample: Sample, request: GroupRequest, taken: np.ndarray | None) -> Sample:
    """Return the sample with its experts. `taken` [at least P + R - 1, L, k]: from the prompt's first token on."""
    if taken is None or request.sampling.experts_from < 0:
        return sample
    own = taken[request.sampling.experts_from : len(request.prompt) + len(sample.tokens) - 1]
    return replace(sample, experts=RoutedExperts.of(own.copy()))


# ---- Turn cache. A prefix cache: keys and values of conversations that wait for their next turn, found by their tokens.

SHORTEST = 16  # tokens; a shorter beginning is not used, as most prompts of a run share it by their template


KV_FOR_WAITING = 256 << 20  # bytes of keys and values of conversations that wait for their next turn


class TurnCache:
    """Holds at most `capacity` bytes of keys and values; the least recently used texts leave first.

    A lookup finds the common beginning of a prompt and any text, as keys and values depend only on tokens before them. So a
    text that is the beginning of another text is dropped: a conversation is held once, in its latest state.

    The texts are sorted: the text with the longest common beginning is next to the position where the prompt would be.
    """

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._held: OrderedDict[bytes, torch.Tensor] = OrderedDict()  # by `_key`, the least recently used first
        self._sorted: list[bytes] = []
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._sorted)

    def put(self, text: np.ndarray, keys_values: torch.Tensor) -> None:
        """Copy the keys and values of `text` [length], [layers, parts, heads, length, width], unless above `capacity`."""
        if keys_values.nbytes > self._capacity:
            return
        key = _key(text)
        index = bisect_left(self._sorted, key)
        if index < len(self) and self._sorted[index].startswith(key):
            self._held.move_to_end(self._sorted[index])
            return
        while index and key.startswith(self._sorted[index - 1]):
            index -= 1
            self._drop(self._sorted[index])
        while self.bytes + keys_values.nbytes > self._capacity:
            self._drop(next(iter(self._held)))
        self._sorted.insert(bisect_left(self._sorted, key), key)
        self._held[key] = keys_values.clone(memory_format=torch.contiguous_format)
        self.bytes += keys_values.nbytes

    def longest(self, prompt: np.ndarray, most: int = -1) -> torch.Tensor | None:
        """Return the keys and values of the longest known beginning of `prompt` [P], of at most `most` tokens if not negative:
        [layers, parts, heads, length, width]. The prompt's last token is never included, so that it is computed. None if no
        beginning has `SHORTEST` tokens."""
        if not self._sorted:
            return None
        key = _key(prompt)
        index = bisect_left(self._sorted, key)
        beside = self._sorted[max(0, index - 1) : index + 1]
        length, best = max((common(prompt, np.frombuffer(each, "<i4")), each) for each in beside)
        length = min(length, len(prompt) - 1, most if most >= 0 else length)
        if length < SHORTEST:
            return None
        self._held.move_to_end(best)
        return self._held[best][:, :, :, :length]

    def clear(self) -> None:
        self._held.clear()
        self._sorted.clear()
        self.bytes = 0

    def _drop(self, key: bytes) -> None:
        del self._sorted[bisect_left(self._sorted, key)]
        self.bytes -= self._held.pop(key).nbytes


def _key(tokens: np.ndarray) -> bytes:
    return tokens.astype("<i4").tobytes()


T = TypeVar("T")

# Seconds for which steps go on after a group is done, so that groups leave together: each group that leaves alone wakes every
# process after it. A single reply is an agent's turn, an evaluation or a probe, and a process waits for it.
_COMPANY_SECONDS = 0.03
_COMPANY_OF_ONE_SECONDS = 0.002
_PREFILL_AHEAD = 4  # prompts prefilled beyond those with free slots: one prompt costs nearly as much as a few
_PREFILL_TOKENS = 8192  # of the texts of one prefill, kept beginnings included


class _TorchGroup(EngineGroup):
    admitted = 0  # samples that got a slot, or needed none
    prefilled: Prefilled | None = None


class TorchRolloutEngine(RolloutEngine):
    """Prefills a group's prompt once. Its samples take slots one by one as slots become free, at any step. If a request says
    `keep`, the engine keeps the cached keys and values at the end of a sample. The next turn's prompt begins with them, and
    only its own tokens are computed. A swap drops them: no prompt continues with the keys and values of other weights."""

    def __init__(
        self,
        model_path: str,
        *,
        device: torch.device,
        dtype: torch.dtype,
        slots: int,
        max_model_len: int,
        replays: bool = False,
    ):
        """Load the model. `replays`: whether requests may ask for the tokens' experts. Raises UserError if the model cannot be
        loaded, is too short for `max_model_len`, or the cache does not fit."""
        self._decoder = Decoder.from_pretrained(model_path, device, dtype)
        config = self._decoder.config
        if max_model_len > config.max_positions:
            raise UserError(
                f"data.max_prompt_tokens + sampling.max_new_tokens, or gateway.context: {max_model_len} is more than the "
                f"{config.max_positions} positions of {model_path}"
            )
        self._decoder.reserve_positions(max_model_len)
        self._cache = KVCache(config, slots + 1, max_model_len, device, dtype)
        self._slots = Slots(self._cache, slots + 1, config.vocab_size)  # the last free slot is for a probe
        self._routing = RoutingRecord(self._decoder, slots + 1, max_model_len, replays)
        self._turn_cache = TurnCache(KV_FOR_WAITING)
        self._device = device
        self._next = NextWeights(self._decoder.weights, model_path)
        self.adopts = self._next.adopts
        self._groups: dict[int, _TorchGroup] = {}
        self._waiting: deque[_TorchGroup] = deque()  # groups with samples not admitted yet
        self._finished: list[GeneratedGroup] = []
        self._leave_by = math.inf  # when finished groups leave, on the clock of `perf_counter`
        self._sampling = RowSampling(np.zeros((0, 5), np.float32), device)
        self._sampling_key = b""
        self._stats = EngineStats(slots=slots, kv_room=KV_FOR_WAITING // kv_bytes(config, 1, 1, dtype))
        self._halt = False
        self._level = Level.AWAKE
        self._on_host: HostOffload | None = None  # holds the weights while they are off the device
        self.thread: Executor = ThreadPoolExecutor(1, "rollout-engine")

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        check_requests(requests, self._groups, self._cache.max_length, self._decoder.config.vocab_size)
        for request in requests:
            group = self._groups[request.group_id] = _TorchGroup(request)
            (self._waiting.appendleft if request.purpose == "probe" else self._waiting.append)(group)

    async def advance(self, interrupted: Callable[[], bool]) -> list[GeneratedGroup]:
        await self._in_thread(lambda: self._generate(interrupted))
        finished, self._finished, self._leave_by = self._finished, [], math.inf
        return finished

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Run `work` in the engine's thread. A cancelled caller still waits for it, at most one step, so no work overlaps."""
        future = asyncio.get_running_loop().run_in_executor(self.thread, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            self._halt = True
            while not future.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([future])
            raise
        finally:
            self._halt = False

    def _generate(self, interrupted: Callable[[], bool]) -> None:
        started = time.perf_counter()
        with torch.inference_mode():
            while self._can_step and not self._halt and not interrupted():
                with at("decode"):
                    self._step()
                if time.perf_counter() >= self._leave_by:
                    break
        self._stats.busy_seconds += time.perf_counter() - started

    @property
    def _can_step(self) -> bool:
        return bool(self._slots.count if self.held else self._groups) and self._level == Level.AWAKE

    def _step(self) -> None:
        """Fill the free slots, then decode a token for every active one."""
        slots = self._slots
        while self._waiting and slots.free > (self._waiting[0].request.purpose != "probe") and not self.held:
            self._admit(self._waiting[0])
        slots.close_holes()
        if not slots.count:
            return
        spans = slots.spans()
        inputs, u, params = slots.inputs()
        key = params.tobytes()
        if key != self._sampling_key:
            self._sampling, self._sampling_key = RowSampling(params, self._device), key
        tokens_positions = self._to_device(inputs)
        self._routing.begin()
        logits = self._decoder.decode(tokens_positions[0], tokens_positions[1], self._cache, spans)
        drawn = sample(logits, self._to_device(u), self._sampling)
        tokens, logprobs = to_host(drawn)
        self._routing.note(slots.sequences(), inputs[1])
        done, stopped = slots.record(tokens, logprobs, self.version.pack(), sets_of(drawn.kept))
        self._stats.decode_steps += 1
        self._stats.decode_tokens += len(tokens)
        for slot, met_stop in zip(done.tolist(), stopped.tolist(), strict=True):
            group, index = slots.owner_of(slot)
            if group.request.keep and slots.computed(slot) == self.version.pack():
                text = self._text(slot)
                self._turn_cache.put(text, self._cache.held(slot, len(text)))
            taken = None if self._routing.of is None else self._routing.of[slots.sequences()[slot]]
            self._finish(group, index, with_experts(slots.take(slot, met_stop), group.request, taken))

    def _admit(self, group: _TorchGroup) -> None:
        """Give the next sample of the first waiting group a slot; take it back at once if its first token is also its last."""
        if group.prefilled is None:
            self._prefill()
        prefilled, request, index = group.prefilled, group.request, group.admitted
        assert prefilled is not None
        group.admitted += 1
        if group.admitted == request.n:
            self._waiting.popleft()
            group.prefilled = None
        slot = self._slots.start((group, index), prefilled, index, request.sampling)
        stopped = prefilled.tokens[index] in request.sampling.stop_token_ids
        if stopped or request.sampling.max_new_tokens == 1:
            if request.keep:
                self._turn_cache.put(request.prompt, prefilled.keys_values)
            self._finish(group, index, with_experts(self._slots.take(slot, stopped), request, prefilled.experts))
            return
        self._cache.fill(slot, prefilled.keys_values)
        if self._routing.of is not None:
            self._routing.of[self._slots.sequences()[slot], : len(request.prompt)] = prefilled.experts

    def _prefill(self) -> None:
        """Run the prompts for the free slots, and a few more, and draw all their first tokens."""
        began = time.perf_counter()
        groups, begun = self._next_prompts()
        prompts = [group.request.prompt for group in groups]
        self._routing.begin()
        computed = self._compute(prompts, begun)
        routed = self._routing.of_texts(computed.places)
        self._stats.kv_hits += len(begun)
        self._stats.kv_misses += 0 if begun else sum(group.request.keep for group in groups)
        logits = self._decoder.logits(computed.last)

        counts = [group.request.n for group in groups]
        owner = np.repeat(np.arange(len(groups)), counts)
        params = np.array([as_row(group.request.sampling) for group in groups], np.float32)[owner]
        numbers = [streams(group.request) for group in groups]
        u = self._to_device(np.concatenate([each[:, 0] for each in numbers]))
        drawn = sample(logits.index_select(0, self._to_device(owner)), u, RowSampling(params, self._device))
        tokens, logprobs = to_host(drawn)
        known = [each.shape[3] for each in begun] or [0] * len(groups)
        pace = (time.perf_counter() - began) / computed.tokens  # seconds a token
        sets, version, begin = sets_of(drawn.kept), self.version.pack(), 0
        for group, text, stream, taken, cached in zip(groups, computed.keys_values, numbers, routed, known, strict=True):
            own = slice(begin, begin := begin + group.request.n)
            kept = [sets.get(row) for row in range(own.start, own.stop)]
            if group.request.keep:
                group.load = RolloutLoad(cached=cached, prefill_seconds=pace * (len(group.request.prompt) - cached))
            group.prefilled = Prefilled(text, stream, tokens[own], logprobs[own], version, kept, taken)

    def _compute(self, texts: Sequence[np.ndarray], begun: Sequence[torch.Tensor] = ()) -> Computed:
        computed = prefill(self._decoder, texts, begun)
        self._stats.prefill_tokens += computed.tokens
        return computed

    def _next_prompts(self) -> tuple[list[_TorchGroup], list[torch.Tensor]]:
        """Return the first waiting groups without a prefilled prompt, within the token budget but at least one; also the kept
        beginning of each prompt, or none at all: prompts with and without a kept beginning are never mixed."""
        chosen: list[_TorchGroup] = []
        begun: list[torch.Tensor] = []
        room, ahead, tokens = self._slots.free - 1, _PREFILL_AHEAD, 0
        for group in self._waiting:
            if room <= 0:
                ahead -= 1
            room -= group.request.n - group.admitted
            if ahead < 0:
                break
            if group.prefilled is not None:
                continue
            found = self._turn_cache.longest(group.request.prompt, group.request.sampling.experts_from)
            if chosen and (found is None) == bool(begun):
                continue
            tokens += len(group.request.prompt)
            if chosen and tokens > _PREFILL_TOKENS:
                break
            chosen.append(group)
            begun += [] if found is None else [found]
        return chosen, begun

    def _finish(self, group: _TorchGroup, index: int, done: Sample) -> None:
        if (finished := group.finish(index, done)) is not None:
            del self._groups[finished.group_id]
            company = _COMPANY_SECONDS if group.request.n > 1 else _COMPANY_OF_ONE_SECONDS
            self._leave_by = min(self._leave_by, time.perf_counter() + company)
            self._finished.append(finished)

    def abort(self, group_ids: Sequence[int]) -> list[int]:
        known = [group_id for group_id in group_ids if self._groups.pop(group_id, None)]
        self._waiting = deque(group for group in self._waiting if group.request.group_id in self._groups)
        for slot in self._slots.active():
            if self._slots.owner_of(slot)[0].request.group_id not in self._groups:
                self._slots.release(slot)
        return known

    @property
    def has_work(self) -> bool:
        return bool(self._can_step or self._finished)

    async def stage(self, tensors: Mapping[str, torch.Tensor]) -> None:
        await self._next.stage(tensors)

    async def swap(self, version: PolicyVersion, recompute: bool = False) -> None:
        """Take over the staged weights. Waiting groups prefill their prompts again in any case."""
        if self._level == Level.ASLEEP:
            raise InvariantViolated("weights cannot be swapped while the engine is asleep")
        staged, self._next.staged = self._next.staged, None
        if staged is None:
            raise InvariantViolated(f"version {version} must be staged before it is swapped in")

        # Outside the engine's thread, which is idle: on a busy machine a hop there and back can take longer than a step.
        if isinstance(staged, DecoderWeights):
            self._next.taken(self._decoder.weights, staged)
            self._decoder.weights = staged
        else:
            await self._in_thread(lambda: self._decoder.weights.load(staged.items()))
        self.version = version
        self._turn_cache.clear()
        for group in self._waiting:
            group.prefilled = None
        if recompute and self._level == Level.AWAKE:  # otherwise `wake` recomputes
            await self._in_thread(self._recompute)

    @torch.inference_mode()
    def _recompute(self) -> None:
        """Recompute the cache of the running sequences: all tokens but the newest, which the next step takes."""
        slots = self._slots
        active = slots.active()
        texts = [self._text(slot) for slot in active]
        for batch in cut_by_length([len(text) for text in texts], _PREFILL_TOKENS):
            for index, keys_values in zip(batch, self._compute([texts[index] for index in batch]).keys_values, strict=True):
                self._cache.fill(active[index], keys_values)
                slots.recomputed(active[index], self.version.pack())

    def _text(self, slot: int) -> np.ndarray:
        """Return the tokens of a slot's sequence whose keys and values the cache holds."""
        return np.concatenate((self._slots.owner_of(slot)[0].request.prompt, self._slots.cached(slot)))

    async def sleep(self) -> None:
        """Give back the memory. On accelerators the weights move to the host."""
        for group in self._waiting:
            group.prefilled = None
        self._level = Level.ASLEEP
        await self._in_thread(self._release)

    def _release(self) -> None:
        self._cache.release()
        self._turn_cache.clear()
        if not self.adopts and self._on_host is None:
            self._on_host = HostOffload(self._decoder.weights.tensors())
            self._on_host.offload()
        platform.release(self._device)

    async def wake(self, cache: bool = True) -> None:
        await self._in_thread(lambda: self._restore(cache))
        self._level = Level.AWAKE if cache else Level.WEIGHTS

    def _restore(self, cache: bool) -> None:
        if self._on_host is not None:
            self._on_host.onload()
            self._on_host = None
        if cache:
            self._cache.restore()
            self._recompute()

    def stats(self) -> EngineStats:
        """Return the statistics. `running` and `waiting` count samples."""
        waiting = sum(group.request.n - group.admitted for group in self._waiting)
        return msgspec.structs.replace(
            self._stats,
            running=self._slots.count,
            waiting=waiting,
            kv_use=self._slots.tokens / (self._slots.size * self._cache.max_length),
            kv_waiting_bytes=self._turn_cache.bytes,
            kv_waiting_texts=len(self._turn_cache),
        )

    async def close(self) -> None:
        """End the thread; the memory goes with the last reference to the engine."""
        await asyncio.get_running_loop().run_in_executor(None, self.thread.shutdown)

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)
