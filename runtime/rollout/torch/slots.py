"""What the embedded rollout engine knows of its running sequences: plain arrays on the host.

The device holds only the key-value cache. A step sends two small arrays there and fetches one back, and everything else
is host arithmetic, so that a slot can be refilled or moved without asking the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from runtime.columns import EncodedSet, KeptSets
from runtime.rollout.engine import make_sample
from runtime.rollout.torch.decoder import LENGTH_STEP, KVCache, Span, round_up
from runtime.rollout.torch.drafts import LONGEST
from runtime.rollout.torch.sampling import as_row
from runtime.types import FinishReason, Sample, SamplingParams


class StepInputs(NamedTuple):
    """What a decode step takes: m tokens."""

    tokens: np.ndarray  # and positions, int64 [2, m]
    uniforms: np.ndarray  # float32 [m]
    params: np.ndarray  # of sampling, float32 [m, 5]
    counts: np.ndarray | None  # tokens of each slot, int64 [n]; None: one


_BOUNDARY_RANGE = 0.35, 0.65  # of the longest length: where the boundary may stay, as each change of it moves sequences
_WORTH_SPLITTING = 512  # positions of attention spared a layer, for which a second call pays


class FirstToken(NamedTuple):
    token: int
    logprob: float
    version: int
    kept: EncodedSet | None  # None: sets are not kept

    def alone(self, reason: FinishReason, vocabulary: int) -> Sample:
        """A reply that is this token."""
        arrays = np.array([self.token], np.int32), np.array([self.logprob], np.float32), np.array([self.version], np.int64)
        return make_sample(*arrays, reason, None if self.kept is None else KeptSets.of([self.kept], vocabulary))


@dataclass
class Prefilled:
    """A prompt that is ready to be continued, under the weights of `version`."""

    keys_values: torch.Tensor  # [layers, parts, heads, P, width]
    uniforms: np.ndarray  # float32 [n, max_new_tokens]
    tokens: np.ndarray  # int64 [n], the first token of each sample
    logprobs: np.ndarray  # float32 [n]
    version: int
    kept: list[EncodedSet | None]  # [n]
    experts: np.ndarray | None  # [P, L, k], as of `RoutingRecord`: 0 of what was computed before

    def first(self, index: int) -> FirstToken:
        return FirstToken(int(self.tokens[index]), self.logprobs[index], self.version, self.kept[index])


class Slots:
    """Which sequence is in which slot of the cache, and each sequence's own record, which does not move with it.

    Invariants: between steps, slots 0..count-1 are active; within one, finished sequences leave holes. `position[s]` is the
    number of tokens of sequence s whose keys and values the cache holds, and the position of its newest token, which the
    next step feeds. Records are indexed by sequence and position.
    """

    def __init__(self, cache: KVCache, slots: int, vocabulary: int):
        self._cache, self._vocabulary = cache, vocabulary
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
        self._params = np.zeros((slots, 5), np.float32)
        self._uniforms = np.empty((slots, self._length), np.float32)
        self._tokens = np.empty((slots, self._length), np.int64)
        self._logprobs = np.empty((slots, self._length), np.float32)
        self._versions = np.empty((slots, self._length), np.int64)
        self._kept: list[list[EncodedSet]] = [[] for _ in range(slots)]  # of each token, where sets are kept

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

    def sequences(self, counts: np.ndarray | None = None) -> np.ndarray:
        """int64 [m]: of each token of a step's inputs its sequence; `counts` as of those."""
        own = self._sequence[: self._top]
        return own if counts is None else np.repeat(own, counts)

    def owner_of(self, slot: int) -> Any:
        return self.owner[self._sequence[slot]]

    def start(self, owner: Any, position: int, first: FirstToken, sampling: SamplingParams, uniforms: np.ndarray) -> int:
        """Take a slot for a sequence whose first token is at `position`."""
        if self._holes:
            slot = self._holes.pop()
        else:
            slot, self._top = self._top, self._top + 1
        s = self._sequence[slot]
        self.owner[s] = owner
        end = position + sampling.max_new_tokens
        self._start[s], self._position[s], self._end[s] = position, position, end
        self._tokens[s, position], self._logprobs[s, position], self._versions[s, position] = first[:3]
        self._computed[s] = first.version
        self._kept[s] = [] if first.kept is None else [first.kept]
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
        self,
        tokens: np.ndarray,
        logprobs: np.ndarray,
        version: int,
        sets: Mapping[int, EncodedSet],
        counts: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """Append a step's tokens, with the `sets` of some of them, to slots 0..n-1; returns the slots that are done, whether
        each met a stop token, and how many tokens were appended. `counts`: those of the step's inputs; of what was sampled in
        a slot, all is appended as far as it is the draft, and one token more."""
        if counts is not None:
            return self._record_drafted(tokens, logprobs, version, sets, counts)
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
        self, tokens: np.ndarray, logprobs: np.ndarray, version: int, sets: Mapping[int, EncodedSet], counts: np.ndarray
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
        for row, found in sets.items():
            if held[row]:
                self._kept[sequences[row]].append(found)
        own = self._sequence[: self._top]
        self._position[own] += kept
        stopped = stops[starts + kept - 1]
        done = np.flatnonzero(stopped | (self._position[own] + 1 >= self._end[own]))
        return done, stopped[done], int(kept.sum())

    def _rows(self, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For each of `counts` tokens of slots 0..n-1: its sequence, which one it is of those, and its position: int64 [m]."""
        offset = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
        sequences = self.sequences(counts)
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
            KeptSets.of(self._kept[s], self._vocabulary) if self._kept[s] else None,
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
