"""What things cost in a simulation: lengths in tokens, durations in seconds. Pure: who draws brings the chance."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct


class Distribution(Protocol):
    def draw(self, chance: random.Random) -> float:
        """One value."""


class ReplyLengths(Struct, frozen=True):
    """Of replies in tokens, by group, as they were measured: those of one prompt are alike."""

    groups: Sequence[Sequence[int]]

    def draw_group(self, chance: random.Random, size: int) -> list[float]:
        group = self.groups[chance.randrange(len(self.groups))]
        return [float(chance.choice(group)) for _ in range(size)]


class Fixed(Struct, frozen=True):
    value: float

    def draw(self, chance: random.Random) -> float:
        return self.value


class LogNormal(Struct, frozen=True):
    median: float
    sigma: float  # of the logarithm

    def draw(self, chance: random.Random) -> float:
        return self.median * math.exp(self.sigma * chance.gauss(0.0, 1.0))


class Pareto(Struct, frozen=True):
    """P(x > v) = (least / v)^shape, cut at `most`."""

    least: float
    shape: float
    most: float = math.inf

    def draw(self, chance: random.Random) -> float:
        return min(self.most, self.least * chance.paretovariate(self.shape))


class Costs(Struct, frozen=True, kw_only=True):
    """Of one run. Seconds, unless it says otherwise; a decode step of B sequences takes `decode_step + B · decode_sequence`."""

    prompt_tokens: int = 16
    reply_tokens: Distribution | ReplyLengths = LogNormal(8.0, 0.5)  # cut at sampling.max_new_tokens
    length_scale: float = 1.0  # of all of them
    decode_step: float = 1e-3
    decode_sequence: float = 5e-5
    prefill_token: float = 1e-5
    score: Distribution = Fixed(2e-3)  # of a group, by one of `rewards.workers`
    reference_token: float = 1e-5
    train_token: float = 5e-5
    update: float = 2e-3  # of the optimizer, whatever the batch
    weights_bytes: float = 4e6
    bandwidth: float = 1e9  # bytes a second, from the trainer to each rollout
    swap: float = 1e-3  # of a rollout to a version that it has
    save: float = 1e-2
    start: Distribution = Fixed(2.0)  # of a process, until it registers
    delay: Distribution = Fixed(2e-4)  # of a message, one way
    storage: Distribution = Fixed(5e-4)  # of what the coordinator writes or reads
    coordinator_message: float = 0.0  # of the coordinator's one thread, for each answer that it is given
    coordinator_byte: float = 0.0  # of that thread, for all that is done with a byte of a finished group
    cores: int = 0  # of a node, which all its processes share; 0: each has what it computes on
    tools: Distribution = Fixed(0.0)  # of a reply, which holds no slot meanwhile
    lend: float | None = None  # until the trainer's devices generate, or train again; None: they only train

    def lengths(self, chance: random.Random, size: int, limit: int) -> list[int]:
        """Of the replies of one group, int in 1 … `limit`."""
        drawn = (
            self.reply_tokens.draw_group(chance, size)
            if isinstance(self.reply_tokens, ReplyLengths)
            else [self.reply_tokens.draw(chance) for _ in range(size)]
        )
        return [max(1, min(limit, round(length * self.length_scale))) for length in drawn]
