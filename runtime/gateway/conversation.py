"""A call of the policy and its answer, independent of the API that the client uses.

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
TOO_LONG = "context_length_exceeded"  # OpenAI's error code for a conversation that is too long

# Structs that conversations keep have `gc=False`. They form no reference cycles. A gateway has so many of them that garbage
# collection would make programs wait.


class Refused(SluiceError):
    """A request that gets an error: its HTTP `status` and, if a field is wrong, the field `param`. `retry_after`: seconds until
    a retry may succeed. `code`: an error code of OpenAI, such as TOO_LONG."""

    def __init__(self, status: int, message: str, param: str = "", retry_after: float | None = None, code: str = ""):
        super().__init__(message)
        self.status, self.param, self.retry_after, self.code = status, param, retry_after, code


class ToolCall(Struct, frozen=True, gc=False):
    """A tool call of the assistant. `arguments` is JSON text, unchanged."""

    id: str
    name: str
    arguments: str


class Message(Struct, frozen=True, gc=False):
    """One message. `reasoning`: the assistant's thoughts if the format separates them; clients may drop them later."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""  # in a tool's message: the call that the message answers
    name: str = ""
    reasoning: str = ""


class Tool(Struct, frozen=True, gc=False):
    """A tool that the policy may call. `parameters` is a JSON schema."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}


class PolicyCall(Struct, frozen=True, kw_only=True):
    """A request to the policy. The prompt is `messages`, `tokens` or `text`. A None setting: the run's value."""

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
    branch: str = ""  # the name of a part of the episode
    repeats: str = ""  # equal for repeats of one request: "key:" and the idempotency key, else "body:" and a digest


class PolicyReply(Struct, frozen=True, gc=False):
    """One of the n replies to a call, as sampled, with its stop token. `stop`: the stop text that ended the reply."""

    message: Message
    tokens: np.ndarray  # int32
    logprobs: np.ndarray  # float32
    versions: np.ndarray  # int64, PolicyVersion.pack()
    end: ReplyEnd
    stop: str = ""
    kept: TokenSets | None = None  # `kept` and `experts`: as in `Sample`
    experts: RoutedExperts | None = None
    malformed: bool = False  # a tool call begins in the reply that cannot be read


class Completion(Struct, frozen=True, kw_only=True):
    """The answer to a call. A reward may name its `id`. `prompt`: int32, the input of the engine."""

    id: str
    created: float  # seconds since the epoch
    model: str
    prompt: np.ndarray
    replies: tuple[PolicyReply, ...]


OnText = Callable[[str, int, Message], None]
"""Receives the id of a completion, the index of a reply, and this reply's message so far. Its reasoning, content and tool calls
only grow."""
