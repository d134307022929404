"""Parsing of requests from JSON to Structs, the common parts of answers, and errors of requests. No I/O and no clock."""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta, Struct

from runtime.gateway.conversation import Completion, Message, PolicyCall, Refused, ToolCall

# ---- Answers


class Events:
    """The events of one streamed answer, as bytes. Call `progress`, then `end`, in one thread."""

    waiting: ClassVar[bytes] = b": waiting\n\n"  # a comment (WHATWG HTML, section 9.2.6) that keeps the connection alive

    def __init__(self, asked: Any, model: str, created: float):
        self._asked, self._model, self._created = asked, model, int(created)
        self._sent: dict[Hashable, int] = {}  # characters sent of each part of each reply

    def progress(self, id: str, index: int, message: Message) -> bytes:
        """Return the events for a message that has grown: `message` is now that of reply `index` of the completion `id`."""
        raise NotImplementedError

    def end(self, completion: Completion) -> bytes:
        """Return the events for the unsent rest of the completion, and for its end."""
        raise NotImplementedError

    def _new(self, part: Hashable, text: str) -> str:
        """Return the unsent part of `text`, and mark it as sent."""
        sent = self._sent.get(part, 0)
        self._sent[part] = max(sent, len(text))
        return text[sent:]


class StreamedPart(NamedTuple):
    """A part of a streamed message, which has its own events. `text`: what has been sent of the part."""

    place: int  # among the message's parts
    kind: Literal["reasoning", "text", "call"]
    text: str = ""
    call: ToolCall | None = None


class PartEvents(Events):
    """Streams the parts of one reply one behind the other: reasoning, text, each call. Text behind a call is a part again."""

    def __init__(self, asked: Any, model: str, created: float):
        super().__init__(asked, model, created)
        self._begun = False
        self._part: StreamedPart | None = None

    def begin(self, id: str) -> bytes:
        """Return the events that begin a message."""
        raise NotImplementedError

    def open(self, id: str, part: StreamedPart) -> bytes:
        """Return the events that begin a part."""
        raise NotImplementedError

    def grow(self, id: str, part: StreamedPart, text: str) -> bytes:
        """Return the event for `text`, which follows the part's text."""
        raise NotImplementedError

    def close(self, id: str, part: StreamedPart) -> bytes:
        """Return the events that end a part."""
        raise NotImplementedError

    def progress(self, id: str, index: int, message: Message) -> bytes:
        events = [] if self._begun else [self.begin(id)]
        self._begun = True
        parts = parts_of(message)
        for number, part in enumerate(parts, len(message.tool_calls) - len(parts)):  # calls have 0 and on
            key = part.kind, number if part.call else 0
            if (key not in self._sent and part.call) or (len(part.text) > self._sent.get(key, 0)):
                new, now = self._new(key, part.text), self._part
                if now is None or (now.kind, now.call) != (part.kind, part.call):
                    events.append(self.finish(id))
                    self._part = now = part._replace(place=0 if now is None else now.place + 1, text="")
                    new = new.lstrip("\n") if part.kind == "text" else new
                    events.append(self.open(id, now))
                events.append(self.grow(id, now, new))
                self._part = now._replace(text=now.text + new)
        return b"".join(events)

    def finish(self, id: str) -> bytes:
        """Return the events that end the part under way, if there is one."""
        return b"" if self._part is None else self.close(id, self._part)


def parts_of(message: Message) -> list[StreamedPart]:
    """Return the parts of a message: its reasoning, its text, its calls."""
    thought = [StreamedPart(0, "reasoning", message.reasoning)] if message.reasoning else []
    text = [StreamedPart(0, "text", message.content)] if message.content else []
    parts = [*thought, *text, *(StreamedPart(0, "call", call.arguments, call) for call in message.tool_calls)]
    return [part._replace(place=place) for place, part in enumerate(parts)]


class Asked(Struct, frozen=True, kw_only=True):
    """A request, parsed by its dialect."""

    streamed: ClassVar[type[Events]]
    call: PolicyCall
    stream: bool = False

    def answer(self, completion: Completion) -> dict[str, Any]:
        """Return the body of the answer."""
        raise NotImplementedError

    def events(self, model: str, created: float) -> Events:
        """Return the events of a streamed answer. `created`: seconds since the epoch."""
        return self.streamed(self, model, created)


def event(data: Any, name: str = "") -> bytes:
    head = f"event: {name}\n".encode() if name else b""
    return b"".join((head, b"data: ", msgspec.json.encode(data), b"\n\n"))


