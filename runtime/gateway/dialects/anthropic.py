"""Anthropic's messages: POST /v1/messages. https://docs.anthropic.com/en/api/messages, as in the Python package 2.14."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
from msgspec import field

from runtime.gateway.conversation import Completion, Message, PolicyCall, PolicyReply, Refused, Tool, ToolCall
from runtime.gateway.dialects import fields
from runtime.gateway.dialects.fields import (
    Asked,
    PartEvents,
    StreamedPart,
    Strict,
    decode,
    event,
    one_of,
    part_text,
    parts_of,
    read,
    text_of,
    wrong,
)
from runtime.gateway.dialects.openai import choice_of


class _ToolChoice(Strict, frozen=True):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool = False


class _MessagesRequest(Strict, frozen=True, kw_only=True):
    # One model is served under any name. Fields about storing, caching and billing do not change the answer.
    unused = "model metadata service_tier cache_control inference_geo user_profile_id workspace_id"
    neutral: ClassVar = {"mcp_servers": ([],), "output_config": ({},), "speed": ("standard",)}
    max_tokens: fields.Count
    messages: list[Any]
    system: Any = None
    stop_sequences: fields.StopTexts = ()
    stream: bool = False
    temperature: fields.NonNegative | None = None
    top_p: fields.Share | None = None
    top_k: fields.TopK | None = None
    thinking: dict[str, Any] = field(default_factory=dict)
    tools: tuple[Any, ...] = ()
    tool_choice: _ToolChoice = _ToolChoice("auto")
    thread: Any = None


class _Turn(Strict, frozen=True):
    role: str
    content: Any = None


class _Block(Strict, frozen=True):
    unused = "type cache_control caller"


class _ToolUse(_Block, frozen=True):
    id: str
    name: str
    input: dict[str, Any]


class _ToolResult(_Block, frozen=True):
    unused = f"{_Block.unused} is_error"  # the model reads only `content`
    tool_use_id: str
    content: Any = None


class _Thinking(_Block, frozen=True):
    unused = f"{_Block.unused} signature"
    thinking: str


class _CustomTool(Strict, frozen=True):
    unused = "type cache_control strict eager_input_streaming"
    name: str
    input_schema: dict[str, Any]
    description: str = ""


class _MessageEvents(PartEvents):
    """Streams content blocks."""

    waiting: ClassVar[bytes] = event({"type": "ping"}, "ping")

    def begin(self, id: str) -> bytes:
        message = {"id": id, "type": "message", "role": "assistant", "model": self._model, "content": []}
        # The prompt's tokens are counted at the end, in `message_delta`.
        end = {"stop_reason": None, "stop_sequence": None, "usage": {"input_tokens": 0, "output_tokens": 0}}
        return _say("message_start", message={**message, **end})

    def open(self, id: str, part: StreamedPart) -> bytes:
        empty = {**_block(part), **({"input": {}} if part.call is not None else {})}
        return _say("content_block_start", index=part.place, content_block=empty)

    def grow(self, id: str, part: StreamedPart, text: str) -> bytes:
        if part.call is not None:
            delta = {"type": "input_json_delta", "partial_json": msgspec.json.encode(_object(text)).decode()}
        else:
            field = "text" if part.kind == "text" else "thinking"
            delta = {"type": f"{field}_delta", field: text}
        return _say("content_block_delta", index=part.place, delta=delta)

    def close(self, id: str, part: StreamedPart) -> bytes:
        return _say("content_block_stop", index=part.place)

    def end(self, completion: Completion) -> bytes:
        reply, id = completion.replies[0], completion.id
        parts = [self.progress(id, 0, reply.message), self.finish(id)]
        return b"".join([*parts, _say("message_delta", delta=_end(reply), usage=_usage(completion)), _say("message_stop")])


class MessagesAsked(Asked, frozen=True):
    streamed = _MessageEvents

    def answer(self, completion: Completion) -> dict[str, Any]:
        reply = completion.replies[0]
        head = {"id": completion.id, "type": "message", "role": "assistant", "model": completion.model}
        return {**head, "content": list(map(_block, parts_of(reply.message))), **_end(reply), "usage": _usage(completion)}


def parse(body: bytes) -> MessagesAsked:
    """Parse a request. Raises Refused, 400."""
    request = read(_MessagesRequest, decode(body))
    if request.thread is not None:  # with this code, the client's tool runner sends whole conversations instead
        raise Refused(400, "thread: is not implemented", "thread", code="thread_unsupported_request")
    if not request.messages:
        raise wrong("messages", [], "a conversation")
    one_of("thinking.type", request.thinking.get("type", "disabled"), ("disabled", "adaptive"))  # does not change the model
    messages = [Message("system", text_of(request.system, "system"))] if request.system else []
    for index, given in enumerate(request.messages):
        messages += _turn(given, f"messages[{index}]")
    tools = tuple(_tool(tool, f"tools[{index}]") for index, tool in enumerate(request.tools))
    choice = request.tool_choice
    if (choice.type == "tool") != (choice.name is not None):
        raise wrong("tool_choice.name", choice.name, 'allowed: only a choice of type "tool" has a name, and it must have one')
    call = PolicyCall(
        messages=tuple(messages),
        tools=tools,
        tool_choice=choice_of(choice.type, choice.name, tools, {"auto": "auto", "any": "required", "none": "none"}),
        parallel_tool_calls=not choice.disable_parallel_tool_use,
        max_tokens=request.max_tokens,
        stop=request.stop_sequences,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k and max(0, request.top_k),
    )
    return MessagesAsked(call=call, stream=request.stream)


def _tool(given: Any, where: str) -> Tool:
    if isinstance(given, dict):  # checked first: tools that Anthropic's servers run have other fields
        one_of(f"{where}.type", given.get("type") or "custom", ("custom",))
    tool = read(_CustomTool, given, where)
    return Tool(tool.name, tool.description, tool.input_schema)


def _turn(given: Any, where: str) -> list[Message]:
    """Return the messages of one turn. A turn may hold a user's text together with results of several tools."""
    turn = read(_Turn, given, where)
    role = one_of(f"{where}.role", turn.role, ("user", "assistant", "system"))
    where = f"{where}.content"
    if role == "system" or not isinstance(turn.content, list):
        return [Message(role, text_of(turn.content, where))]
    texts: list[str] = []  # of one message so far
    messages, reasoning, calls = [], [], []
    for index, block in enumerate(turn.content):
        kind, position = block.get("type") if isinstance(block, dict) else None, f"{where}[{index}]"
        if role == "user" and kind == "tool_result":
            if texts:
                messages.append(Message("user", "\n".join(texts)))
                texts = []
            result = read(_ToolResult, block, position)
            messages.append(Message("tool", text_of(result.content, f"{position}.content"), tool_call_id=result.tool_use_id))
        elif role == "assistant" and kind == "tool_use":
            use = read(_ToolUse, block, position)
            calls.append(ToolCall(use.id, use.name, msgspec.json.encode(use.input).decode()))
        elif role == "assistant" and kind == "thinking":
            reasoning.append(read(_Thinking, block, position).thinking)
        else:
            texts.append(part_text(block, position))
    if role == "assistant" or texts:
        messages.append(Message(role, "\n".join(texts), tuple(calls), reasoning="\n".join(reasoning)))
    return messages


def _block(part: StreamedPart) -> dict[str, Any]:
    """Return a part of a message as a content block."""
    if part.call is not None:
        return {"type": "tool_use", "id": part.call.id, "name": part.call.name, "input": _object(part.call.arguments)}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    return {"type": "text", "text": part.text}


def _object(arguments: str) -> Any:
    """Return arguments as an object. Text that is not an object becomes the only field of an object."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        value = None
    return msgspec.Raw(arguments.encode()) if isinstance(value, dict) else {"arguments": arguments}


def _end(reply: PolicyReply) -> dict[str, Any]:
    stop = "stop_sequence" if reply.stop else "end_turn"
    reason = {"length": "max_tokens", "tool_calls": "tool_use", "stop": stop}[reply.end]
    return {"stop_reason": reason, "stop_sequence": reply.stop or None}


def _usage(completion: Completion) -> dict[str, int]:
    return {"input_tokens": len(completion.prompt), "output_tokens": len(completion.replies[0].tokens)}


def _say(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)
