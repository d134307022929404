"""What replies are rewarded for."""

from __future__ import annotations

from typing import Annotated, Literal

from runtime.config.base import NonNegative, Positive, RemoteServer, Samples, Seconds, Section, TokensOr0, in_unit
from runtime.config.sandbox import Sandbox


class Rule(Section, frozen=True):
    """One reward rule. The first one decides what counts as correct in evaluations."""

    name: str
    """A built-in rule, or `FILE.py:NAME` for one of your own."""
    weight: float = 1.0
    """Factor in the sum."""
    correct: float = 1.0
    """Value when a rule that answers yes or no holds; of other rules, from this value on a sample is right in evaluations."""
    wrong: float = 0.0
    """Value when it does not hold."""


class RemoteReward(RemoteServer, frozen=True, kw_only=True):
    """A reward that a process of your own serves."""

    name: str
    """Of its column and its metric, `NAME_rewards/mean`."""
    weight: float = 1.0
    """Factor in the sum."""
    timeout: Seconds = 10.0
    """From the question to the answer, attempts to reach the server included; below `deadlines.score`."""
    batch: Samples = 64
    """Most replies in one call."""


class RewardModel(Section, frozen=True):
    """A model that scores replies, by services of its own."""

    path: str
    """A Hugging Face folder of a sequence classifier with one label, or a critic's checkpoint
    (`checkpoints/step-*/critic/model`)."""
    weight: float = 1.0
    """Factor in the sum."""
    input: Literal["auto", "tokens", "text"] = "auto"
    """What it reads: the policy's `tokens` as they are, or the conversation as `text`, by its own tokenizer and chat template;
    `auto`: tokens where both tokenizers agree."""
    max_tokens: TokensOr0 = 0
    """Of prompt and reply; a longer sample gets no score. 0: the model's positions."""


class Rewards(Section, frozen=True):
    """The reward of a sample is the weighted sum of all that is named here. Rules run in killable processes, with limits."""

    rules: list[Rule] = []
    """Without a rule, evaluations are refused."""
    remote: list[RemoteReward] = []
    """Processes of your own that give rewards."""
    model: RewardModel | None = None
    """Null: none."""
    environment: float = 1.0
    """Factor of the reward that whoever played an episode gave it; an episode that it gave none is masked out. 0: what it gives
    is not looked at."""
    workers: Positive = 1
    """Worker processes of each reward service."""
    timeout: Seconds = 10.0
    """By the clock: a rule that takes longer on one sample is killed. It may use half of this as processor time."""
    memory_bytes: Annotated[int, in_unit("bytes", ge=128 << 20)] = 384 << 20
    """What a worker may allocate in all, its imports included. A rule that loads torch needs more."""
    sandbox: Sandbox = Sandbox()
    """Where the rules `code` and `code_share` run what a reply has written."""
    cache_entries: NonNegative = 65_536
    """Values that each reward service keeps, by rule, text, label and context, about 200 bytes each; 0: none."""
    on_error: Literal["mask", "fail"] = "mask"
    """A sample on which a rule, a remote reward or the model failed: `mask` it out of the loss and count it, or `fail` the
    run."""
