"""Columns of a group's tokens that would be large as plain arrays: values that seldom change, sets of tokens, and experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np


class Runs(msgspec.Struct, frozen=True, array_like=True):
    """An array whose values seldom change along it: each value, and for how many entries it holds (run-length encoding)."""

    values: np.ndarray
    lengths: np.ndarray  # uint32

    @classmethod
    def of(cls, array: np.ndarray) -> Runs:
        starts = np.flatnonzero(np.concatenate([np.ones(min(1, len(array)), bool), array[1:] != array[:-1]]))
        return cls(array[starts], np.diff(starts, append=len(array)).astype(np.uint32))

    def expand(self) -> np.ndarray:
        return np.repeat(self.values, self.lengths)

    def __len__(self) -> int:
        return int(self.lengths.sum(dtype=np.int64))


EncodedSet = tuple[int, np.ndarray]  # how many tokens, 0 for the whole vocabulary, and uint8


def encode_set(ids: np.ndarray, vocabulary: int) -> EncodedSet:
    """Some of `vocabulary` tokens, int32: their ids, or a bit for each token of the vocabulary where that is smaller."""
    if len(ids) == vocabulary:
        return 0, np.zeros(0, np.uint8)
    width = _bitmap_bytes(vocabulary)
    if ids.nbytes < width:
        return len(ids), ids.astype("<i4").view(np.uint8)
    chosen = np.zeros(8 * width, bool)
    chosen[ids] = True
    return len(ids), np.packbits(chosen, bitorder="little")


class KeptSets(msgspec.Struct, frozen=True, array_like=True):
    """Of each of n tokens, the set of those that the sampler's filters left to draw it from."""

    vocabulary: int
    sizes: np.ndarray  # uint32 [n], tokens in the set; 0: all of the vocabulary
    data: np.ndarray  # uint8, one set after the other, each as `encode_set` has it

    @classmethod
    def of(cls, sets: Sequence[EncodedSet], vocabulary: int) -> KeptSets:
        data = np.concatenate([np.zeros(0, np.uint8), *(each for _, each in sets)])
        return cls(vocabulary, np.array([size for size, _ in sets], np.uint32), data)

    @classmethod
    def joined(cls, parts: Sequence[KeptSets | None], lengths: Sequence[int]) -> KeptSets | None:
        """Those of `parts` with `lengths` tokens, one after the other; None: the whole vocabulary, which all are if all are."""
        known = [part for part in parts if part is not None]
        if not known:
            return None
        sizes = [
            np.zeros(length, np.uint32) if part is None else part.sizes for part, length in zip(parts, lengths, strict=True)
        ]
        return cls(known[0].vocabulary, np.concatenate(sizes), np.concatenate([part.data for part in known]))

    def part(self, tokens: slice) -> KeptSets:
        """Of some tokens that follow one another."""
        ends = np.append(0, np.cumsum(self._places()[1]))
        begin, end, _ = tokens.indices(len(self.sizes))
        return KeptSets(self.vocabulary, self.sizes[tokens], self.data[ends[begin] : ends[max(begin, end)]])

    def among(self, chosen: np.ndarray) -> KeptSets:
        """Of those tokens at which `chosen` (bool [n]) is true; the others have the whole vocabulary."""
        return KeptSets(self.vocabulary, self.sizes[chosen], self.data)

    def spread(self, among: np.ndarray) -> KeptSets:
        """These tokens are those at which `among` (bool) is true; the others have the whole vocabulary."""
        sizes = np.zeros(len(among), np.uint32)
        sizes[among] = self.sizes
        return KeptSets(self.vocabulary, sizes, self.data)

    def bitmaps(self, which: np.ndarray) -> np.ndarray:
        """uint8 [len(which), ⌈vocabulary / 32⌉ · 4] of the tokens `which` (int64): a bit for each token of the vocabulary, the
        lowest of a byte first."""
        begins, lengths = self._places()
        width = _bitmap_bytes(self.vocabulary)
        out = np.full((len(which), width), 255, np.uint8)
        whole = lengths[which] == width
        out[whole] = self.data[begins[which[whole], None] + np.arange(width)]
        out[(self.sizes[which] > 0) & ~whole] = 0
        rows, ids = self._listed(which)
        np.bitwise_or.at(out, (rows, ids >> 3), np.left_shift(1, ids & 7).astype(np.uint8))
        return out

    def fault(self, tokens: np.ndarray, vocabulary: int) -> str:
        """Why these are not the sets that `tokens` (int32 [n]) of so large a vocabulary were drawn from; "" where they are."""
        begins, lengths = self._places()
        if self.vocabulary != vocabulary:
            return f"its kept sets are of {self.vocabulary} tokens, the vocabulary has {vocabulary}"
        dtypes = self.sizes.dtype == np.uint32 and self.data.dtype == np.uint8
        if not dtypes or len(self.sizes) != len(tokens) or int(lengths.sum()) != len(self.data):
            return f"its kept sets are {len(self.sizes)} in {len(self.data)} bytes, not {len(tokens)} in {lengths.sum()}"
        rows, ids = self._listed(np.arange(len(tokens)))
        if len(ids) and not 0 <= ids.min() <= ids.max() < vocabulary:
            return f"its kept sets have token ids outside of 0..{vocabulary - 1}"
        held = self.sizes == 0
        held[rows[ids == tokens[rows]]] = True
        mapped = np.flatnonzero(lengths == _bitmap_bytes(vocabulary))
        held[mapped] = self.data[begins[mapped] + (tokens[mapped] >> 3)] >> (tokens[mapped] & 7) & 1 > 0
        return "" if held.all() else f"token {int(np.argmin(held))} is not in its kept set"

    def _listed(self, which: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The ids of those sets of `which` that are kept as ids, int32, and for each its index in `which`."""
        begins, lengths = self._places()
        few = np.flatnonzero((self.sizes[which] > 0) & (lengths[which] < _bitmap_bytes(self.vocabulary)))
        count = lengths[which[few]] // 4
        first = np.cumsum(count) - count
        place = np.repeat(begins[which[few]] // 4 - first, count) + np.arange(count.sum())
        return np.repeat(few, count), self.data.view("<i4")[place]

    def _places(self) -> tuple[np.ndarray, np.ndarray]:
        """Where each set begins in `data`, and its bytes: int64 [n] each."""
        lengths = np.minimum(self.sizes.astype(np.int64) * 4, _bitmap_bytes(self.vocabulary))
        return np.cumsum(lengths) - lengths, lengths


def _bitmap_bytes(vocabulary: int) -> int:
    """A multiple of the bytes of an id."""
    return -(-vocabulary // 32) * 4


class RoutedExperts(msgspec.Struct, frozen=True, array_like=True):
    """The experts to which a model's layers with experts gave each of n tokens that were fed to it."""

    layers: int
    per_token: int
    data: np.ndarray  # uint8 or uint16 [n · layers · per_token]

    @classmethod
    def of(cls, chosen: np.ndarray) -> RoutedExperts:
        """`chosen` [n, layers, per_token]."""
        return cls(chosen.shape[1], chosen.shape[2], chosen.reshape(-1))

    @property
    def rows(self) -> np.ndarray:
        """[n, layers, per_token]."""
        return self.data.reshape(-1, self.layers, self.per_token)

    def split(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        """`rows` of a prompt and of a reply of `length` tokens, of which the last one is not fed."""
        begin = len(self.rows) - fed(length)
        return self.rows[:begin], self.rows[begin:]

    @classmethod
    def joined(cls, parts: Sequence[RoutedExperts | None]) -> RoutedExperts | None:
        """Of all `parts`, one after the other; None where nothing is known of one."""
        known = [part.rows for part in parts if part is not None]
        return cls.of(np.concatenate(known)) if known and len(known) == len(parts) else None

    @classmethod
    def of_group(cls, rows: Sequence[RoutedExperts | None], replies: Sequence[np.ndarray]) -> RoutedExperts | None:
        """Of a group's prompt, as the first of `rows` has it, and then of each of `replies` [R] but for its last token. `rows`:
        those of prompt and reply; None: the model was never given it, so 0. None where there are none at all."""
        pairs = [None if row is None else row.split(len(reply)) for row, reply in zip(rows, replies, strict=True)]
        if (known := next((pair for pair in pairs if pair is not None), None)) is None:
            return None
        none = np.zeros((max(map(len, replies)), *known[0].shape[1:]), known[0].dtype)
        taken = [pair[1] if pair else none[: fed(len(reply))] for pair, reply in zip(pairs, replies, strict=True)]
        return cls.of(np.concatenate([known[0], *taken]))

    def by_row(self, lengths: Sequence[int]) -> list[RoutedExperts]:
        """What `of_group` was made of: for each reply of `lengths` tokens those of prompt and reply."""
        cuts = np.cumsum([len(self.rows) - sum(map(fed, lengths)), *map(fed, lengths)])[:-1]
        prompt, *replies = np.split(self.rows, cuts)
        return [RoutedExperts.of(np.concatenate([prompt, reply])) for reply in replies]

    def fit(self, tokens: int, layers: int, per_token: int, experts: int) -> bool:
        """Whether these are of so many tokens, and of a model of this shape."""
        given, asked = (self.layers, self.per_token, len(self.data)), (layers, per_token, tokens * layers * per_token)
        return given == asked and self.data.dtype in (np.uint8, np.uint16) and int(self.data.max(initial=0)) < experts


def fed(length: int) -> int:
    """Of a reply's tokens, those that are fed to a model: all but the last."""
    return max(int(length) - 1, 0)


class TokenColumns(NamedTuple):
    """One entry for each token of a group's replies, which follow one another: the arrays of `Sample`, concatenated."""

    tokens: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray


def common(one: np.ndarray, other: np.ndarray) -> int:
    """How many tokens both begin with."""
    size = min(len(one), len(other))
    differ = np.flatnonzero(one[:size] != other[:size])
    return int(differ[0]) if len(differ) else size


def outside(tokens: np.ndarray, vocabulary: int) -> bool:
    """Whether one of these token ids is not in a vocabulary of so many."""
    return len(tokens) > 0 and bool(tokens.min() < 0 or tokens.max() >= vocabulary)
