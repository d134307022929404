"""The embedded rollout engine's record of its running sequences: plain arrays on the host.

The device holds only the key-value cache. A step sends two small arrays to the device and fetches one back. All else is host
arithmetic, so a slot can be refilled or moved without a query to the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from runtime.rollout.engine import make_sample
from runtime.rollout.torch.decoder import LENGTH_STEP, KVCache, Span, round_up
from runtime.types import EncodedSet, GroupRequest, Sample, SamplingParams, TokenSets, encode_set

# ---- Sampling
#
# Sampling by inverse CDF: one uniform number a token, from a stream that depends only on (seed, sample). So a reply does not
# depend on the other sequences of the batch, on its slot, or on the replica.


class Kept(NamedTuple):
    """The tokens that filters left, in m rows."""

    rows: torch.Tensor  # int64 [m], the indices of these rows
    sizes: torch.Tensor  # int64 [m], the number of tokens left
    order: torch.Tensor  # int64 [m, vocabulary], begins with the tokens left


class DrawnTokens(NamedTuple):
    tokens: torch.Tensor  # int64 [n]
    logprobs: torch.Tensor  # float32 [n]
    kept: Kept | None = None  # the sets of the rows that keep them


def uniforms(seed: int, sample: int, count: int) -> np.ndarray:
    """Return the first `count` numbers of the stream of (seed, sample): float32 [count], multiples of 2**-23 in [0, 1). Philox
    (Salmon et al. 2011) is counter-based: streams of different keys are independent. With 23 bits, u * total < total holds in
    float32 for every total."""
    key = np.array([seed & 0xFFFFFFFFFFFFFFFF, sample], np.uint64)
    bits = np.random.Philox(key=key).random_raw(count)
    return (bits >> np.uint64(41)).astype(np.float32) * np.float32(2.0**-23)


def as_row(params: SamplingParams) -> tuple[float, float, float, float, float]:
    """Return a row for `RowSampling`: 1/temperature (0: greedy), top-p and top-k (infinite: off), min-p, and 1 to keep the set
    of tokens that these leave."""
    inverse = 1.0 / params.temperature if params.temperature else 0.0
    top_p = params.top_p if params.top_p < 1 else math.inf
    return inverse, top_p, params.top_k or math.inf, params.min_p, float(params.keep_sets)


class RowSampling:
    """The sampling parameters of n rows, prepared for `sample`; rebuilt only when the rows change."""

    def __init__(self, params: np.ndarray, device: torch.device):
        """Prepare the rows `params`, float32 [n, 5], from `as_row`."""
        inverse, top_p, top_k, min_p, keeps = params.T
        greedy = inverse == 0
        filtered = ~greedy & ((top_p < 1) | (top_k < math.inf) | (min_p > 0))
        plain = ~(greedy | filtered)
        # A tensor whenever there is a temperature: a scalar might round differently from a mixed batch.
        inverse = np.where(greedy, np.float32(1), inverse)
        self.inverse_temperature = None if (inverse == 1).all() else torch.from_numpy(inverse[:, None]).to(device)
        self.parts: list[tuple[Callable[[torch.Tensor, torch.Tensor], DrawnTokens], torch.Tensor]] = []
        if plain.all():
            return
        filters = torch.from_numpy(params[filtered, 1:4]).to(device)
        keeping = torch.from_numpy(np.flatnonzero(keeps[filtered])).to(device)
        draws = ((_draw, plain), (_draw_greedy, greedy), (partial(_draw_filtered, filters, keeping), filtered))
        for draw, own in draws:
            if own.any():
                self.parts.append((draw, torch.from_numpy(np.flatnonzero(own)).to(device)))


def sample(logits: torch.Tensor, u: torch.Tensor, rows: RowSampling) -> DrawnTokens:
    """Draw a token for each row of float32 `logits` [n, vocab] with the uniform numbers `u` float32 [n]. The log-probability
    is that of the distribution drawn from: after temperature and filters. Greedy rows report the untempered log-softmax.
    Filters come in the order min-p, top-k, top-p, each on what the one before left."""
    if rows.inverse_temperature is not None:
        logits = logits * rows.inverse_temperature
    logp = torch.log_softmax(logits, -1)
    if not rows.parts:
        return _draw(logp, u)
    tokens = torch.empty(len(u), dtype=torch.int64, device=u.device)
    logprobs, kept = torch.empty_like(u), None
    for draw, indices in rows.parts:
        part = draw(logp.index_select(0, indices), u.index_select(0, indices))
        tokens.index_copy_(0, indices, part.tokens)
        logprobs.index_copy_(0, indices, part.logprobs)
        if part.kept is not None:
            kept = part.kept._replace(rows=indices.index_select(0, part.kept.rows))
    return DrawnTokens(tokens, logprobs, kept)


def sets_of(kept: Kept | None) -> dict[int, EncodedSet]:
    """Return by row the set that its token was drawn from, on the host."""
    if kept is None:
        return {}
    sizes, vocabulary = kept.sizes.tolist(), kept.order.shape[1]
    order = kept.order[:, : max(sizes)].int().cpu().numpy()
    return {row: encode_set(ids[:size], vocabulary) for row, size, ids in zip(kept.rows.tolist(), sizes, order, strict=True)}


def _draw(logp: torch.Tensor, u: torch.Tensor) -> DrawnTokens:
    """Draw the first token whose cumulative probability exceeds u times the total."""
    cumulative = logp.exp().cumsum(-1)
    target = u.unsqueeze(1) * cumulative[:, -1:]
    # A parallel prefix sum may decrease in the last bit, so the index is clamped.
    token = torch.searchsorted(cumulative, target, right=True).clamp_(max=logp.shape[-1] - 1)
    return DrawnTokens(token.squeeze(1), logp.gather(1, token).squeeze(1))


def _draw_greedy(logp: torch.Tensor, _: torch.Tensor) -> DrawnTokens:
    best = logp.max(-1)
    return DrawnTokens(best.indices, best.values)


def _draw_filtered(filters: torch.Tensor, keeping: torch.Tensor, logp: torch.Tensor, u: torch.Tensor) -> DrawnTokens:
    """Draw from filtered rows. `filters` [n, 3]: top-p, top-k, min-p. Each keeps the most probable tokens, so a prefix of the
    sorted row is left. `keeping`: int64, the rows whose sets are kept."""
    logp, order = torch.sort(logp, dim=-1, descending=True, stable=True)
    top_p, top_k, min_p = filters.split(1, 1)
    rank = torch.arange(logp.shape[-1], device=logp.device)
    probability = logp.exp()
    kept = (probability >= min_p * probability[:, :1]) & (rank < top_k)
    probability = probability * kept
    before = probability.cumsum(-1) - probability
    kept &= before < top_p * probability.sum(-1, keepdim=True)
    kept[:, 0] = True
    logp = logp.masked_fill(~kept, -math.inf)
    logp = logp - logp.logsumexp(-1, keepdim=True)
    cumulative = logp.exp().cumsum(-1)
    index = torch.searchsorted(cumulative, u.unsqueeze(1) * cumulative[:, -1:], right=True)
    sizes = kept.sum(-1, keepdim=True)
    index = torch.minimum(index, sizes - 1)
    sets = Kept(keeping, sizes[keeping, 0], order[keeping]) if len(keeping) else None
    return DrawnTokens(order.gather(1, index).squeeze(1), logp.gather(1, index).squeeze(1), sets)


def to_host(drawn: DrawnTokens) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and log-probabilities by one transfer, as each transfer waits for the device."""
    both = torch.stack((drawn.tokens.int(), drawn.logprobs.view(torch.int32))).cpu().numpy()
    return both[0].astype(np.int64), both[1].view(np.float32)


