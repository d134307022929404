"""The rewards of replies."""

from __future__ import annotations

from typing import Annotated, Literal

from runtime.config.base import NonNegative, Positive, RemoteServer, Samples, Seconds, Section, TokensOr0, in_unit
from runtime.config.sandbox import Sandbox


class Rule(Section, frozen=True):
    """A reward rule. The first rule decides what is correct in evaluations."""

    name: str
    """A built-in rule, or `FILE.py:NAME` for your own rule."""
    weight: float = 1.0
    """Factor in the sum."""
    correct: float = 1.0
    """Value if a yes-or-no rule holds. Of other rules: the least value that is correct in evaluations."""
    wrong: float = 0.0
    """Value if the rule does not hold."""


class RemoteReward(RemoteServer, frozen=True, kw_only=True):
    """A reward served by your own process."""

    name: str
    """Name of its column and its metric, `NAME_rewards/mean`."""
    weight: float = 1.0
    """Factor in the sum."""
    timeout: Seconds = 10.0
    """Of one call, including the attempts to reach the server. Below `deadlines.score`."""
    batch: Samples = 64
    """Most replies in one call."""


class RewardModel(Section, frozen=True):
    """A model that scores replies, in its own services."""

    path: str
    """A Hugging Face folder of a sequence classifier with one label, or a critic's `checkpoints/step-*/critic/model`."""
    weight: float = 1.0
    """Factor in the sum."""
    input: Literal["auto", "tokens", "text"] = "auto"
    """Input of the model. `tokens`: the policy's tokens. `text`: the conversation, by the model's own tokenizer and chat
    template. `auto`: tokens if both tokenizers agree."""
    max_tokens: TokensOr0 = 0
    """Most tokens of prompt and reply. A longer sample gets no score. 0: the model's positions."""


class Rewards(Section, frozen=True):
    """The reward of a sample is the weighted sum of these rewards. Rules run in processes with limits, which can be killed."""

    rules: list[Rule] = []
    """Evaluations need at least one rule."""
    remote: list[RemoteReward] = []
    """Your own processes that give rewards."""
    model: RewardModel | None = None
    """Null: none."""
    environment: float = 1.0
    """Factor of the reward that an agent gives its episode. An episode without such a reward is masked out. 0: ignore them."""
    workers: Positive = 1
    """Worker processes of each reward service."""
    timeout: Seconds = 10.0
    """Wall time of a rule on one sample; then it is killed. Half of it as processor time is also a limit."""
    memory_bytes: Annotated[int, in_unit("bytes", ge=128 << 20)] = 384 << 20
    """Memory limit of a worker, including imports. A rule that loads torch needs more."""
    sandbox: Sandbox = Sandbox()
    """The sandbox in which the rules `code` and `code_share` run the code of replies."""
    cache_entries: NonNegative = 65_536
    """Values that each reward service caches by rule, text, label and context, about 200 bytes each. 0: none."""
    on_error: Literal["mask", "fail"] = "mask"
    """If a rule, remote reward or the model failed on a sample: `mask` it out of the loss and count it, or `fail` the run."""
