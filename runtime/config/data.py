"""Prompts and labels, and how replies are sampled for training and in evaluations."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, field

from runtime.config.base import (
    Fraction,
    NonNegative,
    PassesOr0,
    Positive,
    PositiveRate,
    ProblemsOr0,
    Rate,
    Samples,
    SamplesOr0,
    Section,
    StepsOr0,
    Tokens,
    TokensOr0,
)

Column = Literal["prompt", "query", "label", "system", "environment"]


class RowFormat(Section, frozen=True):
    """How a row becomes a prompt and a label."""

    handler: str = "plain"
    """How a row becomes a prompt and a label: `plain`, `gsm8k`, `alpaca`, `r1`, `math`, `math17k`, `messages`
    (conversations), `task` (every column may be missing), or `FILE.py:NAME`."""
    columns: dict[Column, str] = {}
    """Names of columns: of the `prompt`, the `query` (a second part of the prompt, put in a line of its own), the `label`, the
    `system` text, and the `environment`, where rows differ. A name left out: the handler's own; `""`: none."""
    system_prompt: str = ""
    """Put before each prompt whose row has no system text of its own."""
    additional_keys: list[str] = []
    """Columns that reward rules, remote rewards and reward models get as `extra`, by these names."""
    environment: str = ""
    """Whose agent plays the rows, a name in `services.environment`. Empty: the only one there is."""


class RowFormatChoice(Section, frozen=True):
    """The row format of one file."""

    handler: str | None = None
    """As that of `data`, which holds where this is null."""
    columns: dict[Column, str] = {}
    """As that of `data`, which holds for the names left out."""
    system_prompt: str | None = None
    """As that of `data`, which holds where this is null."""
    additional_keys: list[str] | None = None
    """As that of `data`, which holds where this is null."""
    environment: str | None = None
    """As that of `data`, which holds where this is null."""


class Source(RowFormatChoice, frozen=True, kw_only=True):
    """One of several files to train on."""

    path: str
    """A file or folder, as `data.train` is."""
    weight: PositiveRate = 1.0
    """The share of the prompts that are this file's is its weight divided by the sum of all weights."""
    reference: str = ""
    """The frozen model of the KL term for this file's prompts, a teacher of its own. Empty: `model.reference`."""


class Curriculum(Section, frozen=True):
    """Easy problems first. Problems of unknown difficulty are left out."""

    key: str = "difficulty"
    """The column whose numbers say how difficult a problem is."""
    passes: PassesOr0 = 1
    """The first passes over the data that are ordered so. 0: all."""


class Data(RowFormat, frozen=True):
    """Prompts and labels: json, jsonl, Parquet or Arrow files, folders of them, and what `sluice data prepare` made."""

    train: str | list[Source] = ""
    """A json, jsonl, Parquet or Arrow file, a folder of such files, or a file that `sluice data prepare` made; or a list of
    several. Empty: the warm-up's."""
    eval: str = ""
    """A path likewise, held out: the evaluation set `held_out`. It, or `evaluation.sets`, is needed when `evaluation.every` is
    above 0. Empty: the warm-up's."""
    prompt_type: str = "model"
    """The template of prompts: `model` is the model's own chat template; `default`, `empty`, `qwen`, `qwen_r1`, `qwen_math_r1`,
    `qwen3`, `llama3`, `deepseek3` and `deepseek3_r1` are in `configs/templates.json`."""
    prompt_type_path: str = ""
    """A file of more templates, such as MindSpeed-RL's."""
    max_prompt_tokens: Tokens = 512
    """Longer prompts are left out and counted."""
    shuffle: bool = True
    """A new order for each pass; false: the file's order."""
    curriculum: Curriculum | None = None
    """Null: none."""
    allow_overlap: bool = False
    """Train although problems of an evaluation set are among those to train on."""


class Sampling(Section, frozen=True):
    """How training replies are sampled. What the filters leave of each token's distribution travels with it: log-probabilities
    of the policy and the reference, and the entropy, are of the same tokens."""

    group_size: Samples = 8
    """Replies to each prompt; at least 2 for `algorithm.advantage: group_norm`."""
    max_new_tokens: Tokens = 512
    """Of a reply, at most."""
    temperature: PositiveRate = 1.0
    """The loss and the reference use the same."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Sample from the likeliest tokens that have this probability together; 1: from all. Below 1 rollouts of engine torch."""
    top_k: NonNegative = 0
    """Sample from so many of the likeliest tokens; 0: from all. Above 0 rollouts of engine torch."""
    min_p: Fraction = 0.0
    """Leave out tokens with less than this share of the likeliest one's probability; 0: none. Above 0 rollouts of engine
    torch."""

    @property
    def filters(self) -> dict[str, Any]:
        """The fields of `SamplingParams` besides length and temperature."""
        filtered = self.top_p < 1 or self.top_k > 0 or self.min_p > 0
        return {"top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p, "keep_sets": filtered}


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
    max_new_tokens: TokensOr0 = 0
    """Of a reply, at most. 0: `sampling.max_new_tokens`."""
    before: bool = True
    """Evaluate before training, when there are held-out problems."""
    after: bool = True
    """Evaluate after training, when there are held-out problems."""
