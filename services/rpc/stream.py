"""What both ends of a `Session` stream share: coalescing small messages into frames, and cutting up large bodies."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from runtime.errors import InvalidMessage

WINDOW = 0.002  # seconds that a data message waits for company: a frame costs its sender about 0.4 ms
CHUNK = 1 << 20  # bytes of one body that one frame carries
FRAME = 4 << 20  # bytes after which a frame is full
COMPANY = 32  # messages that fill one too: it leaves at once, and its peer works on them while the next are made
LARGEST = 1 << 30  # bytes of one body


def split(body: bytes) -> Iterator[tuple[bytes, bool]]:
    """`(chunk, more)` pairs that make up `body`; one pair when it is small."""
    if len(body) <= CHUNK:
        yield body, False
        return
    view = memoryview(body)
    for start in range(0, len(body), CHUNK):
        yield bytes(view[start : start + CHUNK]), start + CHUNK < len(body)


class Joiner:
    """Puts cut-up bodies together again, by their id."""

    def __init__(self) -> None:
        self._parts: dict[int, list[bytes]] = {}
        self._sizes: dict[int, int] = {}

    def add(self, id_: int, chunk: bytes, more: bool) -> bytes | None:
        """The whole body once its last chunk is in. Raises InvalidMessage when it grows beyond `LARGEST`."""
        if not more and id_ not in self._parts:
            return chunk
        self._parts.setdefault(id_, []).append(chunk)
        size = self._sizes[id_] = self._sizes.get(id_, 0) + len(chunk)
        if size > LARGEST:
            self.forget(id_)
            raise InvalidMessage(f"a message of more than {LARGEST} bytes")
        if more:
            return None
        body = b"".join(self._parts[id_])
        self.forget(id_)
        return body

    def forget(self, id_: int) -> None:
        self._parts.pop(id_, None)
        self._sizes.pop(id_, None)


class Outbox:
    """Messages waiting for the next frame. Data waits up to `WINDOW` for company, urgent messages leave at once."""

    def __init__(self) -> None:
        self._messages: list[Any] = []
        self._something = asyncio.Event()
        self._urgent = asyncio.Event()
        self._closed = False

    def put(self, message: Any, urgent: bool = False) -> None:
        self._messages.append(message)
        self._something.set()
        if urgent or len(self._messages) >= COMPANY:
            self._urgent.set()

    def close(self) -> None:
        """No more messages will come; `frame` gives those that are here, and then nothing."""
        self._closed = True
        self._something.set()
        self._urgent.set()

    async def frame(self) -> list[Any]:
        """The messages of the next frame, at least one; empty when closed."""
        await self._something.wait()
        if not self._urgent.is_set():
            loop = asyncio.get_running_loop()
            timer = loop.call_later(WINDOW, self._urgent.set)
            await self._urgent.wait()
            timer.cancel()
        taken, size = 0, 0
        while taken < min(len(self._messages), COMPANY) and size < FRAME:
            size += len(self._messages[taken].body)
            taken += 1
        messages, self._messages = self._messages[:taken], self._messages[taken:]
        if not self._messages and not self._closed:
            self._something.clear()
            self._urgent.clear()
        return messages
