"""A call that comes again under its key is done once, and answered as before until its answer is acknowledged."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from runtime.types import LogprobRequest
from services.rpc import server
from services.rpc.generated import common_pb2
from services.rpc.server import KeptAnswers
from tests.loopback.session_peers import (
    PATIENCE,
    Peer,
    answer,
    connected,
    frame,
    logprobs,
    raw_stream,
    replies,
    request,
    run,
    serving,
)


def test_a_call_is_joined_while_it_is_under_way_and_answered_from_memory_after_it() -> None:
    async def test() -> None:
        peer = Peer()
        async with serving(peer.logprobs) as address:
            async with raw_stream(address) as rpc:
                await rpc.write(frame(logprobs(7, b"a", key="k")))
                await peer.arrived.wait()
                await rpc.write(frame(logprobs(8, b"a", key="k"), logprobs(9, b"b", key="other")))
                peer.gate.set()
                assert sorted((one.id, answer(one)) for one in await replies(rpc, 3)) == [(7, b"a!"), (8, b"a!"), (9, b"b!")]
                await rpc.write(frame(logprobs(10, b"a", key="k")))
                assert [answer(one) for one in await replies(rpc, 1)] == [b"a!"]
            async with raw_stream(address) as rpc:  # also on the stream of another caller
                await rpc.write(frame(logprobs(1, b"b", key="other")))
                assert [answer(one) for one in await replies(rpc, 1)] == [b"b!"]
            assert peer.seen == [b"a", b"b"]

    run(test())


def test_what_is_acknowledged_or_has_no_key_is_done_again() -> None:
    async def test() -> None:
        peer = Peer()
        peer.gate.set()
        async with serving(peer.logprobs) as address, raw_stream(address) as rpc:
            for calls, acknowledged in (([logprobs(1, b"a", key="k"), logprobs(2, b"b")], []), ([logprobs(3, b"b")], ["k"])):
                await rpc.write(frame(*calls, acknowledged=acknowledged))
                await replies(rpc, len(calls))
            await rpc.write(frame(logprobs(4, b"a", key="k")))
            assert [answer(one) for one in await replies(rpc, 1)] == [b"a!"]
            assert peer.seen == [b"a", b"b", b"b", b"a"]

    run(test())


def test_a_session_acknowledges_what_it_is_told_to_and_what_it_withdrew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Along with its next call."""
    kept: list[KeptAnswers] = []

    class Noted(KeptAnswers):
        def __init__(self, most: int):
            super().__init__(most)
            kept.append(self)

    monkeypatch.setattr(server, "KeptAnswers", Noted)

    async def test() -> None:
        peer = Peer()

        async def logprobs_of(message: LogprobRequest) -> bytes:
            return await peer.logprobs(message)

        async with serving(logprobs_of) as address, connected(address) as session:
            withdrawn = asyncio.create_task(session.call("Logprobs", request(b"w", 9), PATIENCE))
            await peer.arrived.wait()
            withdrawn.cancel()
            await peer.withdrawn.wait()
            peer.gate.set()
            for number in range(20):
                await session.call("Logprobs", request(b"a", number), PATIENCE)
                if number != 7:
                    session.acknowledge(f"Logprobs/{number}/0")
            assert [one for each in kept for one in each._answers] == ["Logprobs/7/0", "Logprobs/19/0"]

    run(test())


def test_a_call_that_was_withdrawn_is_done_anew() -> None:
    async def test() -> None:
        peer = Peer()
        async with serving(peer.logprobs) as address, raw_stream(address) as rpc:
            await rpc.write(frame(logprobs(7, b"a", key="k")))
            await peer.arrived.wait()
            await rpc.write(frame(common_pb2.Call(id=7, cancel=True)))
            assert [one.error.kind for one in await replies(rpc, 1)] == ["Cancelled"]
            peer.gate.set()
            await rpc.write(frame(logprobs(8, b"a", key="k")))
            assert [answer(one) for one in await replies(rpc, 1)] == [b"a!"]

    run(test())


def test_a_call_that_has_a_key_outlives_its_stream() -> None:
    async def test() -> None:
        peer = Peer()
        async with serving(peer.logprobs) as address:
            async with raw_stream(address) as rpc:
                await rpc.write(frame(logprobs(1, b"a", key="k"), logprobs(2, b"b")))
                await peer.arrived.wait()
            await peer.withdrawn.wait()  # the one without
            async with raw_stream(address) as rpc:  # of the next coordinator
                await rpc.write(frame(logprobs(1, b"a", key="k"), term=2))
                await rpc.write(frame(logprobs(2, b"c"), term=2))
                peer.gate.set()
                assert sorted(answer(one) for one in await replies(rpc, 2)) == [b"a!", b"c!"]
            assert sorted(peer.seen) == [b"a", b"b", b"c"]

    run(test())


def test_a_coordinator_in_whose_place_another_has_come_is_not_heeded() -> None:
    async def test() -> None:
        peer = Peer()
        peer.gate.set()
        async with serving(peer.logprobs) as address, raw_stream(address) as former:
            await former.write(frame(logprobs(1, b"a"), term=1))
            assert [answer(one) for one in await replies(former, 1)] == [b"a!"]
            async with raw_stream(address) as rpc:
                await rpc.write(frame(logprobs(1, b"b"), term=2))
                assert [answer(one) for one in await replies(rpc, 1)] == [b"b!"]
            await former.write(frame(logprobs(2, b"late"), term=1))
            with pytest.raises(grpc.aio.AioRpcError, match="term 1 has been followed by that of term 2"):
                await replies(former, 1)
            assert peer.seen == [b"a", b"b"]

    run(test())


def test_kept_answers_are_bounded_by_their_bytes() -> None:
    answers = KeptAnswers(10)
    for key, body in (("a", b"1234"), ("b", b"1234"), ("a", b"12"), ("c", b"1234")):
        answers.put(key, [body])
    assert [answers.get(key) for key in "abc"] == [[b"12"], [b"1234"], [b"1234"]]
    answers.put("d", [b"1"])
    assert [answers.get(key) for key in "abcd"] == [[b"12"], None, [b"1234"], [b"1"]]
    answers.put("e", [b"x" * 11])
    assert not answers._answers
