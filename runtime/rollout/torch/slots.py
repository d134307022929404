"""What the embedded rollout engine knows of its running sequences: plain arrays on the host.

The device holds only the key-value cache. A step sends two small arrays there and fetches one back, and everything else
is host arithmetic, so that a slot can be refilled or moved without asking the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from runtime.rollout.engine import make_sample
from runtime.rollout.torch.decoder import LENGTH_STEP, KVCache, Span, round_up
from runtime.rollout.torch.drafts import LONGEST
from runtime.types import GroupRequest, Sample, SamplingParams

# ----------------------------------------------------------------------------------------------------------------------
# Sampling by inverse CDF: one uniform number a token, from a stream that depends on (seed, sample) alone.
#
# So a reply does not depend on which other sequences share the batch, on its slot, or on the replica.


Sampled = tuple[torch.Tensor, torch.Tensor]  # tokens int64 [n], log-probabilities float32 [n]


def uniforms(seed: int, sample: int, count: int) -> np.ndarray:
    """The first `count` numbers of the stream of (seed, sample): float32 [count], multiples of 2**-23 in [0, 1).

    Philox (Salmon et al. 2011) is counter-based: streams of different keys are independent. 23 bits, because then
    u * total < total holds in float32 too, for every total.
    """
    key = np.array([seed & 0xFFFFFFFFFFFFFFFF, sample], np.uint64)
    bits = np.random.Philox(key=key).random_raw(count)
    return (bits >> np.uint64(41)).astype(np.float32) * np.float32(2.0**-23)


def as_row(params: SamplingParams) -> tuple[float, float, float, float]:
    """A row of the array that `RowSampling` takes: 1/temperature (0: greedy), top-p and top-k (infinite: off), min-p."""
    inverse = 1.0 / params.temperature if params.temperature else 0.0
    return inverse, params.top_p if params.top_p < 1 else math.inf, params.top_k or math.inf, params.min_p


class RowSampling:
    """The sampling parameters of n rows, prepared for `sample`; rebuilt only when the rows change."""

    def __init__(self, params: np.ndarray, device: torch.device):
        """`params` is float32 [n, 4], rows from `as_row`."""
        inverse, top_p, top_k, min_p = params.T
        greedy = inverse == 0
        filtered = ~greedy & ((top_p < 1) | (top_k < math.inf) | (min_p > 0))
        plain = ~(greedy | filtered)
        # Always a tensor when there is a temperature: a scalar might round otherwise than a mixed batch does.
        inverse = np.where(greedy, np.float32(1), inverse)
        self.inverse_temperature = None if (inverse == 1).all() else torch.from_numpy(inverse[:, None]).to(device)
        self.parts: list[tuple[Callable[[torch.Tensor, torch.Tensor], Sampled], torch.Tensor]] = []
        if plain.all():
            return
        filters = torch.from_numpy(params[filtered, 1:]).to(device)
        draws = ((_draw, plain), (_draw_greedy, greedy), (partial(_draw_filtered, filters), filtered))
        for draw, own in draws:
            if own.any():
                self.parts.append((draw, torch.from_numpy(np.flatnonzero(own)).to(device)))


def sample(logits: torch.Tensor, u: torch.Tensor, rows: RowSampling) -> Sampled:
    """Draw a token for each row of float32 `logits` [n, vocab] with the uniform numbers `u` float32 [n].

    The log-probability is that of the distribution drawn from: after temperature and filters. Greedy rows report the
    untempered log-softmax. Filters come in the order min-p, top-k, top-p, each on what the one before left.
    """
    if rows.inverse_temperature is not None:
        logits = logits * rows.inverse_temperature
    logp = torch.log_softmax(logits, -1)
    if not rows.parts:
        return _draw(logp, u)
    tokens = torch.empty(len(u), dtype=torch.int64, device=u.device)
    logprobs = torch.empty_like(u)
    for draw, indices in rows.parts:
        part_tokens, part_logprobs = draw(logp.index_select(0, indices), u.index_select(0, indices))
        tokens.index_copy_(0, indices, part_tokens)
        logprobs.index_copy_(0, indices, part_logprobs)
    return tokens, logprobs


def _draw(logp: torch.Tensor, u: torch.Tensor) -> Sampled:
    """The first token whose cumulative probability exceeds u times the total."""
    cumulative = logp.exp().cumsum(-1)
    target = u.unsqueeze(1) * cumulative[:, -1:]
    # A parallel prefix sum need not be monotone to the last bit, hence the clamp.
    token = torch.searchsorted(cumulative, target, right=True).clamp_(max=logp.shape[-1] - 1)
    return token.squeeze(1), logp.gather(1, token).squeeze(1)


def _draw_greedy(logp: torch.Tensor, _: torch.Tensor) -> Sampled:
    best = logp.max(-1)
    return best.indices, best.values


def _draw_filtered(filters: torch.Tensor, logp: torch.Tensor, u: torch.Tensor) -> Sampled:
    """`filters` is [n, 3]: top-p, top-k, min-p. Each keeps the most probable tokens, so a prefix of the sorted row is left."""
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
    place = torch.searchsorted(cumulative, u.unsqueeze(1) * cumulative[:, -1:], right=True)
    place = torch.minimum(place, kept.sum(-1, keepdim=True) - 1)
    return order.gather(1, place).squeeze(1), logp.gather(1, place).squeeze(1)


def to_host(tokens: torch.Tensor, logprobs: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Both in one transfer, as each would wait for the device."""
    both = torch.stack((tokens.int(), logprobs.view(torch.int32))).cpu().numpy()
    return both[0].astype(np.int64), both[1].view(np.float32)


