"""A session over real gRPC: many calls, deadlines, faults, and calls that repeat."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
import numpy as np
import pytest

from runtime import errors
from runtime.types import SCHEMA_VERSION, LogprobRequest
from services.model_service import Actor, Request
from services.rpc import contract, server
from services.rpc.client import Channel, Session, call, watch
from services.rpc.generated import common_pb2, reference_pb2
from services.rpc.server import ReplyCache, Server
from tests.coroutines import driven_by
from tests.loopback.session_peers import (
    LOGPROBS,
    PATIENCE,
    Peer,
    answer,
    connected,
    echo,
    frame,
    key_of,
    logprobs,
    raw_peer,
    raw_stream,
    replies,
    request,
    run,
    serving,
    unary,
)

# ---- Many calls on one session over real gRPC: each gets its own answer, in few frames, large bodies cut up


@driven_by(run)
async def test_many_calls_are_under_way_at_once_and_each_gets_its_own_answer() -> None:
    peer, count = Peer(), 300

    async def handler(message: LogprobRequest) -> bytes:
        if len(peer.seen) == count - 1:
            peer.gate.set()  # no call is answered before all have come
        return await peer.logprobs(message)

    async with serving(handler) as address, connected(address) as session:
        payloads = [b"%d" % number for number in range(count)]
        answers = await asyncio.gather(*(session.call("Logprobs", request(one), PATIENCE) for one in payloads))
    assert answers == [one + b"!" for one in payloads]


@driven_by(run)
async def test_calls_posted_together_travel_in_few_frames() -> None:
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
    assert frames == [contract.MAX_BATCH] * 3 + [100 - 3 * contract.MAX_BATCH]


@driven_by(run)
async def test_a_body_above_one_mebibyte_is_cut_up_both_ways() -> None:
    payload = np.random.default_rng(0).bytes((9 << 19) + 7)  # four and a half mebibytes
    async with serving(echo) as address:
        async with connected(address) as session:
            assert await session.call("Logprobs", request(payload), PATIENCE) == payload
        async with raw_stream(address) as rpc:
            body = logprobs(1, payload).body
            pieces = list(contract.split([body]))
            assert len(pieces) == 5
            for chunk, more in pieces:
                await rpc.write(frame(logprobs(1, b"", body=b"".join(chunk), more=more)))
            parts = await replies(rpc, 5)
            assert all(len(part.body) <= contract.CHUNK for part in parts)
            assert [part.more for part in parts] == [True] * 4 + [False]
            assert reference_pb2.LogprobReply.FromString(b"".join(part.body for part in parts)).logprobs == payload


@driven_by(run)
async def test_calls_reach_the_peer_in_the_order_of_posting() -> None:
    peer = Peer(ready=True)
    payloads = [b"%d" % number + bytes(number == 30 and 2 << 20) for number in range(120)]
    async with serving(peer.logprobs) as address, connected(address) as session:
        posted = []
        for number, payload in enumerate(payloads):
            posted.append(session.post(LOGPROBS, request(payload), PATIENCE))
            if number % 50 == 0:
                await asyncio.sleep(0.003)  # so that there are several frames
        await asyncio.gather(*reversed(posted))
    assert [one.rstrip(b"\0") for one in peer.seen] == [b"%d" % number for number in range(120)]


# ---- A session's calls that are not answered in time: deadlines and withdrawal


@driven_by(run)
async def test_a_deadline_names_service_and_method_and_withdraws_the_call() -> None:
    peer = Peer()
    async with serving(peer.logprobs) as address, connected(address) as session:
        with pytest.raises(errors.Unanswered, match=r"^reference-0: Logprobs: did not answer \(deadline 1 s\)$"):
            await session.call("Logprobs", request(), 1.0)
        await peer.withdrawn.wait()
        peer.gate.set()
        assert await session.call("Logprobs", request(b"next"), PATIENCE) == b"next!"


@driven_by(run)
async def test_a_cancelled_call_is_withdrawn_from_an_actors_line() -> None:
    class Busy:
        busy = False

        def __init__(self) -> None:
            self.seen: list[bytes] = []
            self.gate = asyncio.Event()
            self.arrived = asyncio.Event()

        async def receive(self, requests: Sequence[Request]) -> None:
            for each in requests:
                self.seen.append(each.message.payload)
                self.arrived.set()
                await self.gate.wait()
                each.reply(b"")

        async def advance(self, interrupted: Callable[[], bool]) -> None: ...

    behaviour = Busy()
    actor = Actor("reference-0", behaviour)
    serve = asyncio.create_task(actor.run())
    mailed = asyncio.Event()

    def handler(message: LogprobRequest) -> Awaitable[Any]:
        future = actor.send(message)
        if message.payload == b"second":
            future.add_done_callback(lambda _: mailed.set())
        return future

    async with serving(handler) as address, connected(address) as session:
        first = asyncio.create_task(session.call("Logprobs", request(b"first"), PATIENCE))
        second = asyncio.create_task(session.call("Logprobs", request(b"second"), PATIENCE))
        await behaviour.arrived.wait()
        second.cancel()
        await mailed.wait()
        behaviour.gate.set()
        await first
        assert await session.call("Logprobs", request(b"third"), PATIENCE) == b""
        assert second.cancelled()
    assert behaviour.seen == [b"first", b"third"]
    serve.cancel()


@driven_by(run)
async def test_closing_the_session_withdraws_its_calls() -> None:
    """Those without a key, as of an evaluation's group: the others wait for the next coordinator."""
    peer = Peer()
    async with serving(peer.logprobs) as address:
        async with connected(address) as session:
            waiting = asyncio.gather(session.call("Logprobs", request(b"", -1), PATIENCE), return_exceptions=True)
            await peer.arrived.wait()
        await peer.withdrawn.wait()
        (fault,) = await waiting
        assert isinstance(fault, errors.ServiceFault)
        assert "reference-0: Logprobs: was closed" in str(fault)


