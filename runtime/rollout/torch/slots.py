"""What the embedded rollout engine knows of its running sequences: plain arrays on the host.

The device holds only the key-value cache. A step sends two small arrays there and fetches one back, and everything else
is host arithmetic, so that a slot can be refilled or moved without asking the device.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from runtime.rollout.groups import make_sample
from runtime.rollout.torch.decoder import LENGTH_STEP, Span, round_up
from runtime.rollout.torch.kv_cache import KVCache
from runtime.rollout.torch.sampling import as_row
from runtime.types import Sample, SamplingParams

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
        self._uniforms[s, position:end] = uniforms
        self._params[s] = as_row(sampling)
        stops = sampling.stop_token_ids
        if len(stops) > self._stop.shape[1]:
            self._stop = np.pad(self._stop, ((0, 0), (0, len(stops) - self._stop.shape[1])), constant_values=-1)
        self._stop[s] = -1
        self._stop[s, : len(stops)] = stops
        return slot

    def inputs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For slots 0..n-1: tokens and positions, int64 [2, n]; uniforms, float32 [n]; sampling parameters, float32 [n, 4]."""
        sequences = self._sequence[: self._top]
        position = self._position[sequences]
        newest = sequences * self._length + position
        return (
            np.stack((self._tokens.take(newest), position)),
            self._uniforms.take(newest + 1),
            self._params[sequences],
        )

    def record(self, tokens: np.ndarray, logprobs: np.ndarray, version: int) -> tuple[np.ndarray, np.ndarray]:
        """Append a step's tokens to slots 0..n-1; returns the slots that are done, and whether each met a stop token."""
        sequences = self._sequence[: self._top]
        position = self._position[sequences] + 1
        self._position[sequences] = position
        newest = sequences * self._length + position
        self._tokens.put(newest, tokens)
        self._logprobs.put(newest, logprobs)
        self._versions.put(newest, version)
        stopped = (tokens[:, None] == self._stop[sequences]).any(1)
        done = np.flatnonzero(stopped | (position + 1 >= self._end[sequences]))
        return done, stopped[done]

    def cached(self, slot: int) -> np.ndarray:
        """int64: the generated tokens of a slot's sequence whose keys and values the cache holds, all but its newest."""
        s = self._sequence[slot]
        return self._tokens[s, self._start[s] : self._position[s]]

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
