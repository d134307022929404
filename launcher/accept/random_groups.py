"""Groups to train on without a rollout: random tokens, of long-tailed lengths. For what measures or checks a trainer alone."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np

from runtime import codec
from runtime.config import Config
from runtime.types import GroupPayload, PolicyVersion, Sample, TrainGroup

BATCHES = 2  # different ones; what measures goes over all of them, so that everything has the same work
REPLY_MEDIAN, REPLY_SIGMA, REPLY_SHORTEST = 96, 0.9, 16
PROMPT_MEDIAN, PROMPT_SIGMA, PROMPT_SHORTEST = 48, 0.5, 16


class GroupLengths(NamedTuple):
    """Tokens of one group: its prompt, and each reply [n]."""

    prompt: int
    replies: list[int]

    @property
    def samples(self) -> list[int]:
        """Each sample's tokens, prompt included: what counts as real, once a sample."""
        return [self.prompt + reply for reply in self.replies]


def draw_lengths(config: Config) -> list[list[GroupLengths]]:
    """Of the groups of each batch. Lognormal, clipped to what the configuration allows: `data.max_prompt_tokens` and
    `sampling.max_new_tokens`. The same for every model."""
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
    """The groups of each batch, as long as `draw_lengths` says. Random tokens, each about as probable under the policy that
    sampled it as any other of the vocabulary; every second sample is rewarded."""
    vocabulary = json.loads((Path(config.model.path) / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    random = np.random.default_rng(1)

    def reply(length: int) -> Sample:
        return Sample(
            tokens=random.integers(0, vocabulary, length).astype(np.int32),
            loss_mask=np.ones(length, np.uint8),
            logprobs=random.normal(-math.log(vocabulary), 0.3, length).astype(np.float32),
            versions=np.full(length, PolicyVersion(0, 0).pack(), np.int64),
            finish_reason="stop",
        )

    def group(number: int, lengths: GroupLengths) -> TrainGroup:
        prompt = random.integers(0, vocabulary, lengths.prompt).astype(np.int32)
        payload = GroupPayload.of(number, prompt, [reply(length) for length in lengths.replies])
        size = len(lengths.replies)
        return TrainGroup(
            group_id=number,
            tokens=sum(lengths.samples),
            payload=codec.encode(payload),
            rewards=np.arange(size, dtype=np.float32) % 2,
            valid=np.ones(size, np.uint8),
        )

    return [[group(number, lengths) for number, lengths in enumerate(batch)] for batch in draw_lengths(config)]
