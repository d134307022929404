"""Many calls on one session over real gRPC: each gets its own answer, in few frames, large bodies cut up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from runtime.types import SCHEMA_VERSION, LogprobRequest
from services.rpc import stream
from services.rpc.generated import common_pb2, reference_pb2
from tests.loopback.session_peers import (
    LOGPROBS,
    PATIENCE,
    Peer,
    answer,
    connected,
    echo,
    frame,
    logprobs,
    raw_peer,
    raw_stream,
    replies,
    request,
    run,
    serving,
)


def test_many_calls_are_under_way_at_once_and_each_gets_its_own_answer() -> None:
    async def test() -> None:
        peer, count = Peer(), 300

        async def handler(message: LogprobRequest) -> bytes:
            if len(peer.seen) == count - 1:
                peer.gate.set()  # no call is answered before all have come
            return await peer.logprobs(message)

        async with serving(handler) as address, connected(address) as session:
            payloads = [b"%d" % number for number in range(count)]
            answers = await asyncio.gather(*(session.call("Logprobs", request(one), PATIENCE) for one in payloads))
        assert answers == [one + b"!" for one in payloads]

    run(test())


def test_calls_posted_together_travel_in_few_frames() -> None:
    async def test() -> None:
        frames: list[int] = []

        async def serve(received: Any, context: Any) -> AsyncIterator[common_pb2.ReplyFrame]:
            async for one in received:
                frames.append(len(one.calls))
                body = reference_pb2.LogprobReply(logprobs=b"x").SerializeToString()
                yield common_pb2.ReplyFrame(
                    schema=SCHEMA_VERSION, replies=[common_pb2.Reply(id=call.id, body=body) for call in one.calls]
                )

        async with raw_peer(serve) as address, connected(address) as session:
            calls = [session.post(LOGPROBS, request(), PATIENCE) for _ in range(100)]
            assert await asyncio.gather(*calls) == [b"x"] * 100
        assert frames == [stream.COMPANY] * 3 + [100 - 3 * stream.COMPANY]

    run(test())


def test_answers_that_are_ready_together_travel_in_few_frames() -> None:
    async def test() -> None:
        async with serving(echo) as address, raw_stream(address) as rpc:
            await rpc.write(frame(*(logprobs(number, b"%d" % number) for number in range(1, 101))))
            frames: list[Any] = []
            while sum(len(one.replies) for one in frames) < 100:
                frames.append(await rpc.read())
            assert len(frames) <= 20  # a busy machine may take a turn for a few of them
            assert {reply.id: answer(reply) for one in frames for reply in one.replies} == {
                number: b"%d" % number for number in range(1, 101)
            }

    run(test())


def test_a_body_above_one_mebibyte_is_cut_up_both_ways() -> None:
    async def test() -> None:
        payload = np.random.default_rng(0).bytes((9 << 19) + 7)  # four and a half mebibytes
        async with serving(echo) as address:
            async with connected(address) as session:
                assert await session.call("Logprobs", request(payload), PATIENCE) == payload
            async with raw_stream(address) as rpc:
                body = logprobs(1, payload).body
                pieces = list(stream.split([body]))
                assert len(pieces) == 5
                for chunk, more in pieces:
                    await rpc.write(frame(logprobs(1, b"", body=b"".join(chunk), more=more)))
                parts = await replies(rpc, 5)
                assert all(len(part.body) <= stream.CHUNK for part in parts)
                assert [part.more for part in parts] == [True] * 4 + [False]
                assert reference_pb2.LogprobReply.FromString(b"".join(part.body for part in parts)).logprobs == payload

    run(test())


def test_large_and_small_calls_interleave() -> None:
    async def test() -> None:
        payloads = [np.random.default_rng(size).bytes(size) for size in (3 << 20, 10, (1 << 20) + 1, 0, 2 << 20)]
        async with serving(echo) as address, connected(address) as session:
            assert await asyncio.gather(*(session.call("Logprobs", request(one), PATIENCE) for one in payloads)) == payloads

    run(test())


def test_calls_reach_the_peer_in_the_order_of_posting() -> None:
    async def test() -> None:
        peer = Peer()
        peer.gate.set()
        payloads = [b"%d" % number + bytes(number == 30 and 2 << 20) for number in range(120)]
        async with serving(peer.logprobs) as address, connected(address) as session:
            posted = []
            for number, payload in enumerate(payloads):
                posted.append(session.post(LOGPROBS, request(payload), PATIENCE))
                if number % 50 == 0:
                    await asyncio.sleep(0.003)  # so that there are several frames
            await asyncio.gather(*reversed(posted))
        assert [one.rstrip(b"\0") for one in peer.seen] == [b"%d" % number for number in range(120)]

    run(test())


def test_two_callers_do_not_get_each_others_answers() -> None:
    async def test() -> None:
        async with serving(echo) as address, connected(address) as one, connected(address) as other:
            assert await one.call("Logprobs", request(b"one"), PATIENCE) == b"one"
            assert await other.call("Logprobs", request(b"other"), PATIENCE) == b"other"

    run(test())
