"""What a run is made of: its folder, the model, the prompts, and a warm-up that makes both."""

from __future__ import annotations

from runtime.config.base import (
    DType,
    Fraction,
    NonNegative,
    PassesOr0,
    Positive,
    PositiveRate,
    Problems,
    Rate,
    Samples,
    Seconds,
    Section,
    Tokens,
)


class Run(Section, frozen=True):
    """Where a run lives, and whether it goes on from an earlier one."""

    name: str
    """Names the run; a plain folder name."""
    dir: str = ""
    """The folder in which everything is written. Empty: `runs/NAME`."""
    seed: NonNegative = 1234
    """Of the order of prompts, and of every sample."""
    resume: str = "never"
    """`never`; `auto`: go on from the newest whole checkpoint in `dir`, or begin anew where there is none and nothing was
    trained; or a checkpoint's folder. A resumed run needs the same `seed`, `data.shuffle`, `data.curriculum` and training
    data."""
    overwrite: bool = False
    """A new run refuses a folder that holds another; true replaces that run. With `resume: auto` only where there is no
    checkpoint to go on from."""


class Model(Section, frozen=True):
    """The policy, and the frozen model that it is held against."""

    path: str = ""
    """The policy: a Hugging Face folder of the Llama, Qwen2 or Qwen3 family with `config.json`, safetensors and
    `tokenizer.json`. Empty: the warm-up's."""
    reference: str = ""
    """The frozen model of the KL term; its vocabulary must be the policy's. Empty: `model.path`."""
    dtype: DType = "auto"
    """What the trainer computes in. `auto`: bfloat16 on accelerators, float32 on CPUs. Master weights are float32 always; those
    that `lora` freezes stay bfloat16 where the folder declares that, the trainer then computes in it and has one rank."""
    chat_template: str = ""
    """A jinja file, for `data.prompt_type: model`. Empty: the tokenizer's own."""


class Warmup(Section, frozen=True):
    """Makes a tiny Qwen2 model and addition problems, and trains it by supervision until its greedy accuracy on held-out
    problems lies between two bounds. The result replaces `model.path`, `data.train` and `data.eval` where these are empty.
    """

    cache: str = "runs/.cache"
    """Where results are kept, under a key made of these settings (`cache` and `max_seconds` aside)."""
    hidden_size: Positive = 128
    """Of the model."""
    layers: Positive = 4
    """Of the model."""
    heads: Positive = 4
    """Attention heads of a layer."""
    kv_heads: Positive = 2
    """Key-value heads of a layer."""
    intermediate_size: Positive = 384
    """Of the model's MLPs."""
    min_operand: NonNegative = 10
    """The problems are all sums of two numbers from this one on."""
    max_operand: Positive = 49
    """The largest of these numbers."""
    eval_problems: Problems = 256
    """Held out; `a+b` and `b+a` are on the same side."""
    accuracy: Fraction = 0.42
    """From this accuracy on training stops."""
    max_accuracy: Fraction = 0.58
    """A model above it has learned too much, and is not taken."""
    forgotten_carry: Fraction = 0.7
    """The probability with which a training answer forgets its carry: what is left for reinforcement learning to mend."""
    max_seconds: Seconds = 180.0
    """Give up after."""
    learning_rate: Rate = 2e-3
    """Of the supervised training."""
    batch_size: Samples = 64
    """Of the supervised training."""
    seed: NonNegative = 7
    """Of model, problems and training."""


class RowFormat(Section, frozen=True):
    """How a row becomes a prompt and a label. A column that is null is the handler's own, "" is none."""

    handler: str = "plain"
    """How a row becomes a prompt and a label: `plain`, `gsm8k`, `alpaca`, `r1`, `math`, `math17k`, or `FILE.py:NAME`."""
    prompt_key: str | None = None
    """The column of the prompt. Null: the handler's own."""
    query_key: str | None = None
    """The column of a second part of the prompt, put in a line of its own. Null: the handler's own; `""`: none."""
    label_key: str | None = None
    """The column of the label. Null: the handler's own; `""`: none."""
    system_key: str | None = None
    """The column of the system text. Null: the handler's own; `""`: none."""
    system_prompt: str = ""
    """Put before each prompt whose row has no system text of its own."""
    additional_keys: list[str] = []
    """Columns that reward rules, remote rewards and reward models get as `extra`, by these names."""


class RowFormatChoice(Section, frozen=True):
    """The row format of one file."""

    handler: str | None = None
    """As that of `data`, which holds where this is null."""
    prompt_key: str | None = None
    """As that of `data`, which holds where this is null."""
    query_key: str | None = None
    """As that of `data`, which holds where this is null."""
    label_key: str | None = None
    """As that of `data`, which holds where this is null."""
    system_key: str | None = None
    """As that of `data`, which holds where this is null."""
    system_prompt: str | None = None
    """As that of `data`, which holds where this is null."""
    additional_keys: list[str] | None = None
    """As that of `data`, which holds where this is null."""


class Source(RowFormatChoice, frozen=True, kw_only=True):
    """One of several files to train on."""

    path: str
    """A file or folder, as `data.train` is."""
    weight: PositiveRate = 1.0
    """The share of the prompts that are this file's is its weight divided by the sum of all weights."""


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
