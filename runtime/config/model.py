"""The policy, the adapters on it, and a warm-up that makes a tiny one with its data."""

from __future__ import annotations

from typing import Literal

from runtime.config.base import DType, Fraction, NonNegative, Positive, PositiveRate, Problems, Seconds, Section

TINY_PREFIX = "tiny:"  # before the family of a tiny random model, in the place of a folder


class Model(Section, frozen=True):
    """The policy, and the frozen model that it is held against."""

    path: str = ""
    """The policy: a Hugging Face folder with `config.json`, safetensors and `tokenizer.json`, of a family that the engines
    compute. Empty: the warm-up's."""
    reference: str = ""
    """The frozen model of the KL term: what training begins with, or a teacher (`algorithm.preset: distillation`), with the
    policy's tokenizer. Empty: `model.path`."""
    dtype: DType = "auto"
    """What the trainer computes in. `auto`: bfloat16 on accelerators, float32 on CPUs. Master weights are float32 always; those
    that `lora` freezes stay bfloat16 where the folder declares that, the trainer then computes in it and has one rank, and on
    engine megatron wherever it computes in it."""
    chat_template: str = ""
    """A jinja file, for `data.prompt_type: model`. Empty: the tokenizer's own."""


class Lora(Section, frozen=True):
    """Low-rank adapters (PEFT): they alone are trained and published. What is exported has them merged."""

    rank: Positive = 16
    """Of each adapter."""
    alpha: PositiveRate = 32.0
    """What an adapter adds is scaled by alpha / rank."""
    target_modules: list[str] = []
    """Names of linear layers, such as `q_proj`, or with a part of their path: `layers.1.mlp.up_proj`. Empty: all except the
    head and the routers of experts."""


class Warmup(Section, frozen=True):
    """Makes a tiny Qwen2 model and problems, and trains it by supervision until its greedy accuracy on held-out
    problems is near `accuracy`. The result replaces `model.path`, `data.train` and `data.eval` where these are empty."""

    cache: str = "runs/.cache"
    """Where results are kept, under a key made of these settings (`cache` and `max_seconds` aside)."""
    task: Literal["sums", "lookup"] = "sums"
    """`sums`: additions. `lookup`: values of keys, which the model has to ask a tool for, in an episode of two turns."""
    eval_problems: Problems = 256
    """Held out; `a+b` and `b+a` are on the same side."""
    accuracy: Fraction = 0.42
    """From this accuracy on training stops."""
    max_seconds: Seconds = 180.0
    """Give up after."""
    seed: NonNegative = 7
    """Of model, problems and training."""
