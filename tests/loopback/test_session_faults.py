"""What goes wrong between a session and its peer: frames that are not valid, errors that the peer raises, a peer that dies."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from runtime import errors
from runtime.types import LogprobRequest
from services.rpc import contract
from services.rpc.generated import common_pb2
from services.rpc.server import Server
from services.rpc.session import Channel, Session, call, watch
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
    unary,
)

# ---------------------------------------------------------------------------------------------------- what is not valid


def test_frames_of_another_schema_are_refused_and_nothing_is_done() -> None:
    async def test() -> None:
        peer = Peer()
        peer.gate.set()
        async with serving(peer.logprobs) as address, raw_stream(address) as rpc:
            await rpc.write(frame(logprobs(1, b"a"), schema=1))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await replies(rpc, 1)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "schema 1 is not supported; this process speaks" in (refused.value.details() or "")
            assert peer.seen == []

    run(test())


def test_answers_of_another_schema_end_the_session() -> None:
    async def serve(received: Any, context: Any) -> AsyncIterator[common_pb2.ReplyFrame]:
        async for _ in received:
            yield common_pb2.ReplyFrame(schema=9)

    async def test() -> None:
        async with raw_peer(serve) as address, connected(address) as session:
            with pytest.raises(errors.ServiceFault, match=r"reference-0: .*schema 9 is not supported"):
                await session.call("Logprobs", request(), PATIENCE)

    run(test())


@pytest.mark.parametrize("which", ["_settle", "_write"])
def test_a_fault_of_our_own_ends_the_session_with_its_reason(monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    def faulty(*_: object) -> None:
        raise ValueError("is odd")

    async def faulty_write(*_: object) -> None:
        faulty()

    monkeypatch.setattr(Session, which, faulty_write if which == "_write" else faulty)

    async def test() -> None:
        async with serving(echo) as address, connected(address) as session:
            with pytest.raises(errors.Unreachable, match=r"reference-0: Logprobs: ValueError: is odd"):
                await session.call("Logprobs", request(), PATIENCE)

    run(test())


def test_an_unknown_method_and_a_body_that_does_not_decode_are_refused_and_the_stream_goes_on() -> None:
    async def test() -> None:
        peer = Peer()
        peer.gate.set()
        async with serving(peer.logprobs) as address, raw_stream(address) as rpc:
            await rpc.write(frame(logprobs(1, b"", method="Generate"), logprobs(2, b"", body=b"\xff"), logprobs(3, b"a")))
            found = {one.id: one for one in await replies(rpc, 3)}
            assert (found[1].error.kind, found[1].error.message) == ("InvalidMessage", "Reference has no method 'Generate'")
            assert found[2].error.kind == "InvalidMessage"
            assert answer(found[3]) == b"a!"
            assert peer.seen == [b"a"]

    run(test())


# ------------------------------------------------------------------------------------------------- what the peer raises


RAISED: list[tuple[Exception, grpc.StatusCode]] = [
    (errors.InvalidMessage("group 1 has no samples"), grpc.StatusCode.INVALID_ARGUMENT),
    (errors.DeadlineExceeded("reference-0", "Logprobs", "was not reached in time", 2.0), grpc.StatusCode.DEADLINE_EXCEEDED),
    (errors.Cancelled("group 1 was cancelled"), grpc.StatusCode.CANCELLED),
    (errors.UserError("model.path: no such folder"), grpc.StatusCode.FAILED_PRECONDITION),
    (errors.ConfigError(["a: is missing", "b: is missing"]), grpc.StatusCode.FAILED_PRECONDITION),
    (errors.ServiceFault("reference-0", "load", "out of memory"), grpc.StatusCode.UNAVAILABLE),
    (errors.InvariantViolated("trained twice"), grpc.StatusCode.INTERNAL),
]


@pytest.mark.parametrize(("error", "code"), RAISED, ids=[type(error).__name__ for error, _ in RAISED])
def test_what_the_peer_raises_is_raised_here_over_the_stream_and_unary(error: Exception, code: grpc.StatusCode) -> None:
    async def handler(message: LogprobRequest) -> bytes:
        raise error

    async def test() -> None:
        async with serving(handler) as address, connected(address) as session:
            for waiting in (
                session.post(LOGPROBS, request(), PATIENCE),
                unary(address, request()),
            ):
                with pytest.raises(type(error)) as raised:
                    await waiting
                assert type(raised.value) is type(error)
                assert str(raised.value) == str(error)
                assert vars(raised.value) == vars(error)
            async with Channel(address) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as failed:
                    await channel.grpc.unary_unary("/sluice.v1.Reference/Logprobs")(logprobs(1, b"").body)
            assert failed.value.code() is code
            assert failed.value.details() == str(error)

    run(test())


def test_an_error_that_is_not_sluices_own_names_service_and_method() -> None:
    async def handler(message: LogprobRequest) -> bytes:
        raise ValueError("bad shape")

    async def test() -> None:
        async with serving(handler) as address, connected(address) as session:
            with pytest.raises(errors.ServiceFault, match=r"^reference-0: Logprobs: ValueError: bad shape$"):
                await session.post(LOGPROBS, request(), PATIENCE)
            with pytest.raises(errors.ServiceFault, match=r"^reference-0: Logprobs: .*bad shape"):
                await unary(address, request())

    run(test())


def test_a_long_error_arrives_over_a_unary_call_too() -> None:
    async def handler(message: LogprobRequest) -> bytes:
        raise errors.InvalidMessage("too long: " + "é" * 50_000)

    async def test() -> None:
        async with serving(handler) as address:
            with pytest.raises(errors.InvalidMessage, match=r"^too long: éé"):
                await unary(address, request())

    run(test())


# ----------------------------------------------------------------------------------------------------- a peer that dies


def test_a_dead_peer_fails_the_calls_under_way_and_every_later_one() -> None:
    async def test() -> None:
        peer = Peer()
        server = Server({"Reference": {"Logprobs": peer.logprobs}}, {})
        address = server.bind("127.0.0.1", 0)
        await server.start()
        async with connected(address) as session:
            waiting = [asyncio.ensure_future(session.post(LOGPROBS, request(), 60.0)) for _ in range(3)]
            await peer.arrived.wait()
            await server.stop(0)
            for outcome in await asyncio.gather(*waiting, return_exceptions=True):
                assert type(outcome) is errors.Unreachable
                assert outcome.service == "reference-0"
                assert "connection" in str(outcome)
            with pytest.raises(errors.Unreachable, match=r"reference-0: Logprobs: .*connection"):
                await session.call("Logprobs", request(), 60.0)

    run(test())


def test_nobody_there_is_a_deadline_that_names_the_address() -> None:
    async def test() -> None:
        async with serving(echo) as address:
            pass
        session = Session(address, "reference-0", "Reference")
        with pytest.raises(
            errors.DeadlineExceeded,
            match=rf"reference-0: connect: no connection to {address}: nobody listens there \(deadline 0.2 s\)",
        ):
            await session.open(0.2)
        await session.close()
        async with Channel(address) as channel:
            said = rf"x: Status: no connection to {address}: nobody listens there \(deadline 0.2 s\)"
            with pytest.raises(errors.DeadlineExceeded, match=said):
                await call(channel, "x", contract.METHODS["Process", "Status"], None, 0.2)
        with pytest.raises(errors.ServiceFault, match="coordinator: Watch: UNAVAILABLE"):
            async for _ in watch(address):
                pass

    run(test())


SERVED = """
import asyncio
from services.rpc.server import Server
from tests.loopback.session_peers import Peer

async def serve():
    server = Server({"Reference": {"Logprobs": Peer().logprobs}}, {}, silence=1.0)
    print(server.bind("127.0.0.1", 0), flush=True)
    await server.start()
    await asyncio.Event().wait()

asyncio.run(serve())
"""


def test_a_peer_that_is_stopped_is_silent_and_one_that_only_computes_is_not() -> None:
    """The first call is never answered, while its process answers pings; stopped, it answers none."""

    async def test() -> None:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", SERVED, stdout=asyncio.subprocess.PIPE)
        try:
            assert process.stdout is not None
            address = (await asyncio.wait_for(process.stdout.readline(), PATIENCE)).decode().strip()
            session = Session(address, "reference-0", "Reference", silence=1.0)
            await session.open(PATIENCE)
            asking = asyncio.ensure_future(session.post(LOGPROBS, request(), PATIENCE))
            await asyncio.wait({asking}, timeout=2.5)  # longer than the silence that is allowed
            assert not asking.done()
            process.send_signal(signal.SIGSTOP)
            with pytest.raises(errors.Unreachable, match="reference-0: Logprobs: connection lost"):
                await asking
            await session.close()
        finally:
            process.kill()
            await process.wait()

    run(test())
