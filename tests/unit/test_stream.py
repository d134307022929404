"""How bodies become frames: cut up and joined, and when a frame leaves."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from runtime import errors, timeouts
from services.rpc import stream
from services.rpc.generated import common_pb2
from tests.unit.clock import run_by_clock

# --------------------------------------------------------------------------------------------------------------- bodies


@pytest.mark.parametrize(("size", "chunks"), [(0, 1), (1, 1), (stream.CHUNK, 1), (stream.CHUNK + 1, 2), (3 * stream.CHUNK, 3)])
def test_a_body_is_cut_up_and_joined(size: int, chunks: int) -> None:
    body = np.random.default_rng(0).bytes(size)
    pieces = [(b"".join(chunk), more) for chunk, more in stream.split([body[: size // 3], body[size // 3 :]])]
    assert [more for _, more in pieces] == [True] * (chunks - 1) + [False]
    assert all(len(chunk) <= stream.CHUNK for chunk, _ in pieces)
    joiner = stream.Joiner()
    joined = [joiner.add(1, chunk, more) for chunk, more in pieces]
    assert joined[:-1] == [None] * (chunks - 1)
    assert joined[-1] == body


def test_bodies_of_several_calls_may_interleave() -> None:
    joiner = stream.Joiner()
    assert joiner.add(1, b"a", True) is None
    assert joiner.add(2, b"x", True) is None
    assert joiner.add(3, b"whole", False) == b"whole"
    assert joiner.add(2, b"y", False) == b"xy"
    assert joiner.add(1, b"b", False) == b"ab"
    assert joiner.add(1, b"again", False) == b"again"


def test_a_forgotten_body_leaves_nothing() -> None:
    joiner = stream.Joiner()
    joiner.add(1, b"a", True)
    joiner.forget(1)
    joiner.forget(2)
    assert joiner.add(1, b"b", False) == b"b"


def test_a_body_beyond_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "LARGEST", 10)
    joiner = stream.Joiner()
    joiner.add(1, bytes(6), True)
    joiner.add(2, bytes(6), True)
    with pytest.raises(errors.InvalidMessage, match="more than 10 bytes"):
        joiner.add(1, bytes(6), True)
    assert joiner.add(2, bytes(4), False) == bytes(10)


def test_a_stream_leaves_few_bodies_unfinished() -> None:
    joiner = stream.Joiner()
    for number in range(stream.UNFINISHED):
        joiner.add(number, b"a", True)
    assert joiner.add(0, b"b", False) == b"ab"
    assert joiner.add(9, b"whole", False) == b"whole"
    joiner.add(10, b"a", True)
    with pytest.raises(errors.InvalidMessage, match=f"^more than {stream.UNFINISHED} unfinished messages$"):
        joiner.add(11, b"a", True)


def test_a_stream_has_a_budget_of_unfinished_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "HELD", 10)
    joiner = stream.Joiner()
    joiner.add(1, bytes(6), True)
    assert joiner.add(3, bytes(100), False) == bytes(100)  # what is whole at once is not held
    joiner.add(2, bytes(4), True)
    joiner.forget(1)
    joiner.add(3, bytes(6), True)
    assert joiner.add(3, b"", False) == bytes(6)
    joiner.add(4, bytes(6), True)
    with pytest.raises(errors.InvalidMessage, match=r"^unfinished messages of more than 10 bytes$"):
        joiner.add(5, bytes(1), True)


def test_the_streams_of_a_service_share_one_too_and_a_stream_that_ends_gives_back_its_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream, "HELD_IN_ALL", 10)
    held = stream.Held()
    one, other = stream.Joiner(held), stream.Joiner(held)
    one.add(1, bytes(6), True)
    with pytest.raises(errors.InvalidMessage, match=r"^unfinished messages of more than 10 bytes, over all streams$"):
        other.add(1, bytes(6), True)
    other.close()
    one.add(2, bytes(4), True)
    one.close()
    assert held.size == 0
    other.add(1, bytes(10), True)
    assert other.add(1, b"", False) == bytes(10)
    assert held.size == 0


# --------------------------------------------------------------------------------------------------------------- frames


def call(id_: int, size: int = 0) -> tuple[common_pb2.Call, bytes]:
    return common_pb2.Call(id=id_), bytes(size)


def ids(calls: list[Any]) -> list[int]:
    return [getattr(call, "head", call).id for call in calls]


@pytest.mark.parametrize("size", [0, 127, 128, 1 << 14, 1 << 21])
def test_a_frame_is_what_protobuf_would_write(size: int) -> None:
    bodies = [np.random.default_rng(number).bytes(size) for number in range(3)]

    async def test() -> None:
        outbox = stream.Outbox()
        for number, body in enumerate(bodies):
            outbox.put(common_pb2.Reply(id=number), [memoryview(body)[:9], memoryview(body)[9:]] if number else body)
        messages = await outbox.frame()
        frame = common_pb2.ReplyFrame.FromString(stream.frame(common_pb2.ReplyFrame(schema=7), "replies", messages))
        whole = [common_pb2.Reply(id=number, body=body) for number, body in enumerate(bodies)][: len(messages)]
        assert frame == common_pb2.ReplyFrame(schema=7, replies=whole)

    run_by_clock(test())


def test_data_waits_for_company(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "FRAME_WINDOW", 0.05)

    async def test() -> None:
        loop, outbox = asyncio.get_running_loop(), stream.Outbox()
        before = loop.time()
        outbox.put(*call(1))
        loop.call_later(0.01, outbox.put, *call(2))
        assert ids(await outbox.frame()) == [1, 2]
        assert loop.time() - before == pytest.approx(0.05)
        outbox.put(*call(3))
        before = loop.time()
        assert ids(await outbox.frame()) == [3]
        assert loop.time() - before == pytest.approx(0.05)

    run_by_clock(test())


def test_an_urgent_message_leaves_at_once_with_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "FRAME_WINDOW", 60.0)

    async def test() -> None:
        outbox = stream.Outbox()
        outbox.put(*call(1))
        frame = asyncio.create_task(outbox.frame())
        await asyncio.sleep(0)
        outbox.put(*call(2), urgent=True)
        assert ids(await frame) == [1, 2]
        outbox.put(*call(3))  # the urgency is over
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(outbox.frame(), 0.02)

    run_by_clock(test())


def test_a_full_frame_leaves_and_the_rest_follows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        outbox = stream.Outbox()
        for number in range(5):
            outbox.put(*call(number, stream.CHUNK))
        assert ids(await outbox.frame()) == [0, 1, 2, 3]
        monkeypatch.setattr(timeouts, "FRAME_WINDOW", 60.0)
        assert ids(await outbox.frame()) == [4]

    run_by_clock(test())


def test_as_many_messages_as_fill_a_frame_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "FRAME_WINDOW", 60.0)

    async def test() -> None:
        outbox = stream.Outbox()
        for number in range(stream.COMPANY + 1):
            outbox.put(*call(number))
        assert ids(await outbox.frame()) == list(range(stream.COMPANY))
        assert ids(await outbox.frame()) == [stream.COMPANY]

    run_by_clock(test())


def test_a_closed_outbox_gives_what_it_has_and_then_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "FRAME_WINDOW", 60.0)

    async def test() -> None:
        outbox = stream.Outbox()
        outbox.put(*call(1))
        outbox.close()
        assert ids(await outbox.frame()) == [1]
        assert await outbox.frame() == []
        assert await outbox.frame() == []
        waiting = stream.Outbox()
        frame = asyncio.create_task(waiting.frame())
        await asyncio.sleep(0)
        waiting.close()
        assert await frame == []

    run_by_clock(test())
