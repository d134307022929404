"""The prompt stream: the order of problems. Every position can be computed directly, so a run resumes exactly.

A *position* counts fresh prompts; `PromptStream.index` says which problem stands there. An *ordinal* counts groups:
it grows with every draw, a prompt given back included, is never reused, and keys the group's random stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np
import xxhash

from runtime.config import Curriculum
from runtime.data.handlers import Problem
from runtime.errors import UserError

# Several sources are mixed by weight without chance: after any number of prompts each source has had its share, to within
# one for every source before it. Within a source a pass is a permutation of its problems, drawn anew for each pass.

SHUFFLE = 0  # first word of the spawn key: the uses of a run's seed never share a stream


class Share(msgspec.Struct, frozen=True):
    """A source's part of the stream: how many problems it has, and its weight."""

    problems: int
    weight: float = 1.0


def turn(position: int, weights: Sequence[Fraction]) -> tuple[int, int]:
    """Return the source of the prompt at `position`, and how many prompts of this source came before.

    The first source has floor(p · w / sum of the weights) of the first p prompts; the other sources share the rest by the same
    rule. Each count grows by 0 or 1 from one p to the next, so every position belongs to exactly one source."""
    left, rest = position, sum(weights, Fraction(0))
    for source, weight in enumerate(weights[:-1]):
        before = left * weight // rest
        if (left + 1) * weight // rest > before:
            return source, int(before)
        left -= int(before)
        rest -= weight
    return len(weights) - 1, left


_SAMPLING = SHUFFLE + 1  # first word of the spawn key


def group_seed(run_seed: int, ordinal: int) -> int:
    """Return the sampling seed of the group `ordinal`, in [0, 2^63)."""
    return int(np.random.SeedSequence(run_seed, spawn_key=(_SAMPLING, ordinal)).generate_state(1, np.uint64)[0]) >> 1


class Draw(msgspec.Struct, frozen=True):
    """One group to admit: its ordinal, the problem's index, and the seed of its samples."""

    ordinal: int
    index: int
    seed: int


class StreamState(msgspec.Struct, kw_only=True):
    """What a checkpoint keeps of the stream."""

    position: int  # the next fresh prompt
    ordinal: int  # the next group
    returned: list[int]  # problem indices given back, the first to be served first
    seed: int
    shuffle: bool
    problems: int
    fingerprint: int  # of the problems' messages and labels; with a curriculum of their difficulties too
    shares: list[Share] = []
    curriculum: Curriculum | None = None


class PromptStream:
    """Endless draws from `problems`, shuffled anew each pass. Not thread-safe: the coordinator's loop owns it."""

    def __init__(
        self,
        problems: list[Problem],
        seed: int,
        shuffle: bool = True,
        shares: Sequence[Share] = (),
        curriculum: Curriculum | None = None,
    ):
        """Take the `shares` of several sources; without shares all problems are of one source. With a curriculum the first so
        many passes, or all, go from easy to hard; equally difficult problems keep the order that they would have otherwise."""
        self.problems = problems
        self.seed = seed
        self.shuffle = shuffle
        self.shares = list(shares)
        self.curriculum = curriculum
        self._position = 0
        self._ordinal = 0
        self._returned: deque[int] = deque()
        sizes = [share.problems for share in shares] or [len(problems)]
        self._places = [range(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]  # of each source
        self._weights = [Fraction(str(share.weight)) for share in shares] or [Fraction(1)]
        self._difficulties = np.array([problem.difficulty for problem in problems])
        self._pass = lru_cache(maxsize=2 * len(sizes))(self._permutation)

    def index(self, position: int) -> int:
        """Return the index of the problem at a fresh `position`: a pure function of the constructor's arguments."""
        source, place = turn(position, self._weights)
        epoch, place = divmod(place, len(self._places[source]))
        return int(self._pass(source, epoch)[place])

    def _permutation(self, source: int, epoch: int) -> np.ndarray:
        """Return the indices of a source's problems in the order of a pass."""
        order = np.array(self._places[source])
        if self.shuffle:
            # numpy keeps the raw words of a bit generator the same in every release, but not `Generator.permutation` (NEP 19).
            key = (SHUFFLE, epoch, source) if source else (SHUFFLE, epoch)
            words = np.random.Philox(np.random.SeedSequence(self.seed, spawn_key=key)).random_raw(len(order))
            order = order[np.argsort(words, kind="stable")]
        if self.curriculum is not None and (self.curriculum.passes == 0 or epoch < self.curriculum.passes):
            order = order[np.argsort(self._difficulties[order], kind="stable")]
        return order

    def draw(self) -> Draw:
        """Return the next group: of a returned prompt if there is one, else of the next fresh prompt."""
        if self._returned:
            index = self._returned.popleft()
        else:
            index = self.index(self._position)
            self._position += 1
        ordinal = self._ordinal
        self._ordinal += 1
        return Draw(ordinal, index, group_seed(self.seed, ordinal))

    def give_back(self, index: int) -> None:
        """Serve problem `index` again before fresh ones, after those given back earlier."""
        self._returned.append(index)

    def lose(self, problems: Sequence[int], following: int) -> None:
        """Serve these problems, whose groups are lost, before fresh ones, with ordinals from `following` on at least."""
        for index in problems:
            self.give_back(index)
        self._ordinal = max(self._ordinal, following)

    def state(self) -> StreamState:
        return StreamState(
            position=self._position,
            ordinal=self._ordinal,
            returned=list(self._returned),
            seed=self.seed,
            shuffle=self.shuffle,
            problems=len(self.problems),
            fingerprint=self._fingerprint,
            shares=self.shares,
            curriculum=self.curriculum,
        )

    def restore(self, state: StreamState) -> None:
        """Go on from `state`. Raises UserError if the order of prompts would not be that of the state."""
        for key, then, now in (
            ("run.seed", state.seed, self.seed),
            ("data.shuffle", state.shuffle, self.shuffle),
            ("data.train: number of problems", state.problems, len(self.problems)),
            ("data.train: problems and weight of each source", _described(state.shares), _described(self.shares)),
            ("data.curriculum", _easy_first(state.curriculum), _easy_first(self.curriculum)),
            ("data.train: fingerprint of the problems", state.fingerprint, self._fingerprint),
        ):
            if then != now:
                raise UserError(f"{key} is {now}, but the run to resume has {then}: prompts would be repeated or skipped")
        self._position, self._ordinal = state.position, state.ordinal
        self._returned = deque(state.returned)

    @cached_property
    def _fingerprint(self) -> int:
        if self.curriculum is None:
            return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode([_identity(each) for each in self.problems]))
        hard = [(*_identity(each), each.difficulty) for each in self.problems]
        return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(hard))


def _identity(problem: Problem) -> tuple[Any, ...]:
    return (problem.messages, problem.label, *((problem.environment, problem.extra) if problem.environment else ()))


def _described(shares: Sequence[Share]) -> str:
    return ", ".join(f"{share.problems} · {share.weight:g}" for share in shares) or "one source"


def _easy_first(curriculum: Curriculum | None) -> str:
    return "none" if curriculum is None else f"of {curriculum.passes} passes by {curriculum.key!r}"
