"""Formats of replies: reasoning, text and tool calls. Pure, on text.

`hermes`: each call is JSON between `<tool_call>` and `</tool_call>`; several calls are parallel (Hermes, Qwen 2.5, Qwen 3).
`json`: the whole reply is `{"name": ..., "parameters": ...}` (Llama 3). `none`: calls stay part of the text.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import Raw, Struct

from runtime.gateway.conversation import Message, ToolCall

Format = Literal["hermes", "json", "none"]

OPEN, CLOSE = "<tool_call>", "</tool_call>"
THINK, THOUGHT = "<think>", "</think>"
INCOMPLETE = "\ufffd"  # a decoder writes it for bytes that are not, or not yet, UTF-8


class _Call(Struct):
    name: str
    arguments: Raw = Raw(b"")
    parameters: Raw = Raw(b"")


def read(text: str, form: Format) -> tuple[str, tuple[ToolCall, ...]]:
    """Return the text of a reply without its calls, and the calls with new ids. Invalid calls stay text. Never raises."""
    if form == "none":
        return text, ()
    if form == "json":
        call = _call(text)
        return ("", (call,)) if call else (text, ())
    calls, kept, rest = [], [], text
    while rest:
        before, opener, rest = rest.partition(OPEN)
        body, closer, rest = rest.partition(CLOSE)
        call = _call(body) if opener else None
        kept += [before] if call else [before, opener, body, closer]
        calls += [call] if call else []
    return "".join(kept).rstrip() if calls else text, tuple(calls)


def _call(text: str) -> ToolCall | None:
    try:
        found = msgspec.json.decode(text.strip(), type=_Call)
        arguments = bytes(found.arguments) or bytes(found.parameters) or b"{}"
        if arguments.startswith(b'"'):  # some models quote arguments, as OpenAI's API does
            arguments = msgspec.json.decode(arguments, type=str).encode()
        msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return None
    return ToolCall(f"call_{secrets.token_hex(12)}", found.name, arguments.decode()) if found.name else None


def settled(text: str, form: Format) -> str:
    """Return the part of a reply's text so far that no further token changes. Drop a call or its possible beginning, and an
    incomplete character. Also drop white space at the end: it is not part of the text before a call."""
    text = text.rstrip(INCOMPLETE)
    if form == "json" and text.lstrip()[:1] in ("", "{"):
        return ""
    if form == "hermes":
        text, opener, _ = text.partition(OPEN)
        if not opener:
            text = without_start_of((OPEN,), text)
    return text.rstrip()


def without_start_of(marks: Sequence[str], text: str) -> str:
    """Return the text without an end that may begin one of `marks`."""
    started = max((size for mark in marks for size in range(1, len(mark)) if text.endswith(mark[:size])), default=0)
    return text[: len(text) - started]


def part_reasoning(text: str, opened: bool) -> tuple[str, str]:
    """Return the reasoning of a reply and the text behind it. `opened`: the prompt ends within `<think>`."""
    if not opened:
        before, opener, inner = text.partition(THINK)
        if not opener or before.strip():
            return "", text
        text = inner
    reasoning, _, rest = text.partition(THOUGHT)
    return reasoning.strip(), rest.lstrip("\n")


def begin(name: str, form: Format) -> str:
    """Return the beginning of a reply that must call the tool `name` ("": any). It ends at a token boundary of the model."""
    opener, arguments = (f"{OPEN}\n", "arguments") if form == "hermes" else ("", "parameters")
    return f'{opener}{{"name": ' + (f'{json.dumps(name, ensure_ascii=False)}, "{arguments}":' if name else '"')


def write(message: Message, form: Format) -> str:
    """Return an assistant's message in the format in which a model writes it."""
    parts = [message.content] if message.content else []
    for call in message.tool_calls:
        body = begin(call.name, form) + f" {call.arguments}}}"
        parts.append(f"{body}\n{CLOSE}" if form == "hermes" else body)
    reasoning = f"{THINK}\n{message.reasoning}\n{THOUGHT}\n\n" if message.reasoning else ""
    return reasoning + "\n".join(parts)
