"""Which problem stands at which position of the prompt stream: pure functions of settings, so that any position is at hand.

Several sources are mixed by weight without chance: after any number of prompts each has had its share of them, to within one
for every source before it. Within a source a pass is a permutation of its problems, drawn anew for each pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

import msgspec
import numpy as np

SHUFFLE = 0  # first word of the spawn key: the uses of a run's seed never share a stream


class Share(msgspec.Struct, frozen=True):
    """A source's part of the stream: how many problems it has, and its weight."""

    problems: int
    weight: float = 1.0


class Order:
    """The order of the problems of several sources, which stand one after the other in one list."""

    def __init__(
        self, shares: Sequence[Share], seed: int, shuffle: bool, difficulties: np.ndarray | None = None, passes: int = 0
    ):
        """With `difficulties` (float64 [problems]) the first `passes` passes, or all when 0, go from easy to hard.

        Problems of one difficulty stay in the order that they would have had.
        """
        self._weights = [Fraction(str(share.weight)) for share in shares]
        self._sizes = [share.problems for share in shares]
        self._starts = np.cumsum([0, *self._sizes])[:-1].tolist()
        self._seed, self._shuffle = seed, shuffle
        self._difficulties, self._passes = difficulties, passes
        self._pass = lru_cache(maxsize=2 * len(shares))(self._permutation)

    def index(self, position: int) -> int:
        """The index of the problem at `position`, from 0."""
        source, place = turn(position, self._weights)
        epoch, place = divmod(place, self._sizes[source])
        return self._starts[source] + int(self._pass(source, epoch)[place])

    def _permutation(self, source: int, epoch: int) -> np.ndarray:
        size = self._sizes[source]
        order = np.arange(size)
        if self._shuffle:
            # numpy keeps the raw words of a bit generator the same in every release, but not `Generator.permutation` (NEP 19).
            key = (SHUFFLE, epoch, source) if source else (SHUFFLE, epoch)
            words = np.random.Philox(np.random.SeedSequence(self._seed, spawn_key=key)).random_raw(size)
            order = np.argsort(words, kind="stable")
        if self._difficulties is not None and (self._passes == 0 or epoch < self._passes):
            start = self._starts[source]
            order = order[np.argsort(self._difficulties[start : start + size][order], kind="stable")]
        return order


def turn(position: int, weights: Sequence[Fraction]) -> tuple[int, int]:
    """(source, how many of its own came before) of the prompt at `position`.

    The first source has floor(p · w / sum of the weights) of the first p prompts; the others share what it leaves by the same
    rule. Each such count grows by 0 or 1 from one p to the next, so every position belongs to exactly one source.
    """
    left, rest = position, sum(weights, Fraction(0))
    for source, weight in enumerate(weights[:-1]):
        before = left * weight // rest
        if (left + 1) * weight // rest > before:
            return source, int(before)
        left -= int(before)
        rest -= weight
    return len(weights) - 1, left
