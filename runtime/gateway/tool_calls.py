"""How a reply is written: what it reasons, its text, and the calls of tools. Pure, on text.

`hermes`: each call is JSON between `<tool_call>` and `</tool_call>`, and several are parallel (Hermes, Qwen 2.5, Qwen 3).
`json`: the whole reply is `{"name": ..., "parameters": ...}` (Llama 3). `none`: calls are not told apart from text.
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
INCOMPLETE = "\ufffd"  # what a decoder gives for bytes that are no UTF-8, or not yet


class _Call(Struct):
    name: str
    arguments: Raw = Raw(b"")
    parameters: Raw = Raw(b"")


def read(text: str, form: Format) -> tuple[str, tuple[ToolCall, ...]]:
    """The text of a reply without its calls, and these, with new ids. What is no call stays text. Raises nothing."""
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
        if arguments.startswith(b'"'):  # some models quote them, as OpenAI's API does
            arguments = msgspec.json.decode(arguments, type=str).encode()
        msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return None
    return ToolCall(f"call_{secrets.token_hex(12)}", found.name, arguments.decode()) if found.name else None


def settled(text: str, form: Format) -> str:
    """The part of a reply's text so far that is text and will be whatever follows: nothing of a call, nor of what may become
    one, no white space at the end, which is no part of the text before a call, and no character that is not whole."""
    text = text.rstrip(INCOMPLETE)
    if form == "json" and text.lstrip()[:1] in ("", "{"):
        return ""
    if form == "hermes":
        text, opener, _ = text.partition(OPEN)
        if not opener:
            text = without_start_of((OPEN,), text)
    return text.rstrip()


def without_start_of(marks: Sequence[str], text: str) -> str:
    """The text, short of an end with which one of `marks` may begin."""
    started = max((size for mark in marks for size in range(1, len(mark)) if text.endswith(mark[:size])), default=0)
    return text[: len(text) - started]


def part_reasoning(text: str, opened: bool) -> tuple[str, str]:
    """What a reply reasons, and what follows. `opened`: its prompt ends within `<think>`."""
    if not opened:
        before, opener, inner = text.partition(THINK)
        if not opener or before.strip():
            return "", text
        text = inner
    reasoning, _, rest = text.partition(THOUGHT)
    return reasoning.strip(), rest.lstrip("\n")


def begin(name: str, form: Format) -> str:
    """How a reply begins that has to call the tool `name`; "": any. It ends where tokens end when the model writes it."""
    opener, arguments = (f"{OPEN}\n", "arguments") if form == "hermes" else ("", "parameters")
    return f'{opener}{{"name": ' + (f'{json.dumps(name, ensure_ascii=False)}, "{arguments}":' if name else '"')


def write(message: Message, form: Format) -> str:
    """An assistant's message as a model writes it."""
    parts = [message.content] if message.content else []
    for call in message.tool_calls:
        body = begin(call.name, form) + f" {call.arguments}}}"
        parts.append(f"{body}\n{CLOSE}" if form == "hermes" else body)
    reasoning = f"{THINK}\n{message.reasoning}\n{THOUGHT}\n\n" if message.reasoning else ""
    return reasoning + "\n".join(parts)
