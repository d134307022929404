"""What agents print: all of it as far as somebody can read it, and of a flood its beginning."""

from __future__ import annotations

import asyncio

import pytest

from runtime.environments import workers


def forwarded(monkeypatch: pytest.MonkeyPatch, *parts: tuple[float, bytes]) -> tuple[bytes, int]:
    """What is written, and how much is left out, of parts that come each at its own time."""
    clock, written, dropped = [0.0], list[bytes](), list[int]()
    left = list(parts)

    class Stream:
        async def read(self, most: int) -> bytes:
            if not left:
                return b""
            clock[0], data = left.pop(0)
            return data

    monkeypatch.setattr(workers, "now", lambda: clock[0])
    monkeypatch.setattr(workers, "_write", written.append)
    asyncio.run(workers.forward(Stream(), dropped.append))  # type: ignore[arg-type]
    return b"".join(written), sum(dropped)


def test_what_is_printed_at_ease_is_all_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert forwarded(monkeypatch, (0.0, b"one\n"), (0.5, b"two\n"), (9.0, b"\xff")) == (b"one\ntwo\n\xff", 0)


def test_a_flood_is_cut_and_says_by_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    flood = b"x" * workers.BYTES
    written, dropped = forwarded(monkeypatch, (0.0, flood[:-1]), (0.1, b"yyy"), (0.2, b"zz"), (5.0, b"later"))
    assert dropped == 4
    assert written == flood[:-1] + b"y" + b"\n[4 bytes of output were left out]\n" + b"later"


def test_what_was_cut_last_is_told_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    written, dropped = forwarded(monkeypatch, (0.0, b"x" * (workers.BYTES + 7)))
    assert dropped == 7 and written.endswith(b"\n[7 bytes of output were left out]\n")
