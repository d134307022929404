"""Both ends of a `Session` stream: small messages are joined into frames, large bodies are split."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from runtime import timeouts
from runtime.errors import InvalidMessage
from runtime.types import SMALL, Body, Parts, parts_of

CHUNK = 1 << 20  # bytes of one body that one frame carries
FRAME = 4 << 20  # bytes after which a frame is full
MAX_BATCH = 32  # messages that fill a frame too: it leaves at once, and the peer works on it while the next is made
LARGEST = 1 << 30  # bytes of one body
UNFINISHED = 4  # bodies of one stream: a sender puts all of a body on its way before the next
HELD = LARGEST + (64 << 20)  # bytes of unfinished bodies of one stream
HELD_IN_ALL = 2 * HELD  # ... and of all streams of a service: those of the coordinator and of the earlier one


def size_of(body: Body) -> int:
    return len(body) if isinstance(body, bytes) else sum(map(len, body))


def field(number: int, parts: Parts) -> Parts:
    """Return `parts` as the field `number` of a protobuf message, of type bytes, string or message: its tag and length come
    first (https://protobuf.dev/programming-guides/encoding). Bytes appended to a serialized message are a field of it."""
    return [_varint(number << 3 | 2) + _varint(size_of(parts)), *parts]


def _varint(value: int) -> bytes:
    if value <= 0x7F:
        return bytes((value,))
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))


class LargeBody(NamedTuple):
    """A Call or Reply, and its large body beside it."""

    head: Any
    body: Parts


def frame(head: Any, name: str, messages: Sequence[Any]) -> bytes:
    """Return the serialized frame `head` with `messages` of a `SendQueue` in its field `name`. Large bodies are copied only
    here."""
    if LargeBody not in map(type, messages):
        getattr(head, name).extend(messages)
        return bytes(head.SerializeToString())
    number, parts = head.DESCRIPTOR.fields_by_name[name].number, [head.SerializeToString()]
    for message in messages:
        if isinstance(message, LargeBody):
            body = field(message.head.BODY_FIELD_NUMBER, message.body)
            parts += field(number, [message.head.SerializeToString(), *body])
        else:
            parts += field(number, [message.SerializeToString()])
    return b"".join(parts)


def split(body: Body) -> Iterator[tuple[Body, bool]]:
    """Yield `(chunk, more)` pairs that make up `body`; one pair if it is small."""
    if (isinstance(body, bytes) and len(body) <= CHUNK) or size_of(body) <= CHUNK:
        yield body, False
        return
    chunk: Parts = []
    room = CHUNK
    for part in parts_of(body):
        view = memoryview(part)
        while len(view) > room:
            yield [*chunk, view[:room]], True
            chunk, view, room = [], view[room:], CHUNK
        chunk.append(view)
        room -= len(view)
    yield chunk, False


class BufferedBytes:
    """Bytes of unfinished bodies that a service holds for all its streams."""

    size = 0


class Reassembler:
    """Joins split bodies, by their id. `held` counts the bytes that it holds, until `close`."""

    def __init__(self, held: BufferedBytes | None = None):
        self._held = held or BufferedBytes()
        self._bodies: dict[int, bytearray] = {}  # the unfinished bodies

    def add(self, id_: int, chunk: bytes, more: bool) -> bytes | None:
        """Return the whole body once its last chunk is in. Raises InvalidMessage if a limit of `_check` is passed."""
        if not more and id_ not in self._bodies:
            return chunk
        body = self._bodies.setdefault(id_, bytearray())
        body += chunk
        self._held.size += len(chunk)
        self._check(len(body))
        if more:
            return None
        self.forget(id_)
        return bytes(body)

    def forget(self, id_: int) -> None:
        self._held.size -= len(self._bodies.pop(id_, b""))

    def close(self) -> None:
        """Drop the unfinished bodies: the stream has ended."""
        for id_ in list(self._bodies):
            self.forget(id_)

    def _check(self, size: int) -> None:
        """Check the limits. `size`: of the body that has grown. Raises InvalidMessage."""
        if size > LARGEST:
            raise InvalidMessage(f"a message of more than {LARGEST} bytes")
        if len(self._bodies) > UNFINISHED:
            raise InvalidMessage(f"more than {UNFINISHED} unfinished messages")
        if sum(map(len, self._bodies.values())) > HELD:
            raise InvalidMessage(f"unfinished messages of more than {HELD} bytes")
        if self._held.size > HELD_IN_ALL:
            raise InvalidMessage(f"unfinished messages of more than {HELD_IN_ALL} bytes, over all streams")


def _fitting(messages: list[Any]) -> list[Any]:
    """Return the first messages, as many as a frame takes. Small messages do not fill it."""
    if LargeBody not in map(type, messages):
        return messages
    before = accumulate((size_of(each.body) if isinstance(each, LargeBody) else 0 for each in messages), initial=0)
    return [message for message, size in zip(messages, before, strict=False) if size < FRAME]


class SendQueue:
    """Messages for the next frame. Data waits up to `FRAME_WINDOW` for more data; urgent messages leave at once."""

    def __init__(self) -> None:
        self._messages: list[Any] = []
        self._something = asyncio.Event()
        self._urgent = asyncio.Event()
        self._closed = False

    def put(self, message: Any, body: Body = b"", urgent: bool = False) -> None:
        """Queue `message`, a Call or Reply without its `body`."""
        if isinstance(body, bytes) and len(body) <= SMALL:
            message.body = body
            self._messages.append(message)
        else:
            self._messages.append(LargeBody(message, parts_of(body)))
        self._something.set()
        if urgent or len(self._messages) >= MAX_BATCH:
            self._urgent.set()

    def close(self) -> None:
        """Close the queue: `frame` gives the messages that are here, and then none."""
        self._closed = True
        self._something.set()
        self._urgent.set()

    async def frame(self) -> list[Any]:
        """Return the messages of the next frame, at least one, large bodies as `LargeBody`. Empty once closed."""
        await self._something.wait()
        if not self._urgent.is_set():
            loop = asyncio.get_running_loop()
            timer = loop.call_later(timeouts.FRAME_WINDOW, self._urgent.set)
            await self._urgent.wait()
            timer.cancel()
        messages = _fitting(self._messages[:MAX_BATCH])
        self._messages = self._messages[len(messages) :]
        if not self._messages and not self._closed:
            self._something.clear()
            self._urgent.clear()
        return messages
