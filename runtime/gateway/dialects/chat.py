"""OpenAI's chat completions: POST /v1/chat/completions.
https://platform.openai.com/docs/api-reference/chat/create, as in the Python package 3.57."""

from __future__ import annotations

from typing import Any, ClassVar

from runtime.gateway.conversation import Message, PolicyCall, PolicyReply, ToolCall
from runtime.gateway.dialects.fields import Count, Events, FieldTable, Strict, decode, one_of, read, text_of, wrong
from runtime.gateway.dialects.openai import (
    PENALTIES,
    UNUSED,
    ChoicesAsked,
    ChunkEvents,
    Streamed,
    called,
    functions,
    token_logprobs,
)

ROLES = ("system", "developer", "user", "assistant", "tool")


class _ChatRequest(Streamed, frozen=True, kw_only=True):
    messages: list[Any]
    max_completion_tokens: Count | None = None
    tools: tuple[Any, ...] = ()
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    logprobs: bool = False


_NEUTRAL = {
    **PENALTIES,
    "logit_bias": ({},),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "top_logprobs": (0,),
    "verbosity": ("medium",),
}
_REQUEST = FieldTable(_ChatRequest, UNUSED, _NEUTRAL)


class _ChatFunction(Strict, frozen=True):
    name: str
    arguments: str
    parsed_arguments: Any = None  # like `parsed`: added by the client's helpers for streams


class _ChatToolCall(Strict, frozen=True):
    id: str
    function: _ChatFunction
    type: str = "function"
    index: Any = None  # this and the next fields come back with answers of this API, others, and litellm
    provider_specific_fields: Any = None


class _ChatMessage(Strict, frozen=True):
    role: str
    content: Any = None
    name: str | None = None
    tool_calls: list[_ChatToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # vLLM's current name of `reasoning_content`
    annotations: Any = None
    provider_specific_fields: Any = None
    cache_control: Any = None
    parsed: Any = None
    refusal: None = None
    audio: None = None
    function_call: None = None


class ChatAsked(ChoicesAsked, frozen=True):
    kind: ClassVar[str] = "chat.completion"

    def choice(self, index: int, reply: PolicyReply) -> dict[str, Any]:
        return {"index": index, "message": _answered(reply.message), **self.end(reply)}

    def events(self, model: str, created: float) -> Events:
        return _ChatEvents(self, model, created)

    def end(self, reply: PolicyReply) -> dict[str, Any]:
        return {"logprobs": token_logprobs(reply) if self.logprobs else None, "finish_reason": reply.end}


class _ChatEvents(ChunkEvents[ChatAsked]):
    """The chunks of each reply: its role, its text as it grows, its calls, its end."""

    kind: ClassVar[str] = "chat.completion.chunk"

    def progress(self, id: str, index: int, text: str) -> bytes:
        begin = b"" if index in self._sent else self._delta(id, index, role="assistant", content="" if text else None)
        new = self._new(index, text)
        return begin + (self._delta(id, index, content=new) if new else b"")

    def rest(self, id: str, index: int, reply: PolicyReply) -> bytes:
        message = reply.message
        begin = self.progress(id, index, "") if index not in self._sent else b""
        reasoning = self._delta(id, index, **_thought(message)) if message.reasoning else b""
        text = self.progress(id, index, message.content)
        calls = [
            self._delta(id, index, tool_calls=[{"index": number, **called(call)}])
            for number, call in enumerate(message.tool_calls)
        ]
        end = self.chunk(id, [{"index": index, "delta": {}, **self._asked.end(reply)}])
        return b"".join([begin, reasoning, text, *calls, end])

    def _delta(self, id: str, index: int, **delta: Any) -> bytes:
        return self.chunk(id, [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])


def parse(body: bytes) -> ChatAsked:
    """Parse a request. Raises Refused, 400."""
    request = _REQUEST.read(decode(body))
    if not request.messages:
        raise wrong("messages", [], "a conversation")
    sampling = request.sampling()
    if (limit := request.max_completion_tokens) is not None:
        if request.max_tokens not in (None, limit):
            raise wrong("max_tokens", request.max_tokens, f"equal to max_completion_tokens, {limit}")
        sampling["max_tokens"] = limit
    call = PolicyCall(
        messages=tuple(_message(message, f"messages[{index}]") for index, message in enumerate(request.messages)),
        parallel_tool_calls=request.parallel_tool_calls,
        **functions(request.tools, request.tool_choice, "function"),
        **sampling,
    )
    return ChatAsked(call=call, logprobs=request.logprobs, **request.streaming())


def _message(given: Any, where: str) -> Message:
    message = read(_ChatMessage, given, where)
    role = one_of(f"{where}.role", message.role, ROLES)
    thought = message.reasoning_content or message.reasoning or ""
    if role != "assistant" and (message.tool_calls or thought):
        raise wrong(f"{where}.role", role, '"assistant": no other role has tool_calls or reasoning_content')
    if (role == "tool") != bool(message.tool_call_id):
        raise wrong(f"{where}.tool_call_id", message.tool_call_id, 'allowed: only role "tool" has it, and must have it')
    calls = message.tool_calls or ()
    for index, call in enumerate(calls):
        one_of(f"{where}.tool_calls[{index}].type", call.type, ("function",))
    return Message(
        role="system" if role == "developer" else role,
        content=text_of(message.content, f"{where}.content"),
        tool_calls=tuple(ToolCall(call.id, call.function.name, call.function.arguments) for call in calls),
        tool_call_id=message.tool_call_id or "",
        name=message.name or "",
        reasoning=thought,
    )


def _thought(message: Message) -> dict[str, str]:
    """Return the reasoning under both names that clients look for."""
    return {"reasoning_content": message.reasoning, "reasoning": message.reasoning}


def _answered(message: Message) -> dict[str, Any]:
    content = message.content or (None if message.tool_calls else "")
    answered: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if message.reasoning:
        answered |= _thought(message)
    if message.tool_calls:
        answered["tool_calls"] = [called(call) for call in message.tool_calls]
    return answered
