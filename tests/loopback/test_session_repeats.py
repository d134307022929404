"""A call that comes again under its id is done once, unless it was refused."""

from __future__ import annotations

from collections.abc import Awaitable

from runtime import errors
from runtime.types import LogprobRequest
from services.rpc.generated import common_pb2
from tests.loopback.session_peers import (
    Peer,
    answer,
    echo,
    frame,
    logprobs,
    raw_stream,
    replies,
    run,
    serving,
)


def test_a_repeated_id_is_answered_from_memory_and_not_done_twice() -> None:
    async def test() -> None:
        peer = Peer()
        async with serving(peer.logprobs) as address:
            async with raw_stream(address) as rpc:
                await rpc.write(frame(logprobs(7, b"a")))
                await peer.arrived.wait()
                await rpc.write(frame(logprobs(7, b"a"), logprobs(8, b"b")))  # while the first is under way
                peer.gate.set()
                assert sorted((one.id, answer(one)) for one in await replies(rpc, 3)) == [(7, b"a!"), (7, b"a!"), (8, b"b!")]
                await rpc.write(frame(logprobs(7, b"a")))  # and after it
                assert [answer(one) for one in await replies(rpc, 1)] == [b"a!"]
            async with raw_stream(address) as rpc:  # also on another stream of the same peer
                await rpc.write(frame(logprobs(8, b"b")))
                assert [answer(one) for one in await replies(rpc, 1)] == [b"b!"]
                assert peer.seen == [b"a", b"b"]
                await rpc.write(frame(logprobs(8, b"c"), peer="another"))
                assert [answer(one) for one in await replies(rpc, 1)] == [b"c!"]
                assert peer.seen == [b"a", b"b", b"c"]

    run(test())


def test_a_repeated_id_that_was_withdrawn_is_answered_as_cancelled() -> None:
    async def test() -> None:
        peer = Peer()
        async with serving(peer.logprobs) as address, raw_stream(address) as rpc:
            await rpc.write(frame(logprobs(7, b"a")))
            await peer.arrived.wait()
            await rpc.write(frame(common_pb2.Call(id=7, cancel=True)))
            await peer.withdrawn.wait()
            await rpc.write(frame(logprobs(7, b"a")))
            assert [one.error.kind for one in await replies(rpc, 2)] == ["Cancelled"] * 2
            assert peer.seen == [b"a"]

    run(test())


def test_a_refused_call_may_be_repeated_under_its_id() -> None:
    async def test() -> None:
        attempts = 0

        def handler(message: LogprobRequest, timeout: float | None) -> Awaitable[bytes]:
            nonlocal attempts
            attempts += 1
            if attempts == 1:
                raise errors.Overloaded("reference-0: mailbox is full", 0.01)
            return echo(message, timeout)

        async with serving(handler) as address, raw_stream(address) as rpc:
            await rpc.write(frame(logprobs(1, b"a")))
            assert (await replies(rpc, 1))[0].error.kind == "Overloaded"
            await rpc.write(frame(logprobs(1, b"a")))
            assert answer((await replies(rpc, 1))[0]) == b"a"

    run(test())