@driven_by(run)
async def test_closing_the_session_fails_its_unary_calls_and_not_the_task_that_made_them() -> None:
    asked, never = asyncio.Event(), asyncio.Event()

    async def status(_: None) -> None:
        asked.set()
        await never.wait()

    async with serving(echo, Process={"Status": status}) as address, connected(address) as session:
        asking = asyncio.create_task(session.unary("Process", "Status"))
        await asked.wait()
        await session.close()
        with pytest.raises(errors.Unreachable, match="reference-0: Status: was closed"):
            await asking


# ----
# What goes wrong between a session and its peer: frames that are not valid, errors that the peer raises, a peer that dies.


@driven_by(run)
async def test_frames_of_another_schema_are_refused_and_nothing_is_done_and_answers_end_the_session() -> None:
    peer = Peer(ready=True)
    async with serving(peer.logprobs) as address, raw_stream(address) as rpc:
        await rpc.write(frame(logprobs(1, b"a"), schema=1))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await replies(rpc, 1)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "schema 1 is not supported; this process speaks" in (refused.value.details() or "")
        assert peer.seen == []

    async def serve(received: Any, context: Any) -> AsyncIterator[common_pb2.ReplyFrame]:
        async for _ in received:
            yield common_pb2.ReplyFrame(schema=9)

    async with raw_peer(serve) as address, connected(address) as session:
        with pytest.raises(errors.ServiceFault, match=r"reference-0: .*schema 9 is not supported"):
            await session.call("Logprobs", request(), PATIENCE)


