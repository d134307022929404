"""A call of the policy and what comes of it, whichever API's words it was made in.

HTTP ── dialects ──► PolicyCall ──► episodes, which keep the graph ──► Completion ── dialects ──► HTTP
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from msgspec import Struct

from runtime.errors import SluiceError
from runtime.types import RoutedExperts, TokenSets

ReplyEnd = Literal["stop", "length", "tool_calls"]
TOO_LONG = "context_length_exceeded"  # OpenAI's code of such an error

# What conversations keep has `gc=False`: nothing in it knows itself, and a gateway has more of it than could be looked through
# for such things while programs wait.


class Refused(SluiceError):
    """A request that is answered with an error: its HTTP `status`, and the field `param` where one is at fault. `retry_after`:
    seconds until another try may succeed. `code`: OpenAI's, as TOO_LONG is."""

    def __init__(self, status: int, message: str, param: str = "", retry_after: float | None = None, code: str = ""):
        super().__init__(message)
        self.status, self.param, self.retry_after, self.code = status, param, retry_after, code


class ToolCall(Struct, frozen=True, gc=False):
    """`arguments` are JSON text, as they were written."""

    id: str
    name: str
    arguments: str


class Message(Struct, frozen=True, gc=False):
    """`reasoning` is what the assistant thought, where that is told apart; clients may leave it out when they send it back."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""  # of a tool's message: the call that it answers
    name: str = ""
    reasoning: str = ""


class Tool(Struct, frozen=True, gc=False):
    """`parameters` is a JSON schema."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}


class PolicyCall(Struct, frozen=True, kw_only=True):
    """What the policy is asked. The prompt is `messages`, or `tokens`, or `text`. None: the run's own."""

    messages: tuple[Message, ...] = ()
    tokens: tuple[int, ...] | None = None
    text: str | None = None
    tools: tuple[Tool, ...] = ()
    tool_choice: str = "auto"  # or "none", "required", "function:NAME"
    parallel_tool_calls: bool = True
    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    branch: str = ""  # a part of the episode that has a name
    repeats: str = ""  # what makes another request the same call: "key:" and its idempotency key, else "body:" and a digest


class PolicyReply(Struct, frozen=True, gc=False):
    """One of the n replies to a call, as it was sampled, a stop token included. `stop`: the stop text that ended it."""

    message: Message
    tokens: np.ndarray  # int32
    logprobs: np.ndarray  # float32
    versions: np.ndarray  # int64, PolicyVersion.pack()
    end: ReplyEnd
    stop: str = ""
    kept: TokenSets | None = None  # as of `Sample`, and so are those
    experts: RoutedExperts | None = None


class Completion(Struct, frozen=True, kw_only=True):
    """The answer to a call. `id` is what a reward may name. `prompt`: int32, what the engine was given."""

    id: str
    created: float  # seconds since the epoch
    model: str
    prompt: np.ndarray
    replies: tuple[PolicyReply, ...]


Told = Callable[[str, int, str], None]
"""Is told a completion's id, the index of one of its replies, and its visible text so far, which only grows."""
