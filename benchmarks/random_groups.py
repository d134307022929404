"""Groups of random tokens with long-tailed lengths, to measure a trainer without a rollout."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from launcher.accept.worker import random_groups
from runtime.config import Config
from runtime.types import TrainGroup

BATCHES = 2  # different ones; a measurement covers all of them, so that each has the same work
REPLY_MEDIAN, REPLY_SIGMA, REPLY_SHORTEST = 96, 0.9, 16
PROMPT_MEDIAN, PROMPT_SIGMA, PROMPT_SHORTEST = 48, 0.5, 16


class GroupLengths(NamedTuple):
    """Tokens of one group: its prompt, and each reply [n]."""

    prompt: int
    replies: list[int]

    @property
    def samples(self) -> list[int]:
        """Tokens of each sample, prompt included: its real tokens."""
        return [self.prompt + reply for reply in self.replies]


def draw_lengths(config: Config) -> list[list[GroupLengths]]:
    """Return the lengths of each batch's groups. Lognormal, clipped to `data.max_prompt_tokens` and `sampling.max_new_tokens`.
    The same for every model."""
    random = np.random.default_rng(0)

    def lognormal(median: int, sigma: float, shortest: int, longest: int, count: int) -> list[int]:
        drawn: list[int] = np.exp(random.normal(math.log(median), sigma, count)).clip(shortest, longest).astype(int).tolist()
        return drawn

    def group() -> GroupLengths:
        (prompt,) = lognormal(PROMPT_MEDIAN, PROMPT_SIGMA, PROMPT_SHORTEST, config.data.max_prompt_tokens, 1)
        limit, size = config.sampling.max_new_tokens, config.sampling.group_size
        return GroupLengths(prompt, lognormal(REPLY_MEDIAN, REPLY_SIGMA, REPLY_SHORTEST, limit, size))

    return [[group() for _ in range(config.training.groups_per_step)] for _ in range(BATCHES)]


def draw_groups(config: Config) -> list[list[TrainGroup]]:
    """Return the groups of each batch, with the lengths of `draw_lengths`."""
    return random_groups(config, draw_lengths(config))
