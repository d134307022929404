"""How replies are sampled, for training and in evaluations."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, field

from runtime.config.base import (
    Fraction,
    NonNegative,
    Positive,
    ProblemsOr0,
    Rate,
    Samples,
    SamplesOr0,
    Section,
    StepsOr0,
    Tokens,
    TokensOr0,
)
from runtime.config.material import RowFormatChoice


class Sampling(Section, frozen=True):
    """How training replies are sampled. Training uses temperature alone, so that both engines compute one distribution."""

    group_size: Samples = 8
    """Replies to each prompt; at least 2 for `algorithm.advantage: group_norm`."""
    max_new_tokens: Tokens = 512
    """Of a reply, at most."""
    temperature: Annotated[float, Meta(gt=0)] = 1.0
    """The loss and the reference use the same."""


class EvaluationSet(RowFormatChoice, frozen=True, kw_only=True):
    """One data set of an evaluation, besides `data.eval`."""

    name: str
    """Letters, digits, `_`, `.` and `-`: part of file names and metrics. `held_out` is the set of `data.eval`."""
    path: str
    """A file or folder, as `data.eval` is."""
    problems: ProblemsOr0 | None = None
    """The first so many are asked; 0: all. Null: `evaluation.problems`."""
    samples: SamplesOr0 = 0
    """Replies to each problem. 0: `evaluation.samples`."""
    k: list[Positive] = []
    """Which pass@k and maj@k are reported. Empty: `evaluation.k`."""
    temperature: Rate | None = None
    """0 is greedy. Null: `evaluation.temperature`."""
    max_new_tokens: TokensOr0 = 0
    """Of a reply, at most; not above `evaluation.max_new_tokens`, which it is when 0."""


class Evaluation(Section, frozen=True):
    """Evaluation before, during and after training, or by `sluice eval` alone."""

    every: StepsOr0 = 0
    """Steps between evaluations during training; 0: none."""
    sets: list[EvaluationSet] = []
    """Data sets besides `data.eval`."""
    problems: ProblemsOr0 = 0
    """The first so many of each set are asked; 0: all."""
    samples: Samples = 1
    """Replies to each problem; accuracy is over all of them."""
    k: list[Positive] = field(default_factory=lambda: [1])
    """Which pass@k and maj@k are reported; at most `samples`, and above 1 only with a `temperature` above 0."""
    temperature: Rate = 0.0
    """0 is greedy."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Sample from the likeliest tokens that have this probability together; 1: from all."""
    top_k: NonNegative = 0
    """Sample from so many of the likeliest tokens; 0: from all."""
    min_p: Fraction = 0.0
    """Leave out tokens with less than this share of the likeliest one's probability; 0: none."""
    max_new_tokens: TokensOr0 = 0
    """Of a reply, at most. 0: `sampling.max_new_tokens`."""
    before: bool = True
    """Evaluate before training, when there are held-out problems."""
    after: bool = True
    """Evaluate after training, when there are held-out problems."""
