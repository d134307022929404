"""Both ends of the message path over real gRPC on 127.0.0.1: sessions, unary calls, health, reflection."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from runtime import commands, errors
from runtime.actor import Actor, Letter
from runtime.status import Progress, Status
from runtime.types import LogprobRequest, PolicyVersion
from services import stream, wire
from services.rpc import common_pb2, reference_pb2
from services.server import OPTIONS, Handler, Server
from services.session import Session, call, open_channel, watch

DEADLINE = 20.0  # seconds that one test may take
PATIENCE = 5.0  # seconds that one call may take where it is to succeed


def run(test: Coroutine[Any, Any, None]) -> None:
    async def within() -> None:
        await asyncio.wait_for(test, DEADLINE)

    asyncio.run(within())


def request(payload: bytes = b"") -> LogprobRequest:
    return LogprobRequest(group_id=1, payload=payload)


async def echo(message: LogprobRequest, timeout: float | None) -> bytes:
    return message.payload


class Peer:
    """Handlers of the reference role that note what they get, and answer when `gate` is set."""

    def __init__(self) -> None:
        self.seen: list[bytes] = []
        self.gate = asyncio.Event()
        self.arrived = asyncio.Event()
        self.withdrawn = asyncio.Event()

    async def logprobs(self, message: LogprobRequest, timeout: float | None) -> bytes:
        self.seen.append(message.payload)
        self.arrived.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.withdrawn.set()
            raise
        return message.payload + b"!"


@asynccontextmanager
async def serving(handler: Handler, **others: Mapping[str, Handler]) -> AsyncIterator[str]:
    """A server of the reference role with one handler; yields its address."""
    server = Server({"Reference": {"Logprobs": handler}, **others}, {})
    address = f"127.0.0.1:{server.bind('127.0.0.1', 0)}"
    await server.start()
    try:
        yield address
    finally:
        await server.stop(0)


@asynccontextmanager
async def connected(address: str, service: str = "Reference") -> AsyncIterator[Session]:
    session = Session(address, f"{service.lower()}-0", service)
    try:
        await session.open(PATIENCE)
        yield session
    finally:
        await session.close()


@asynccontextmanager
async def raw_stream(address: str) -> AsyncIterator[Any]:
    """The session stream without `Session`."""
    async with open_channel(address) as channel:
        rpc = channel.stream_stream(
            "/sluice.v1.Reference/Session", common_pb2.CallFrame.SerializeToString, common_pb2.ReplyFrame.FromString
        )()
        yield rpc
        rpc.cancel()


def frame(*calls: common_pb2.Call, peer: str = "raw", schema: int = 1) -> common_pb2.CallFrame:
    return common_pb2.CallFrame(schema=schema, peer=peer, calls=calls)


def logprobs(id_: int, payload: bytes, **fields: Any) -> common_pb2.Call:
    body = wire.METHODS["Reference", "Logprobs"].request.pack(request(payload)).SerializeToString()
    return common_pb2.Call(**{"id": id_, "method": "Logprobs", "timeout_ms": 5000, "body": body} | fields)


def answer(reply: common_pb2.Reply) -> bytes:
    assert not reply.HasField("error"), reply.error
    return reference_pb2.LogprobReply.FromString(reply.body).logprobs


async def replies(rpc: Any, count: int) -> list[common_pb2.Reply]:
    out: list[common_pb2.Reply] = []
    while len(out) < count:
        out += (await rpc.read()).replies
    return out


@asynccontextmanager
async def raw_peer(serve: Callable[[Any, Any], AsyncIterator[common_pb2.ReplyFrame]]) -> AsyncIterator[str]:
    """A server of the session stream without `Server`; yields its address."""
    server = grpc.aio.server(options=OPTIONS)
    handler = grpc.stream_stream_rpc_method_handler(
        serve, common_pb2.CallFrame.FromString, common_pb2.ReplyFrame.SerializeToString
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("sluice.v1.Reference", {"Session": handler}),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield address
    finally:
        await server.stop(0)


# --------------------------------------------------------------------------------------------- many calls, one stream


def test_many_calls_are_under_way_at_once_and_each_gets_its_own_answer() -> None:
    async def test() -> None:
        peer, count = Peer(), 300

        async def handler(message: LogprobRequest, timeout: float | None) -> bytes:
            if len(peer.seen) == count - 1:
                peer.gate.set()  # no call is answered before all have come
            return await peer.logprobs(message, timeout)

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
                yield common_pb2.ReplyFrame(schema=1, replies=[common_pb2.Reply(id=call.id, body=body) for call in one.calls])

        async with raw_peer(serve) as address, connected(address) as session:
            calls = [session.post("Logprobs", request(), PATIENCE) for _ in range(100)]
            assert await asyncio.gather(*calls) == [b"x"] * 100
        assert frames == [100]

    run(test())


def test_answers_that_are_ready_together_travel_in_few_frames() -> None:
    async def test() -> None:
        async with serving(echo) as address, raw_stream(address) as rpc:
            await rpc.write(frame(*(logprobs(number, b"%d" % number) for number in range(1, 101))))
            frames: list[Any] = []
            while sum(len(one.replies) for one in frames) < 100:
                frames.append(await rpc.read())
            assert len(frames) <= 5
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
                pieces = list(stream.split(body))
                assert len(pieces) == 5
                for chunk, more in pieces:
                    await rpc.write(frame(logprobs(1, b"", body=chunk, more=more)))
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
                posted.append(session.post("Logprobs", request(payload), PATIENCE))
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


# ---------------------------------------------------------------------------------- deadlines, withdrawal, full mailbox


def test_a_deadline_names_service_and_method_and_withdraws_the_call() -> None:
    async def test() -> None:
        peer = Peer()
        async with serving(peer.logprobs) as address, connected(address) as session:
            with pytest.raises(errors.Unanswered, match=r"^reference-0: Logprobs: did not answer \(deadline 0\.1 s\)$"):
                await session.call("Logprobs", request(), 0.1)
            await peer.withdrawn.wait()
            peer.gate.set()
            assert await session.call("Logprobs", request(b"next"), PATIENCE) == b"next!"

    run(test())


@pytest.mark.parametrize(("timeout", "told"), [(2.5, 2.5), (1e9, 4294967.295)])
def test_the_handler_is_told_the_callers_deadline(timeout: float, told: float) -> None:
    async def test() -> None:
        timeouts: asyncio.Queue[float | None] = asyncio.Queue()

        async def handler(message: LogprobRequest, timeout: float | None) -> bytes:
            timeouts.put_nowait(timeout)
            return b""

        async with serving(handler) as address, connected(address) as session:
            waiting = asyncio.gather(session.post("Logprobs", request(), timeout), return_exceptions=True)
            assert await timeouts.get() == pytest.approx(told)
            await waiting

    run(test())


def test_a_cancelled_call_is_withdrawn_from_the_actors_mailbox() -> None:
    class Busy:
        busy = False

        def __init__(self) -> None:
            self.seen: list[bytes] = []
            self.gate = asyncio.Event()
            self.arrived = asyncio.Event()

        async def receive(self, letters: Sequence[Letter]) -> None:
            for letter in letters:
                self.seen.append(letter.message.payload)
                self.arrived.set()
                await self.gate.wait()
                letter.reply(b"")

        async def advance(self, interrupted: Callable[[], bool]) -> None: ...

    async def test() -> None:
        behaviour = Busy()
        actor = Actor("reference-0", behaviour, capacity=8)
        serve = asyncio.create_task(actor.run())
        mailed = asyncio.Event()

        def handler(message: LogprobRequest, timeout: float | None) -> Awaitable[Any]:
            future = actor.send(message, timeout=timeout)
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
        assert (actor.stats.cancelled, actor.stats.handled) == (1, 2)
        serve.cancel()

    run(test())


def test_closing_the_session_withdraws_its_calls() -> None:
    async def test() -> None:
        peer = Peer()
        async with serving(peer.logprobs) as address:
            async with connected(address) as session:
                waiting = asyncio.gather(session.call("Logprobs", request(), PATIENCE), return_exceptions=True)
                await peer.arrived.wait()
            await peer.withdrawn.wait()
            (fault,) = await waiting
            assert isinstance(fault, errors.ServiceFault)
            assert "reference-0: Logprobs: was closed" in str(fault)

    run(test())


def test_a_full_mailbox_is_tried_again_after_the_delay_that_it_names() -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        times: list[float] = []

        async def handler(message: LogprobRequest, timeout: float | None) -> bytes:
            times.append(loop.time())
            if len(times) <= 2:
                raise errors.Overloaded("reference-0: mailbox is full", 0.05)
            return b"at last"

        async with serving(handler) as address, connected(address) as session:
            assert await session.call("Logprobs", request(), PATIENCE) == b"at last"
            assert len(times) == 3
            assert min(later - earlier for earlier, later in itertools.pairwise(times)) >= 0.045
            times.clear()
            with pytest.raises(errors.Overloaded) as refused:
                await session.post("Logprobs", request(), PATIENCE)  # `post` leaves it to the caller
            assert refused.value.retry_after == 0.05
            times.clear()
            with pytest.raises(errors.Overloaded):  # the delay is longer than what is left
                await session.call("Logprobs", request(), 0.03)
            assert len(times) == 1

    run(test())


# ----------------------------------------------------------------------------------------------------- repeated calls


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


# -------------------------------------------------------------------------------------------------- what is not valid


def test_frames_of_another_schema_are_refused_and_nothing_is_done() -> None:
    async def test() -> None:
        peer = Peer()
        peer.gate.set()
        async with serving(peer.logprobs) as address, raw_stream(address) as rpc:
            await rpc.write(frame(logprobs(1, b"a"), schema=2))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await replies(rpc, 1)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "schema 2 is not supported; this process speaks 1" in (refused.value.details() or "")
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


RAISED: list[tuple[Exception, grpc.StatusCode]] = [
    (errors.InvalidMessage("group 1 has no samples"), grpc.StatusCode.INVALID_ARGUMENT),
    (errors.Overloaded("mailbox is full", 0.5), grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.DeadlineExceeded("reference-0", "mailbox", "was not reached in time", 2.0), grpc.StatusCode.DEADLINE_EXCEEDED),
    (errors.Cancelled("group 1 was cancelled"), grpc.StatusCode.CANCELLED),
    (errors.UserError("model.path: no such folder"), grpc.StatusCode.FAILED_PRECONDITION),
    (errors.ConfigError(["a: is missing", "b: is missing"]), grpc.StatusCode.FAILED_PRECONDITION),
    (errors.ServiceFault("reference-0", "load", "out of memory"), grpc.StatusCode.UNAVAILABLE),
    (errors.InvariantViolated("trained twice"), grpc.StatusCode.INTERNAL),
]


@pytest.mark.parametrize(("error", "code"), RAISED, ids=[type(error).__name__ for error, _ in RAISED])
def test_what_the_peer_raises_is_raised_here_over_the_stream_and_unary(error: Exception, code: grpc.StatusCode) -> None:
    async def handler(message: LogprobRequest, timeout: float | None) -> bytes:
        raise error

    async def test() -> None:
        async with serving(handler) as address, connected(address) as session:
            for waiting in (
                session.post("Logprobs", request(), PATIENCE),
                session.unary("Reference", "Logprobs", request(), PATIENCE),
            ):
                with pytest.raises(type(error)) as raised:
                    await waiting
                assert type(raised.value) is type(error)
                assert str(raised.value) == str(error)
                assert vars(raised.value) == vars(error)
            async with open_channel(address) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as failed:
                    await channel.unary_unary("/sluice.v1.Reference/Logprobs")(logprobs(1, b"").body)
            assert failed.value.code() is code
            assert failed.value.details() == str(error)

    run(test())


def test_an_error_that_is_not_sluices_own_names_service_and_method() -> None:
    async def handler(message: LogprobRequest, timeout: float | None) -> bytes:
        raise ValueError("bad shape")

    async def test() -> None:
        async with serving(handler) as address, connected(address) as session:
            with pytest.raises(errors.ServiceFault, match=r"^reference-0: Logprobs: ValueError: bad shape$"):
                await session.post("Logprobs", request(), PATIENCE)
            with pytest.raises(errors.ServiceFault, match=r"^reference-0: Logprobs: .*bad shape"):
                await session.unary("Reference", "Logprobs", request(), PATIENCE)

    run(test())


def test_a_long_error_arrives_over_a_unary_call_too() -> None:
    async def handler(message: LogprobRequest, timeout: float | None) -> bytes:
        raise errors.InvalidMessage("too long: " + "é" * 50_000)

    async def test() -> None:
        async with serving(handler) as address, connected(address) as session:
            with pytest.raises(errors.InvalidMessage, match=r"^too long: éé"):
                await session.unary("Reference", "Logprobs", request(), PATIENCE)

    run(test())


# ------------------------------------------------------------------------------------------------------ a peer that dies


def test_a_dead_peer_fails_the_calls_under_way_and_every_later_one() -> None:
    async def test() -> None:
        peer = Peer()
        server = Server({"Reference": {"Logprobs": peer.logprobs}}, {})
        address = f"127.0.0.1:{server.bind('127.0.0.1', 0)}"
        await server.start()
        async with connected(address) as session:
            waiting = [asyncio.ensure_future(session.post("Logprobs", request(), 60.0)) for _ in range(3)]
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
            errors.DeadlineExceeded, match=rf"reference-0: connect: no connection to {address} \(deadline 0.2 s\)"
        ):
            await session.open(0.2)
        await session.close()
        async with open_channel(address) as channel:
            with pytest.raises(errors.DeadlineExceeded, match=r"x: Status: did not answer \(deadline 0.2 s\)"):
                await call(channel, "x", wire.METHODS["Process", "Status"], None, 0.2)
        with pytest.raises(errors.ServiceFault, match="coordinator: watch: UNAVAILABLE"):
            async for _ in watch(address):
                pass

    run(test())


# --------------------------------------------------------------------------------------------- unary calls and streams


def test_unary_calls_reach_the_same_handlers() -> None:
    async def test() -> None:
        timeouts: list[float | None] = []

        async def handler(message: LogprobRequest, timeout: float | None) -> bytes:
            timeouts.append(timeout)
            return message.payload

        async def status(_: None, timeout: float | None) -> Status:
            return Status(role="reference", name="reference-0", version=PolicyVersion(1, 2), rates={"tokens": 2.0})

        async with serving(handler, Process={"Status": status}) as address, connected(address) as session:
            assert await session.unary("Reference", "Logprobs", request(b"x"), 3.0) == b"x"
            assert timeouts[0] == pytest.approx(3.0, abs=1.0)
            told = await session.unary("Process", "Status")
            assert (told.name, told.version, told.rates) == ("reference-0", PolicyVersion(1, 2), {"tokens": 2.0})

    run(test())


def test_a_unary_call_that_its_caller_gives_up_is_withdrawn() -> None:
    async def test() -> None:
        peer = Peer()
        async with serving(peer.logprobs) as address, connected(address) as session:
            with pytest.raises(errors.Unanswered, match="reference-0: Logprobs: did not answer"):
                await session.unary("Reference", "Logprobs", request(), 0.1)
            await peer.withdrawn.wait()

    run(test())


def test_a_watch_gives_what_the_source_gives_and_ends_with_it() -> None:
    async def source() -> AsyncIterator[Progress]:
        for step in range(3):
            yield Progress(phase="training", step=step, steps=3, detail=f"{step / 2}")

    async def test() -> None:
        server = Server({"Coordinator": {}}, {("Coordinator", "Watch"): source})
        address = f"127.0.0.1:{server.bind('127.0.0.1', 0)}"
        await server.start()
        try:
            assert [(one.step, one.detail) async for one in watch(address)] == [(step, f"{step / 2}") for step in range(3)]
        finally:
            await server.stop(0)

    run(test())


def test_control_commands_arrive_as_their_structs() -> None:
    async def test() -> None:
        seen: list[Any] = []

        async def commit(message: commands.CommitWeights, timeout: float | None) -> commands.WeightsCommitted:
            seen.append(message)
            return commands.WeightsCommitted(0.25)

        async with serving(echo, Rollout={"CommitWeights": commit}) as address, connected(address, "Rollout") as session:
            command = commands.CommitWeights(PolicyVersion(2, 5), 3)
            assert await session.call("CommitWeights", command, PATIENCE) == commands.WeightsCommitted(0.25)
            assert seen == [command]

    run(test())


# ---------------------------------------------------------------------------------------- health, reflection, the port


def test_health_is_told_for_the_process_and_each_service() -> None:
    async def test() -> None:
        server = Server({"Reference": {"Logprobs": echo}}, {})
        address = f"127.0.0.1:{server.bind('127.0.0.1', 0)}"
        await server.start()
        try:
            async with open_channel(address) as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                for serving_, status in ((False, "NOT_SERVING"), (True, "SERVING"), (False, "NOT_SERVING")):
                    await server.set_serving(serving_)
                    for name in ("", "sluice.v1.Reference"):
                        reply = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=PATIENCE)
                        assert health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status) == status
                with pytest.raises(grpc.aio.AioRpcError) as unknown:
                    await stub.Check(health_pb2.HealthCheckRequest(service="sluice.v1.Trainer"), timeout=PATIENCE)
                assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        finally:
            await server.stop(0)

    run(test())


def test_reflection_describes_what_is_served() -> None:
    def reflect(address: str) -> tuple[set[str], list[str]]:
        with grpc.insecure_channel(address, options=OPTIONS) as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            file = database.FindFileContainingSymbol("sluice.v1.Reference")
            return set(database.get_services()), [method.name for service in file.service for method in service.method]

    async def test() -> None:
        async with serving(echo) as address:
            services, methods = await asyncio.to_thread(reflect, address)
        assert services == {"sluice.v1.Reference", "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
        assert methods == ["Session", "Logprobs"]

    run(test())


def test_a_proxy_for_http_is_passed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")

    async def test() -> None:
        async with serving(echo) as address, connected(address) as session:
            assert await session.call("Logprobs", request(b"x"), PATIENCE) == b"x"
            assert await session.unary("Reference", "Logprobs", request(b"y"), PATIENCE) == b"y"

    run(test())


def test_a_port_that_is_taken_is_the_users_to_mend() -> None:
    async def test() -> None:
        async with serving(echo) as address:
            port = int(address.rpartition(":")[2])
            with pytest.raises(errors.UserError, match=f"^cannot listen on 127.0.0.1:{port}: the port is in use") as taken:
                Server({"Reference": {"Logprobs": echo}}, {}).bind("127.0.0.1", port)
            assert "\n" not in str(taken.value)

    run(test())
