"""What the dialects' answers have in common. No I/O and no clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import msgspec
from msgspec import Struct

from runtime.gateway.conversation import Completion, PolicyCall, Refused


class Events:
    """The events of one streamed answer, as bytes to be written. `told` and `end` are called in this order, in one thread."""

    waiting: ClassVar[bytes] = b": waiting\n\n"  # a comment (WHATWG HTML, section 9.2.6), which keeps the connection

    def __init__(self, model: str, created: float):
        self._model = model
        self._created = int(created)
        self._sent: dict[int, int] = {}  # characters of each reply's text

    def told(self, id: str, index: int, text: str) -> bytes:
        """That the text of reply `index` of the completion `id` has grown to `text`."""
        raise NotImplementedError

    def end(self, completion: Completion) -> bytes:
        """What has not been told of it, and that it is complete."""
        raise NotImplementedError

    def failed(self, error: dict[str, Any]) -> bytes:
        """In place of the end: an error, as the body of an answer would hold it."""
        return event(error, "error")

    def _new(self, index: int, text: str) -> str:
        """What `text` has beyond that which was sent."""
        sent = self._sent.get(index, 0)
        self._sent[index] = max(sent, len(text))
        return text[sent:]


class Asked(Struct, frozen=True, kw_only=True):
    """A request as its dialect understood it."""

    call: PolicyCall
    stream: bool = False

    def answer(self, completion: Completion) -> dict[str, Any]:
        """The body of the answer."""
        raise NotImplementedError

    def events(self, model: str, created: float) -> Events:
        """The events of the answer, where it is streamed; `created` in seconds since the epoch."""
        raise NotImplementedError


Parse = Callable[[bytes], Asked]
"""The request in a body. Raises Refused, 400."""


def event(data: Any, name: str = "") -> bytes:
    head = f"event: {name}\n".encode() if name else b""
    return b"".join((head, b"data: ", msgspec.json.encode(data), b"\n\n"))


_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(refused: Refused, anthropic: bool) -> dict[str, Any]:
    """In the shape of Anthropic's API, or of OpenAI's; the kinds of errors have Anthropic's names in both."""
    kind = _KINDS.get(refused.status, "invalid_request_error" if refused.status < 500 else "api_error")
    error: dict[str, Any] = {"type": kind, "message": str(refused)}
    if not anthropic:
        return {"error": {**error, "param": refused.param or None, "code": refused.code or None}}
    return {"type": "error", "error": {**error, "details": {"error_code": refused.code}} if refused.code else error}
