"""Conversations that test chat templates: tools, thinking, system prompts, parallel calls, Unicode, empty and long ones."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import msgspec
from msgspec import Struct

from runtime.gateway.conversation import Message, Tool

_NUMBER = {"type": "number"}
_TOOLS = (
    Tool("add", "Adds two numbers.", {"type": "object", "properties": {"a": _NUMBER, "b": _NUMBER}, "required": ["a", "b"]}),
    Tool(
        "look_up", "Finds a fact.", {"type": "object", "properties": {"query": {"type": "string", "description": "Of what."}}}
    ),
)


class ProbeConversation(Struct, frozen=True):
    """A conversation that begins with a question and ends with a reply."""

    name: str
    with_tools: bool
    messages: tuple[Message, ...]

    @property
    def tools(self) -> tuple[Tool, ...]:
        return _TOOLS if self.with_tools else ()


@lru_cache(maxsize=1)
def conversations() -> list[ProbeConversation]:
    """Return the forty conversations of `conversations.jsonl`."""
    lines = Path(__file__).with_name("conversations.jsonl").read_bytes()
    return msgspec.json.Decoder(ProbeConversation).decode_lines(lines)