@pytest.mark.parametrize("which", ["_settle", "_write"])
@driven_by(run)
async def test_a_fault_of_our_own_ends_the_session_with_its_reason(monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    def faulty(*_: object) -> None:
        raise ValueError("is odd")

    async def faulty_write(*_: object) -> None:
        faulty()

    monkeypatch.setattr(Session, which, faulty_write if which == "_write" else faulty)
    async with serving(echo) as address, connected(address) as session:
        with pytest.raises(errors.Unreachable, match=r"reference-0: Logprobs: ValueError: is odd"):
            await session.call("Logprobs", request(), PATIENCE)


@driven_by(run)
async def test_an_unknown_method_and_a_body_that_does_not_decode_are_refused_and_the_stream_goes_on() -> None:
    peer = Peer(ready=True)
    async with serving(peer.logprobs) as address, raw_stream(address) as rpc:
        await rpc.write(frame(logprobs(1, b"", method="Generate"), logprobs(2, b"", body=b"\xff"), logprobs(3, b"a")))
        found = {one.id: one for one in await replies(rpc, 3)}
        assert (found[1].error.kind, found[1].error.message) == ("InvalidMessage", "Reference has no method 'Generate'")
        assert found[2].error.kind == "InvalidMessage"
        assert answer(found[3]) == b"a!"
        assert peer.seen == [b"a"]


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
@driven_by(run)
async def test_what_the_peer_raises_is_raised_here_over_the_stream_and_unary(error: Exception, code: grpc.StatusCode) -> None:
    async def handler(message: LogprobRequest) -> bytes:
        raise error

    async with serving(handler) as address, connected(address) as session:
        for waiting in (session.post(LOGPROBS, request(), PATIENCE), unary(address, request())):
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


@driven_by(run)
async def test_a_long_error_arrives_over_a_unary_call_too() -> None:
    async def handler(message: LogprobRequest) -> bytes:
        raise errors.InvalidMessage("too long: " + "é" * 50_000)

    async with serving(handler) as address:
        with pytest.raises(errors.InvalidMessage, match=r"^too long: éé"):
            await unary(address, request())


@driven_by(run)
async def test_a_dead_peer_fails_the_calls_under_way_and_every_later_one() -> None:
    peer = Peer()
    server = Server({"Reference": {"Logprobs": peer.logprobs}})
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


@driven_by(run)
async def test_nobody_there_is_a_deadline_that_names_the_address() -> None:
    async with serving(echo) as address:
        pass
    session = Session(Channel(address), "reference-0", "Reference")
    with pytest.raises(
        errors.DeadlineExceeded,
        match=rf"reference-0: connect: no connection to {address}: no process listens there \(deadline 0.2 s\)",
    ):
        await session.open(0.2)
    await session.close()
    async with Channel(address) as channel:
        said = rf"x: Status: no connection to {address}: no process listens there \(deadline 0.2 s\)"
        with pytest.raises(errors.DeadlineExceeded, match=said):
            await call(channel, "x", contract.METHODS["Process", "Status"], None, 0.2)
    with pytest.raises(errors.ServiceFault, match="coordinator: Watch: UNAVAILABLE"):
        async for _ in watch(address):
            pass


SERVED = """
import asyncio
from services.rpc.server import Server
from tests.loopback.session_peers import Peer

async def serve():
    server = Server({"Reference": {"Logprobs": Peer().logprobs}}, silence=1.0)
    print(server.bind("127.0.0.1", 0), flush=True)
    await server.start()
    await asyncio.Event().wait()

asyncio.run(serve())
"""


@driven_by(run)
async def test_a_peer_that_is_stopped_is_silent_and_one_that_only_computes_is_not() -> None:
    """The first call is never answered, while its process answers pings; stopped, it answers none."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", SERVED, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        address = (await asyncio.wait_for(process.stdout.readline(), PATIENCE)).decode().strip()
        session = Session(Channel(address, silence=1.0), "reference-0", "Reference")
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


# ---- A call that comes again under its key is done once, and answered as before until its answer is acknowledged


K, OTHER = 1_000_001, 1_000_002  # groups


@driven_by(run)
async def test_a_call_is_joined_while_it_is_under_way_and_answered_from_memory_after_it() -> None:
    peer = Peer()
    async with serving(peer.logprobs) as address:
        async with raw_stream(address) as rpc:
            await rpc.write(frame(logprobs(7, b"a", group_id=K)))
            await peer.arrived.wait()
            await rpc.write(frame(logprobs(8, b"a", group_id=K), logprobs(9, b"b", group_id=OTHER)))
            peer.gate.set()
            assert sorted((one.id, answer(one)) for one in await replies(rpc, 3)) == [(7, b"a!"), (8, b"a!"), (9, b"b!")]
            await rpc.write(frame(logprobs(10, b"a", group_id=K)))
            assert [answer(one) for one in await replies(rpc, 1)] == [b"a!"]
        async with raw_stream(address) as rpc:  # also on the stream of another caller
            await rpc.write(frame(logprobs(1, b"b", group_id=OTHER)))
            assert [answer(one) for one in await replies(rpc, 1)] == [b"b!"]
        assert peer.seen == [b"a", b"b"]


@driven_by(run)
async def test_what_is_acknowledged_or_has_no_key_is_done_again() -> None:
    peer = Peer(ready=True)
    async with serving(peer.logprobs) as address, raw_stream(address) as rpc:
        for calls, acknowledged in (
            ([logprobs(1, b"a", group_id=K), logprobs(2, b"b")], []),
            ([logprobs(3, b"b")], [key_of(K)]),
        ):
            await rpc.write(frame(*calls, acknowledged=acknowledged))
            await replies(rpc, len(calls))
        await rpc.write(frame(logprobs(4, b"a", group_id=K)))
        assert [answer(one) for one in await replies(rpc, 1)] == [b"a!"]
        assert peer.seen == [b"a", b"b", b"b", b"a"]


@driven_by(run)
async def test_a_session_acknowledges_what_it_is_told_to_and_what_it_withdrew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Along with its next call."""
    kept: list[ReplyCache] = []

    class Noted(ReplyCache):
        def __init__(self, most: int):
            super().__init__(most)
            kept.append(self)

    monkeypatch.setattr(server, "ReplyCache", Noted)
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


@driven_by(run)
async def test_a_call_that_was_withdrawn_is_done_anew_and_one_that_has_a_key_outlives_its_stream() -> None:
    peer = Peer()
    async with serving(peer.logprobs) as address, raw_stream(address) as rpc:
        await rpc.write(frame(logprobs(7, b"a", group_id=K)))
        await peer.arrived.wait()
        await rpc.write(frame(common_pb2.Call(id=7, cancel=True)))
        assert [one.error.kind for one in await replies(rpc, 1)] == ["Cancelled"]
        peer.gate.set()
        await rpc.write(frame(logprobs(8, b"a", group_id=K)))
        assert [answer(one) for one in await replies(rpc, 1)] == [b"a!"]
    peer = Peer()
    async with serving(peer.logprobs) as address:
        async with raw_stream(address) as rpc:
            await rpc.write(frame(logprobs(1, b"a", group_id=K), logprobs(2, b"b")))
            await peer.arrived.wait()
        await peer.withdrawn.wait()  # the one without
        async with raw_stream(address) as rpc:  # of the next coordinator
            await rpc.write(frame(logprobs(1, b"a", group_id=K), term=2))
            await rpc.write(frame(logprobs(2, b"c"), term=2))
            peer.gate.set()
            assert sorted(answer(one) for one in await replies(rpc, 2)) == [b"a!", b"c!"]
        assert sorted(peer.seen) == [b"a", b"b", b"c"]


@driven_by(run)
async def test_a_coordinator_in_whose_place_another_has_come_is_not_heeded() -> None:
    peer = Peer(ready=True)
    async with serving(peer.logprobs) as address, raw_stream(address) as former:
        await former.write(frame(logprobs(1, b"a"), term=1))
        assert [answer(one) for one in await replies(former, 1)] == [b"a!"]
        async with raw_stream(address) as rpc:
            await rpc.write(frame(logprobs(1, b"b"), term=2))
            assert [answer(one) for one in await replies(rpc, 1)] == [b"b!"]
        await former.write(frame(logprobs(2, b"late"), term=1))
        with pytest.raises(grpc.aio.AioRpcError, match="term 1 is over: the coordinator has term 2"):
            await replies(former, 1)
        assert peer.seen == [b"a", b"b"]


def test_kept_answers_are_bounded_by_their_bytes() -> None:
    answers = ReplyCache(10)
    for key, body in (("a", b"1234"), ("b", b"1234"), ("a", b"12"), ("c", b"1234")):
        answers.put(key, [body])
    assert [answers.get(key) for key in "abc"] == [[b"12"], [b"1234"], [b"1234"]]
    answers.put("d", [b"1"])
    assert [answers.get(key) for key in "abcd"] == [[b"12"], None, [b"1234"], [b"1"]]
    answers.put("e", [b"x" * 11])
    assert not answers._answers
