"""The prompt stream: which problem comes when. Every position can be computed directly, so a run resumes exactly.

A *position* counts fresh prompts; epoch and place in it are `divmod(position, problems)`. An *ordinal* counts groups:
it grows with every draw, a prompt given back included, is never reused, and keys the group's random stream.
"""

from __future__ import annotations

from collections import deque
from functools import cached_property, lru_cache

import msgspec
import numpy as np
import xxhash

from runtime.data.handlers import Problem, ProblemSet
from runtime.data.tokenizer import Tokenizer
from runtime.errors import UserError

_SHUFFLE, _SAMPLING = 0, 1  # first word of the spawn key: the two uses of a run's seed never share a stream


def group_seed(run_seed: int, ordinal: int) -> int:
    """The sampling seed of the group `ordinal`, in [0, 2^63)."""
    return int(np.random.SeedSequence(run_seed, spawn_key=(_SAMPLING, ordinal)).generate_state(1, np.uint64)[0]) >> 1


class Prompts(msgspec.Struct, kw_only=True):
    """Problems with their prompts' tokens, ready for admission."""

    problems: list[Problem]
    tokens: list[np.ndarray]  # int32 [P] each, read-only
    rows: int
    dropped: dict[str, int]

    def report(self) -> str:
        return ProblemSet(problems=self.problems, rows=self.rows, dropped=self.dropped).report()


def tokenise(found: ProblemSet, tokenizer: Tokenizer, max_prompt_tokens: int, key: str = "data.train") -> Prompts:
    """Render and encode every prompt once. Longer ones are dropped and counted; UserError when none is left."""
    problems: list[Problem] = []
    tokens: list[np.ndarray] = []
    for problem, ids in zip(found.problems, tokenizer.encode_chats([p.messages for p in found.problems]), strict=True):
        if len(ids) <= max_prompt_tokens:
            ids.setflags(write=False)
            problems.append(problem)
            tokens.append(ids)
    dropped = dict(found.dropped)
    if len(problems) < len(found.problems):
        dropped[f"prompt over {max_prompt_tokens} tokens"] = len(found.problems) - len(problems)
    prompts = Prompts(problems=problems, tokens=tokens, rows=found.rows, dropped=dropped)
    if not problems:
        raise UserError(f"{key}: no prompt is left of {prompts.report()}; see data.max_prompt_tokens")
    return prompts


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
    fingerprint: int  # of the problems' messages and labels


class PromptStream:
    """Endless draws from `problems`, shuffled anew each epoch. Not thread-safe: the coordinator's loop owns it."""

    def __init__(self, problems: list[Problem], seed: int, shuffle: bool = True):
        if not problems:
            raise ValueError("a stream needs at least one problem")
        self.problems = problems
        self.seed = seed
        self.shuffle = shuffle
        self._position = 0
        self._ordinal = 0
        self._returned: deque[int] = deque()
        self._order = lru_cache(maxsize=2)(self._permutation)

    def index(self, position: int) -> int:
        """The index of the problem at a fresh `position`: a pure function of (seed, shuffle, number of problems)."""
        epoch, place = divmod(position, len(self.problems))
        return int(self._order(epoch)[place]) if self.shuffle else place

    def at(self, position: int) -> Problem:
        """The problem at a fresh `position`."""
        return self.problems[self.index(position)]

    @property
    def epoch(self) -> float:
        """Passes over the data so far."""
        return self._position / len(self.problems)

    def draw(self) -> Draw:
        """The next group: of a prompt given back when there is one, else of the next fresh prompt."""
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
        if not 0 <= index < len(self.problems):
            raise ValueError(f"problem {index} of {len(self.problems)}")
        self._returned.append(index)

    def state(self) -> StreamState:
        return StreamState(
            position=self._position,
            ordinal=self._ordinal,
            returned=list(self._returned),
            seed=self.seed,
            shuffle=self.shuffle,
            problems=len(self.problems),
            fingerprint=self._fingerprint,
        )

    def restore(self, state: StreamState) -> None:
        """Go on from `state`. Raises UserError when the order of prompts would not be the one the state belongs to."""
        for key, then, now in (
            ("run.seed", state.seed, self.seed),
            ("data.shuffle", state.shuffle, self.shuffle),
            ("data.train: number of problems", state.problems, len(self.problems)),
            ("data.train: fingerprint of the problems", state.fingerprint, self._fingerprint),
        ):
            if then != now:
                raise UserError(f"{key} is {now}, but the run to resume has {then}: prompts would be repeated or skipped")
        self._position, self._ordinal = state.position, state.ordinal
        self._returned = deque(state.returned)

    def _permutation(self, epoch: int) -> np.ndarray:
        # numpy keeps the raw words of a bit generator the same in every release, but not `Generator.permutation` (NEP 19).
        words = np.random.Philox(np.random.SeedSequence(self.seed, spawn_key=(_SHUFFLE, epoch))).random_raw(len(self.problems))
        return np.argsort(words, kind="stable")

    @cached_property
    def _fingerprint(self) -> int:
        return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode([(p.messages, p.label) for p in self.problems]))