_KINDS = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 408: "timeout_error"}
_KINDS |= {413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"}


def error_body(refused: Refused, anthropic: bool) -> dict[str, Any]:
    """Return an error in the format of Anthropic's API or of OpenAI's. Both use Anthropic's error types."""
    kind = _KINDS.get(refused.status, "invalid_request_error" if refused.status < 500 else "api_error")
    error: dict[str, Any] = {"type": kind, "message": str(refused)}
    if not anthropic:
        return {"error": {**error, "param": refused.param or None, "code": refused.code or None}}
    return {"type": "error", "error": {**error, "details": {"error_code": refused.code}} if refused.code else error}


Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Replies = Annotated[int, Meta(ge=1, le=128)]  # n of a call: OpenAI's limit
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
NonNegative = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(gt=0, le=1)]
MinP = Annotated[float, Meta(ge=0, le=1)]
TopK = Annotated[int, Meta(ge=-1)]  # 0 or -1: off, as in vLLM
StopText = Annotated[str, Meta(min_length=1, max_length=1024)]
StopTexts = Annotated[tuple[StopText, ...], Meta(max_length=64)]  # limited because each piece searches the whole text for each

_FAULT = re.compile(r"(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?", re.DOTALL)
_NAMED = re.compile("Object (missing required|contains unknown) field `(.*)`")


class Strict(Struct, frozen=True, forbid_unknown_fields=True):
    """An object of a request. null means absent. `unused`: fields, separated by spaces, that change nothing. `neutral`:
    fields that are not implemented, each with the values that ask for nothing. All other fields are refused by name."""

    unused: ClassVar[str] = ""
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}


T = TypeVar("T")
S = TypeVar("S", bound=Strict)


def decode(body: bytes) -> Any:
    """Parse the JSON of a body. Raises Refused, 400."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(400, f"the body is not valid JSON: {error}") from None


def read(struct: type[S], given: Any, where: str = "") -> S:
    """Return the Struct of the object at `where` in the request. Raises Refused, 400."""
    if not isinstance(given, dict):
        raise wrong(where or "the body", given, "an object")
    fields, unused, neutral = struct.__struct_encode_fields__, struct.unused.split(), struct.neutral
    kept = {name: value for name, value in given.items() if value is not None and name not in unused}
    for name in [name for name in kept if name not in fields]:
        param, value = _join(where, name), kept.pop(name)
        if value not in neutral.get(name, ()):
            also = f"; {_any_of((*neutral[name], None))} is" if name in neutral else ""
            raise wrong(param, value, f"implemented{also}")
    return converted(struct, kept, where)


def converted(kind: type[T], given: Any, where: str) -> T:
    """Return the value at `where` in the request as `kind`. Raises Refused, 400."""
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise _refusal(str(error), given, where) from None


def wrong(param: str, value: Any, allowed: str) -> Refused:
    """Return a refusal of the field `param`."""
    return Refused(400, f"{param}: {_brief(value)} is not {allowed}", param)


def one_of(param: str, value: Any, allowed: Collection[str]) -> Any:
    """Return the value. Raises Refused, 400, if it is not one of `allowed`."""
    if not isinstance(value, str) or value not in allowed:
        raise wrong(param, value, _any_of(allowed))
    return value


def text_of(content: Any, where: str, kinds: Collection[str] = ("text",)) -> str:
    """Return a text, or parts of text as lines, as vLLM joins them. Raises Refused, 400, for parts of other kinds."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise wrong(where, content, "a text or a list of parts")
    return "\n".join(part_text(part, f"{where}[{index}]", kinds) for index, part in enumerate(content))


class _TextPart(Strict, frozen=True):
    unused = "annotations citations logprobs cache_control prompt_cache_breakpoint"  # the first three come back with answers
    text: str
    type: str


def part_text(part: Any, where: str, kinds: Collection[str] = ("text",)) -> str:
    """Return the text of one part, as `text_of` does."""
    if isinstance(part, dict) and part.get("type") not in kinds:
        raise wrong(f"{where}.type", part.get("type"), f"{_any_of(kinds)}: the model reads text alone, no vision and no audio")
    return read(_TextPart, part, where).text


def _refusal(fault: str, given: Any, where: str) -> Refused:
    """Convert a message of msgspec, such as "Expected `int`, got `str` - at `$.tools[0].name`"."""
    found = _FAULT.fullmatch(fault)
    assert found is not None
    what, path = found["what"], (found["path"] or "").replace("[...]", "")
    if named := _NAMED.fullmatch(what):
        param = _join(where, _join(path, named[2]))
        return Refused(400, f"{param}: is missing" if "missing" in named[1] else f"{param}: is not implemented", param)
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path):
        given = given[int(index)] if index else given[name]
    param = _join(where, path)
    return Refused(400, f"{param}: {_brief(given)}: {what[:1].lower()}{what[1:].replace('`', '')}", param)


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where and name and not name.startswith("[") else where + name


def _any_of(allowed: Collection[Any]) -> str:
    return " or ".join(map(_brief, allowed))


def _brief(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 80 else f"{text[:77]}..."