def streams(request: GroupRequest) -> np.ndarray:
    """Return the uniform numbers of each sample's tokens, float32 [n, max_new_tokens]."""
    limit, first = request.sampling.max_new_tokens, request.first
    return np.stack([uniforms(request.seed, index, limit) for index in range(first, first + request.n)])


_BOUNDARY_RANGE = 0.35, 0.65  # of the longest length: the boundary stays within, as each change of it moves sequences
_WORTH_SPLITTING = 512  # positions of attention saved per layer that pay for a second call


class Prefilled(NamedTuple):
    """A prompt that is ready for decoding, computed with the weights of `version`."""

    keys_values: torch.Tensor  # [layers, parts, heads, P, width]
    uniforms: np.ndarray  # float32 [n, max_new_tokens]
    tokens: np.ndarray  # int64 [n], the first token of each sample
    logprobs: np.ndarray  # float32 [n]
    version: int
    kept: list[EncodedSet | None]  # [n]; None: sets are not kept
    experts: np.ndarray | None  # [P, L, k], as in `RoutingRecord`; 0 for tokens that were computed before


class Slots:
    """The sequence in each slot of the cache, and each sequence's own record, which does not move with its slot.

    Invariants: between steps, slots 0..count-1 are active; within a step, finished sequences leave holes. `position[s]` is the
    number of tokens of sequence s whose keys and values the cache holds. It is also the position of the newest token of s,
    which the next step takes. Records are indexed by sequence and position.
    """

    def __init__(self, cache: KVCache, slots: int, vocabulary: int):
        self._cache, self._vocabulary = cache, vocabulary
        self._length = cache.max_length
        self._top = 0  # slots from here on are free; slots below are active, except the holes
        self._holes: list[int] = []
        self._boundary = 0  # length in tokens between short and long sequences
        self.size = slots
        self._sequence = np.arange(slots)  # by slot: always a permutation
        self.owner: list[Any] = [None] * slots
        self._start = np.zeros(slots, np.int64)  # the position of the first generated token
        self._end = np.zeros(slots, np.int64)  # the position at which the reply must have ended
        self._position = np.zeros(slots, np.int64)
        self._computed = np.zeros(slots, np.int64)  # the version of the keys and values, the oldest of several
        self._stop = np.full((slots, 1), -1, np.int64)
        self._params = np.zeros((slots, 5), np.float32)
        self._uniforms = np.empty((slots, self._length), np.float32)
        self._tokens = np.empty((slots, self._length), np.int64)
        self._logprobs = np.empty((slots, self._length), np.float32)
        self._versions = np.empty((slots, self._length), np.int64)
        self._kept: list[list[EncodedSet]] = [[] for _ in range(slots)]  # of each token, if sets are kept

    @property
    def count(self) -> int:
        """The number of active slots."""
        return self._top - len(self._holes)

    @property
    def free(self) -> int:
        return self.size - self.count

    @property
    def tokens(self) -> int:
        """The number of tokens that the cache holds, over all active slots."""
        return int(self._position[self._sequence[self.active()]].sum())

    def active(self) -> list[int]:
        holes = set(self._holes)
        return [slot for slot in range(self._top) if slot not in holes]

    def sequences(self) -> np.ndarray:
        """Return the sequences of slots 0..n-1, int64 [n]."""
        return self._sequence[: self._top]

    def owner_of(self, slot: int) -> Any:
        return self.owner[self._sequence[slot]]

    def start(self, owner: Any, prefilled: Prefilled, index: int, sampling: SamplingParams) -> int:
        """Take a slot for sample `index` of a prompt, with its first token."""
        if self._holes:
            slot = self._holes.pop()
        else:
            slot, self._top = self._top, self._top + 1
        s = self._sequence[slot]
        self.owner[s] = owner
        position, kept = prefilled.keys_values.shape[3], prefilled.kept[index]
        end = position + sampling.max_new_tokens
        self._start[s], self._position[s], self._end[s] = position, position, end
        self._tokens[s, position], self._logprobs[s, position] = prefilled.tokens[index], prefilled.logprobs[index]
        self._versions[s, position] = self._computed[s] = prefilled.version
        self._kept[s] = [] if kept is None else [kept]
        self._uniforms[s, position:end] = prefilled.uniforms[index]
        self._params[s] = as_row(sampling)
        stops = sampling.stop_token_ids
        if len(stops) > self._stop.shape[1]:
            self._stop = np.pad(self._stop, ((0, 0), (0, len(stops) - self._stop.shape[1])), constant_values=-1)
        self._stop[s] = -1
        self._stop[s, : len(stops)] = stops
        return slot

    def inputs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return of slots 0..n-1 the newest tokens and positions, int64 [2, n], uniform numbers, float32 [n], and parameters of
        sampling, float32 [n, 5]."""
        sequences = self._sequence[: self._top]
        position = self._position[sequences]
        newest = sequences * self._length + position
        tokens = np.stack((self._tokens.take(newest), position))
        return tokens, self._uniforms.take(newest + 1), self._params[sequences]

    def record(
        self, tokens: np.ndarray, logprobs: np.ndarray, version: int, sets: Mapping[int, EncodedSet]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Append a step's tokens, with the `sets` of some of them, to slots 0..n-1. Return the finished slots, and for each
        whether it met a stop token."""
        sequences = self._sequence[: self._top]
        position = self._position[sequences] + 1
        self._position[sequences] = position
        newest = sequences * self._length + position
        self._tokens.put(newest, tokens)
        self._logprobs.put(newest, logprobs)
        self._versions.put(newest, version)
        for slot, found in sets.items():
            self._kept[sequences[slot]].append(found)
        stopped = (tokens[:, None] == self._stop[sequences]).any(1)
        done = np.flatnonzero(stopped | (position + 1 >= self._end[sequences]))
        return done, stopped[done]

    def cached(self, slot: int) -> np.ndarray:
        """Return a sequence's generated tokens whose keys and values are cached, int64: all but the newest."""
        s = self._sequence[slot]
        return self._tokens[s, self._start[s] : self._position[s]]

    def computed(self, slot: int) -> int:
        """Return the version of a slot's keys and values, the oldest if there are several."""
        return int(self._computed[self._sequence[slot]])

    def recomputed(self, slot: int, version: int) -> None:
        """Note that all keys and values of a slot now have `version`."""
        self._computed[self._sequence[slot]] = version

    def release(self, slot: int) -> None:
        """Free a slot. It is a hole until it is refilled or closed."""
        self.owner[self._sequence[slot]] = None
        self._holes.append(slot)

    def take(self, slot: int, stopped: bool) -> Sample:
        """Return the finished sequence of a slot, and release the slot."""
        s = self._sequence[slot]
        reply = slice(self._start[s], self._position[s] + 1)
        sample = make_sample(
            self._tokens[s, reply].astype(np.int32),
            self._logprobs[s, reply].copy(),
            self._versions[s, reply].copy(),
            "stop" if stopped else "length",
            TokenSets.of(self._kept[s], self._vocabulary) if self._kept[s] else None,
        )
        self._kept[s] = []
        self.release(slot)
        return sample

    def close_holes(self) -> None:
        """Move the last slots into the holes, so that the active slots are a prefix again."""
        holes = sorted(self._holes)
        self._holes.clear()
        while holes:
            self._top -= 1
            if holes[-1] == self._top:
                holes.pop()
            else:
                hole = holes.pop(0)
                self._cache.move(self._top, hole, int(self._position[self._sequence[self._top]]))
                self._exchange(self._top, hole)

    def _exchange(self, one: int, other: int) -> None:
        self._sequence[one], self._sequence[other] = self._sequence[other], self._sequence[one]

    def spans(self) -> list[Span]:
        """Put long sequences before short ones if that saves much attention. Return the slots of both. Lengths are
        long-tailed: otherwise every sequence is attended over the length of the longest."""
        n = self._top
        positions = self._position[self._sequence[:n]]
        longest = int(positions.max()) + 1
        if not longest * _BOUNDARY_RANGE[0] <= self._boundary <= longest * _BOUNDARY_RANGE[1]:
            self._boundary = round_up(longest // 2, LENGTH_STEP)
        long = positions >= self._boundary
        m = int(np.count_nonzero(long))
        if (n - m) * (longest - self._boundary) < _WORTH_SPLITTING:
            return [Span(0, n, longest)]
        short_slots, long_slots = np.flatnonzero(~long[:m]), m + np.flatnonzero(long[m:])
        for one, other in zip(short_slots.tolist(), long_slots.tolist(), strict=True):
            self._cache.swap(one, other, int(positions[other]))
            self._exchange(one, other)
        return [Span(0, m, longest), Span(m, n, self._boundary)]
