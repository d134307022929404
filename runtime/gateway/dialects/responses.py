"""OpenAI's responses: POST /v1/responses. https://platform.openai.com/docs/api-reference/responses/create, as in the Python
package 3.57.

One reply of the assistant is one Message in this system and several items in the API: reasoning, text, calls.
"""

from __future__ import annotations

from typing import Any, ClassVar

from msgspec import field
from msgspec.structs import replace

from runtime.gateway.conversation import Completion, Message, PolicyCall, ToolCall
from runtime.gateway.dialects import fields
from runtime.gateway.dialects.fields import (
    Asked,
    PartEvents,
    StreamedPart,
    Strict,
    decode,
    event,
    one_of,
    parts_of,
    read,
    text_of,
    wrong,
)
from runtime.gateway.dialects.openai import UNUSED, functions

ROLES = ("system", "developer", "user", "assistant")
ITEMS = ("message", "function_call", "function_call_output", "reasoning")
TEXTS = ("input_text", "output_text", "text")


_REPEATED = ("max_output_tokens", "parallel_tool_calls", "temperature", "tool_choice", "tools", "top_p")


class _ResponsesRequest(Strict, frozen=True, kw_only=True):
    unused = f"{UNUSED} stream_options"
    neutral: ClassVar = {
        "background": (False,),
        "context_management": ([],),
        "include": ([], ["reasoning.encrypted_content"]),  # nothing is encrypted: reasoning is sent as it is
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    }
    input: str | list[Any]
    instructions: str = ""
    max_output_tokens: fields.Count | None = None
    parallel_tool_calls: bool = True
    previous_response_id: str = ""
    stream: bool = False
    temperature: fields.NonNegative | None = None
    top_p: fields.Share | None = None
    tools: tuple[Any, ...] = ()
    tool_choice: str | dict[str, Any] = "auto"
    text: dict[str, Any] = field(default_factory=dict)
    reasoning: dict[str, Any] = field(default_factory=dict)


class _TextFormat(Strict, frozen=True):
    neutral: ClassVar = {"format": ({"type": "text"},), "verbosity": ("medium",)}


class _InputItem(Strict, frozen=True, kw_only=True):
    unused = "type id status phase caller"


class _InputMessage(_InputItem, frozen=True):
    role: str
    content: Any = None


class _FunctionCall(_InputItem, frozen=True):
    call_id: str
    name: str
    arguments: str


class _FunctionOutput(_InputItem, frozen=True):
    call_id: str
    output: Any = None


class _ReasoningItem(_InputItem, frozen=True):
    unused = f"{_InputItem.unused} encrypted_content"
    content: Any = None
    summary: Any = None