# ----------------------------------------------------------------------------------------------------------------------


class StepInputs(NamedTuple):
    """What a decode step takes: m tokens."""

    tokens: np.ndarray  # and positions, int64 [2, m]
    uniforms: np.ndarray  # float32 [m]
    params: np.ndarray  # of sampling, float32 [m, 4]
    counts: np.ndarray | None  # tokens of each slot, int64 [n]; None: one


def streams(request: GroupRequest) -> np.ndarray:
    """float32 [n, max_new_tokens]: the uniform numbers of each sample's tokens."""
    limit, first = request.sampling.max_new_tokens, request.first
    return np.stack([uniforms(request.seed, index, limit) for index in range(first, first + request.n)])


_BOUNDARY_RANGE = 0.35, 0.65  # of the longest length: where the boundary may stay, as each change of it moves sequences
_WORTH_SPLITTING = 512  # positions of attention spared a layer, for which a second call pays


class Slots:
    """Which sequence is in which slot of the cache, and each sequence's own record, which does not move with it.

    Invariants: between steps, slots 0..count-1 are active; within one, finished sequences leave holes. `position[s]` is the
    number of tokens of sequence s whose keys and values the cache holds, and the position of its newest token, which the
    next step feeds. Records are indexed by sequence and position.
    """

    def __init__(self, cache: KVCache, slots: int):
        self._cache = cache
        self._length = cache.max_length
        self._top = 0  # slots beyond are free; below, all but the holes are active
        self._holes: list[int] = []
        self._boundary = 0  # between short and long sequences, in tokens
        self.size = slots
        self._sequence = np.arange(slots)  # of each slot: always a permutation
        self.owner: list[Any] = [None] * slots
        self._start = np.zeros(slots, np.int64)  # the position of the first generated token
        self._end = np.zeros(slots, np.int64)  # and where the reply must have ended
        self._position = np.zeros(slots, np.int64)
        self._computed = np.zeros(slots, np.int64)  # by which version, the oldest where there are several
        self._stop = np.full((slots, 1), -1, np.int64)
        self._params = np.zeros((slots, 4), np.float32)
        self._uniforms = np.empty((slots, self._length), np.float32)
        self._tokens = np.empty((slots, self._length), np.int64)
        self._logprobs = np.empty((slots, self._length), np.float32)
        self._versions = np.empty((slots, self._length), np.int64)

    @property
    def count(self) -> int:
        """Active slots."""
        return self._top - len(self._holes)

    @property
    def free(self) -> int:
        return self.size - self.count

    @property
    def tokens(self) -> int:
        """That the cache holds, of all active slots."""
        return int(self._position[self._sequence[self.active()]].sum())

    def active(self) -> list[int]:
        holes = set(self._holes)
        return [slot for slot in range(self._top) if slot not in holes]

    def owner_of(self, slot: int) -> Any:
        return self.owner[self._sequence[slot]]

    def start(
        self, owner: Any, position: int, first: tuple[int, float, int], sampling: SamplingParams, uniforms: np.ndarray
    ) -> int:
        """Take a slot for a sequence whose first token, with log-probability and version, is at `position`."""
        if self._holes:
            slot = self._holes.pop()
        else:
            slot, self._top = self._top, self._top + 1
        s = self._sequence[slot]
        self.owner[s] = owner
        end = position + sampling.max_new_tokens
        self._start[s], self._position[s], self._end[s] = position, position, end
        self._tokens[s, position], self._logprobs[s, position], self._versions[s, position] = first
        self._computed[s] = first[2]
        self._uniforms[s, position:end] = uniforms
        self._params[s] = as_row(sampling)
        stops = sampling.stop_token_ids
        if len(stops) > self._stop.shape[1]:
            self._stop = np.pad(self._stop, ((0, 0), (0, len(stops) - self._stop.shape[1])), constant_values=-1)
        self._stop[s] = -1
        self._stop[s, : len(stops)] = stops
        return slot

    @property
    def owners(self) -> list[Any]:
        """Of slots 0..n-1, where there are no holes."""
        return [self.owner[s] for s in self._sequence[: self._top].tolist()]

    def lengths(self) -> tuple[list[int], list[int]]:
        """For slots 0..n-1: the tokens of each reply, and how many there may be after the next one."""
        sequences = self._sequence[: self._top]
        position = self._position[sequences]
        return (position - self._start[sequences] + 1).tolist(), (self._end[sequences] - position - 2).tolist()

    def generated(self, slot: int, since: int) -> list[int]:
        """The tokens of a slot's reply, but for the first `since`."""
        s = self._sequence[slot]
        return self._tokens[s, self._start[s] + since : self._position[s] + 1].tolist()

    def inputs(self, drafts: Sequence[Sequence[int]] = ()) -> StepInputs:
        """For slots 0..n-1, their newest tokens, and behind each one its draft if there are any: none leaves less room than for
        one more token."""
        if drafts:
            return self._drafted(drafts)
        sequences = self._sequence[: self._top]
        position = self._position[sequences]
        newest = sequences * self._length + position
        return StepInputs(
            np.stack((self._tokens.take(newest), position)), self._uniforms.take(newest + 1), self._params[sequences], None
        )

    def record(
        self, tokens: np.ndarray, logprobs: np.ndarray, version: int, counts: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """Append a step's tokens to slots 0..n-1; returns the slots that are done, whether each met a stop token, and how many
        tokens were appended. `counts`: those of the step's inputs; of what was sampled in a slot, all is appended as far as it
        is the draft, and one token more."""
        if counts is not None:
            return self._record_drafted(tokens, logprobs, version, counts)
        sequences = self._sequence[: self._top]
        position = self._position[sequences] + 1
        self._position[sequences] = position
        newest = sequences * self._length + position
        self._tokens.put(newest, tokens)
        self._logprobs.put(newest, logprobs)
        self._versions.put(newest, version)
        stopped = (tokens[:, None] == self._stop[sequences]).any(1)
        done = np.flatnonzero(stopped | (position + 1 >= self._end[sequences]))
        return done, stopped[done], len(tokens)

    def _drafted(self, drafts: Sequence[Sequence[int]]) -> StepInputs:
        counts = np.array([len(draft) + 1 for draft in drafts])
        sequences, _, position = self._rows(counts)
        place = sequences * self._length + position
        # A draft lies where its tokens will be, until others are recorded there.
        is_draft = position > self._position[sequences]
        self._tokens.put(place[is_draft], np.concatenate([np.array(draft, np.int64) for draft in drafts]))
        inputs = np.stack((self._tokens.take(place), position))
        return StepInputs(inputs, self._uniforms.take(place + 1), self._params[sequences], counts)

    def _record_drafted(
        self, tokens: np.ndarray, logprobs: np.ndarray, version: int, counts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, int]:
        sequences, offset, position = self._rows(counts)
        place = sequences * self._length + position + 1
        last = offset == np.repeat(counts, counts) - 1
        stops = (tokens[:, None] == self._stop[sequences]).any(1)
        starts = counts.cumsum() - counts
        # The first token of each slot after which nothing holds: it stops the reply, or it is not the draft's.
        ends = last | stops | (tokens != self._tokens.take(place))
        kept = np.minimum.reduceat(np.where(ends, offset, LONGEST), starts) + 1
        held = offset < np.repeat(kept, counts)
        self._tokens.put(place[held], tokens[held])
        self._logprobs.put(place[held], logprobs[held])
        self._versions.put(place[held], version)
        own = self._sequence[: self._top]
        self._position[own] += kept
        stopped = stops[starts + kept - 1]
        done = np.flatnonzero(stopped | (self._position[own] + 1 >= self._end[own]))
        return done, stopped[done], int(kept.sum())

    def _rows(self, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For each of `counts` tokens of slots 0..n-1: its sequence, which one it is of those, and its position: int64 [m]."""
        offset = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
        sequences = np.repeat(self._sequence[: self._top], counts)
        return sequences, offset, self._position[sequences] + offset

    def cached(self, slot: int) -> np.ndarray:
        """int64: the generated tokens of a slot's sequence whose keys and values the cache holds, all but its newest."""
        s = self._sequence[slot]
        return self._tokens[s, self._start[s] : self._position[s]]

    def computed(self, slot: int) -> int:
        """The version of a slot's keys and values, the oldest where there are several."""
        return int(self._computed[self._sequence[slot]])

    def recomputed(self, slot: int, version: int) -> None:
        """Note that all keys and values of a slot are of `version` now."""
        self._computed[self._sequence[slot]] = version

    def release(self, slot: int) -> None:
        """Free a slot; a hole until it is refilled or closed."""
        self.owner[self._sequence[slot]] = None
        self._holes.append(slot)

    def take(self, slot: int, stopped: bool) -> Sample:
        """The finished sequence of a slot, which is released."""
        s = self._sequence[slot]
        reply = slice(self._start[s], self._position[s] + 1)
        sample = make_sample(
            self._tokens[s, reply].astype(np.int32),
            self._logprobs[s, reply].copy(),
            self._versions[s, reply].copy(),
            "stop" if stopped else "length",
        )
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
        """Put the long sequences before the short ones where that spares much attention; returns the slots of each.

        Lengths are long-tailed: without it, every sequence is attended over the length of the longest.
        """
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
