"""The messages of proto/remote_reward.proto, which a process of the user's serves."""

from __future__ import annotations

import msgspec


class ChatMessage(msgspec.Struct):
    role: str
    content: str


class RemoteItem(msgspec.Struct, kw_only=True):
    """One reply, and the problem that it answers; of an episode as `RuleContext` tells it."""

    text: str
    label: str
    source: str
    tokens: int
    finish_reason: str
    prompt: list[ChatMessage]
    extra: str  # a JSON object
    conversation: str = ""


class RemoteScoreRequest(msgspec.Struct):
    items: list[RemoteItem]


class RemoteResult(msgspec.Struct):
    """A value, or why there is none."""

    value: float | None = None
    error: str = ""


class RemoteScoreReply(msgspec.Struct):
    results: list[RemoteResult]