class _ResponseEvents(PartEvents):
    """Streams output items. Known limit: text behind a call is an item of its own, and the conversation forks if it comes back
    so. The whole answer has one item."""

    def __init__(self, asked: Any, model: str, created: float):
        super().__init__(asked, model, created)
        self._number = 0
        self._status = "completed"  # of a part that ends

    def begin(self, id: str) -> bytes:
        response = self._asked.response(id, self._model, self._created, None)
        return self._say("response.created", response=response) + self._say("response.in_progress", response=response)

    def end(self, completion: Completion) -> bytes:
        id, response = completion.id, self._asked.response(completion.id, self._model, self._created, completion)
        parts = [self.progress(id, 0, completion.replies[0].message)]
        self._status = response["status"]
        last = response["output"][-1]
        if last["type"] == "message" and (self._part is None or self._part.kind == "reasoning"):  # an item without text
            parts.append(self.finish(id))
            self._part = StreamedPart(len(response["output"]) - 1, "text")
            parts.append(self.open(id, self._part))
        return b"".join([*parts, self.finish(id), self._say(f"response.{self._status}", response=response)])

    def open(self, id: str, part: StreamedPart) -> bytes:
        item = _item(id, part, "in_progress")
        empty: dict[str, Any] = {"content": []} if "content" in item else {"arguments": ""}
        said = self._say("response.output_item.added", output_index=part.place, item={**item, **empty})
        for each in item.get("content", ()):
            said += self._say("response.content_part.added", **_position(part.place, item), part={**each, "text": ""})
        return said

    def grow(self, id: str, part: StreamedPart, text: str) -> bytes:
        item = _item(id, part, "in_progress")
        kind, _, _, more = _content_of(item)
        return self._say(f"response.{kind}.delta", **_position(part.place, item), delta=text, **more)

    def close(self, id: str, part: StreamedPart) -> bytes:
        item, index = _item(id, part, self._status), part.place
        kind, field, text, more = _content_of(item)
        said = self._say(f"response.{kind}.done", **_position(index, item), **{field: text}, **more)
        for each in item.get("content", ()):
            said += self._say("response.content_part.done", **_position(index, item), part=each)
        return said + self._say("response.output_item.done", output_index=index, item=item)

    def _say(self, kind: str, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return event({"type": kind, "sequence_number": number, **fields}, kind)


class ResponseAsked(Asked, frozen=True, kw_only=True):
    streamed = _ResponseEvents
    previous: str  # the completion whose conversation continues; empty: `call` has the whole conversation
    request: dict[str, Any]  # the fields of the request that a response repeats

    def continues(self, history: tuple[Message, ...]) -> PolicyCall:
        """Return the call behind the conversation up to `previous`. New instructions replace the earlier ones."""
        instructions = 1 if self.request["instructions"] else 0
        former = history[1:] if instructions and history and history[0].role == "system" else history
        messages = self.call.messages
        return replace(self.call, messages=(*messages[:instructions], *former, *messages[instructions:]))

    def answer(self, completion: Completion) -> dict[str, Any]:
        return self.response(completion.id, completion.model, int(completion.created), completion)

    def response(self, id: str, model: str, created: int, done: Completion | None) -> dict[str, Any]:
        """Return the whole answer. `done`: None if it has only begun."""
        status, output = "in_progress", list[dict[str, Any]]()
        used: dict[str, Any] | None = None
        if done is not None:
            reply = done.replies[0]
            status = "incomplete" if reply.end == "length" else "completed"
            output = _items(id, reply.message, status)
            prompt, tokens = len(done.prompt), len(reply.tokens)
            used = {"input_tokens": prompt, "output_tokens": tokens, "total_tokens": prompt + tokens}
            used |= {"input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0}}
            used |= {"output_tokens_details": {"reasoning_tokens": 0}}
        head = {"id": id, "object": "response", "created_at": created, "status": status, "error": None, "model": model}
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {**head, "incomplete_details": cut, "output": output, "usage": used, **self.request}


def parse(body: bytes) -> ResponseAsked:
    """Parse a request. Raises Refused, 400."""
    request = read(_ResponsesRequest, decode(body))
    read(_TextFormat, request.text, "text")
    read(Strict, request.reasoning, "reasoning")
    messages = [Message("system", request.instructions)] if request.instructions else []
    items = [{"role": "user", "content": request.input}] if isinstance(request.input, str) else request.input
    for index, item in enumerate(items):
        _add(messages, item, f"input[{index}]")
    call = PolicyCall(
        messages=tuple(messages),
        parallel_tool_calls=request.parallel_tool_calls,
        **functions(request.tools, request.tool_choice),
        max_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
    )
    repeated = {name: getattr(request, name) for name in _REPEATED}
    repeated |= {"instructions": request.instructions or None, "previous_response_id": request.previous_response_id or None}
    repeated |= {"metadata": {}, "text": {"format": {"type": "text"}}, "truncation": "disabled"}
    return ResponseAsked(call=call, stream=request.stream, previous=request.previous_response_id, request=repeated)


def _add(messages: list[Message], given: Any, where: str) -> None:
    """Add an item to the conversation: to the assistant's last message if both belong to one reply."""
    if not isinstance(given, dict):
        raise wrong(where, given, "an object")
    kind = one_of(f"{where}.type", given.get("type", "message"), ITEMS)
    last = messages.pop() if messages and messages[-1].role == "assistant" else None
    if kind == "function_call_output":
        result = read(_FunctionOutput, given, where)
        added = Message("tool", text_of(result.output, f"{where}.output", TEXTS), tool_call_id=result.call_id)
    elif kind == "function_call":
        call = read(_FunctionCall, given, where)
        added = Message("assistant", tool_calls=(ToolCall(call.call_id, call.name, call.arguments),))
    elif kind == "reasoning":
        thought = read(_ReasoningItem, given, where)
        text = text_of(thought.content, f"{where}.content", ("reasoning_text",))
        added = Message("assistant", reasoning=text or text_of(thought.summary, f"{where}.summary", ("summary_text",)))
    else:
        item = read(_InputMessage, given, where)
        role = one_of(f"{where}.role", item.role, ROLES)
        content = text_of(item.content, f"{where}.content", TEXTS)
        added = Message("system" if role == "developer" else role, content)
    messages += _joined(last, added)


def _joined(last: Message | None, added: Message) -> list[Message]:
    """Join two messages of the assistant if one reply may be both: `added` has calls, or what `last` lacks before any call."""
    if last is None:
        return [added]
    twice = (last.content and added.content) or (last.reasoning and added.reasoning)
    if added.role != "assistant" or twice or (last.tool_calls and not added.tool_calls):
        return [last, added]
    calls, reasoning = last.tool_calls + added.tool_calls, last.reasoning or added.reasoning
    return [Message("assistant", last.content or added.content, calls, reasoning=reasoning)]


def _items(id: str, message: Message, status: str) -> list[dict[str, Any]]:
    """Return the output items; a reply without content is an item without text."""
    parts = parts_of(message)
    text = [] if message.content or message.tool_calls else [StreamedPart(len(parts), "text")]
    return [_item(id, part, status) for part in (*parts, *text)]


def _item(id: str, part: StreamedPart, status: str) -> dict[str, Any]:
    if part.call is not None:
        content: Any = {"call_id": part.call.id, "name": part.call.name, "arguments": part.text}
        return {"id": f"fc_{id}_{part.place}", "type": "function_call", **content, "status": status}
    if part.kind == "reasoning":
        thought = [{"type": "reasoning_text", "text": part.text}]
        return {"id": f"rs_{id}", "type": "reasoning", "summary": [], "content": thought, "status": status}
    content = [{"type": "output_text", "text": part.text, "annotations": [], "logprobs": []}]
    return {"id": f"msg_{id}_{part.place}", "type": "message", "role": "assistant", "status": status, "content": content}


def _position(index: int, item: dict[str, Any]) -> dict[str, Any]:
    """Return the fields by which an event names an item, or the only part of an item."""
    position = {"item_id": item["id"], "output_index": index}
    return {**position, "content_index": 0} if "content" in item else position


def _content_of(item: dict[str, Any]) -> tuple[str, str, str, dict[str, Any]]:
    """Return the content of an item: its name in events, its field, its text, and further fields."""
    if item["type"] == "function_call":
        return "function_call_arguments", "arguments", item["arguments"], {}
    (part,) = item["content"]
    return part["type"], "text", part["text"], {"logprobs": []} if part["type"] == "output_text" else {}
