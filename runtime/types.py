"""What travels between the roles: versions, prompts, samples, scores.

Arrays are numpy, little-endian, one-dimensional. R is the length of a reply (all its segments), P of a prompt,
n the number of samples in a group. The coordinator forwards `GeneratedGroup.payload` without decoding it.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np

from runtime.errors import InvalidMessage

SCHEMA_VERSION = 1

FinishReason = Literal["stop", "length", "abort"]
Purpose = Literal["train", "eval", "probe"]


class PolicyVersion(msgspec.Struct, frozen=True, order=True, array_like=True):
    """Names weights, never reused: a trainer restarted from a checkpoint begins a new incarnation."""

    incarnation: int = 0
    step: int = 0

    def pack(self) -> int:
        """The version as one int64, ordered like the pair."""
        return self.incarnation << 32 | self.step

    @classmethod
    def unpack(cls, packed: int) -> PolicyVersion:
        return cls(packed >> 32, packed & 0xFFFFFFFF)

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.step}"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to sample. Temperature 0 is greedy; top_p 1, top_k 0 and min_p 0 switch the filters off."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()


class GroupRequest(msgspec.Struct, kw_only=True):
    """Generate `n` replies to one prompt. Sample i uses the random stream of `(seed, first + i)` whatever else is there. A
    probe goes before all that wait, into a slot that is kept for it."""

    group_id: int
    prompt: np.ndarray  # int32 [P]
    n: int
    seed: int
    first: int = 0  # where a prompt's replies are asked for in parts, what came before this one
    sampling: SamplingParams
    purpose: Purpose = "train"


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """A run of `length` tokens that the model sampled or that an environment inserted."""

    source: Literal["model", "environment"]
    length: int


class Sample(msgspec.Struct, kw_only=True):
    """One reply. Where a segment came from the environment, mask and log-probability are 0."""

    tokens: np.ndarray  # int32 [R]; ends with the stop token when finish_reason is "stop"
    loss_mask: np.ndarray  # uint8 [R]
    logprobs: np.ndarray  # float32 [R], of the distribution sampled from
    versions: np.ndarray  # int64 [R], PolicyVersion.pack()
    segments: list[Segment]
    finish_reason: FinishReason


class GroupPayload(msgspec.Struct, kw_only=True):
    """The bulk of a group: what reward, reference and trainer decode and the coordinator does not."""

    group_id: int
    prompt: np.ndarray  # int32 [P]
    samples: list[Sample]

    def check(self, vocabulary: int) -> None:
        """Raises InvalidMessage for a group without a prompt, or with token ids outside of a vocabulary of so many."""
        if not len(self.prompt):
            raise InvalidMessage(f"group {self.group_id}: the prompt is empty")
        if outside(np.concatenate([self.prompt, *(sample.tokens for sample in self.samples)]), vocabulary):
            raise InvalidMessage(f"group {self.group_id}: token ids outside of 0..{vocabulary - 1}")


def outside(tokens: np.ndarray, vocabulary: int) -> bool:
    """Whether one of these token ids is not in a vocabulary of so many."""
    return len(tokens) > 0 and bool(tokens.min() < 0 or tokens.max() >= vocabulary)


class GeneratedGroup(msgspec.Struct, kw_only=True):
    """A finished group as the coordinator sees it: a header and an opaque payload (`codec.encode(GroupPayload)`)."""

    group_id: int
    prompt_tokens: int
    response_tokens: list[int]  # [n]
    truncated: int  # samples that ended by length
    oldest: PolicyVersion  # over all model tokens of the group
    newest: PolicyVersion
    payload: bytes


class ScoreRequest(msgspec.Struct, kw_only=True):
    """Score the replies of one group against its label."""

    group_id: int
    label: str
    payload: bytes
    source: str = ""  # the data source, for rules that differ by it
    answers: bool = False  # whether the replies' final answers are wanted
    messages: list[dict[str, str]] = []  # the problem as a conversation, for those who do not read the policy's tokens
    extra: dict[str, Any] = {}  # other columns of its row, by the names in data.additional_keys: JSON values


REWARD_MODEL = "reward_model"  # the column of the reward model's scores


class Scores(msgspec.Struct, kw_only=True):
    """Rewards of one group. `valid[i]` is 0 when a rule failed on sample i: masked out of the loss, never a silent 0."""

    group_id: int
    rewards: np.ndarray  # float32 [n], the weighted sum
    valid: np.ndarray  # uint8 [n]
    rules: dict[str, np.ndarray] = {}  # each rule's own value, float32 [n]; remote rewards and the model have theirs
    errors: dict[str, int] = {}  # counts by reason, e.g. {"timeout": 1}
    answers: list[str | None] = []  # [n] where they were asked for and the first rule names answers; None: it found none


class LogprobRequest(msgspec.Struct, kw_only=True):
    """Compute the log-probabilities of one group's replies under the service's model at `temperature`."""

    group_id: int
    payload: bytes
    temperature: float = 1.0


class Logprobs(msgspec.Struct, kw_only=True):
    """Log-probabilities of one group, its samples' replies one after the other."""

    group_id: int
    values: np.ndarray  # float32 [sum of R]


class ValueRequest(msgspec.Struct, kw_only=True):
    """Compute the critic's values of one group."""

    group_id: int
    tokens: int  # as in TrainGroup
    payload: bytes


class Values(msgspec.Struct, kw_only=True):
    """The critic's values of one group, its samples' replies one after the other: of the state before each token. 0 where
    the loss mask is 0."""

    group_id: int
    values: np.ndarray  # float32 [sum of R]


class TrainGroup(msgspec.Struct, kw_only=True):
    """One group with everything that trainer and critic need. `payload`, `reference` and `values` are still encoded."""

    group_id: int
    tokens: int  # of all its samples, prompts included: what balances the load over ranks
    payload: bytes
    rewards: np.ndarray  # float32 [n]
    valid: np.ndarray  # uint8 [n]
    reference: bytes | None = None  # codec.encode(Logprobs)
    values: bytes | None = None  # codec.encode(Values)
    mini_batch: int = 0  # which of the step's updates it is for


class StepResult(msgspec.Struct, kw_only=True):
    """What one optimizer step reports. `metrics` are already reduced over the trainer's ranks."""

    metrics: dict[str, float]
    seconds: float  # engine time of the step, waiting excluded
    probes: list[float] = []  # of each probe, in nats: the mean |rollout's − trainer's log-probability|
