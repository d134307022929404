"""Peers that send too much, too often, nothing, or what is no message: each is refused, and others are answered meanwhile."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from runtime import errors
from services.rpc import contract, refusals, server, stream
from services.rpc.server import Server
from services.rpc.session import Channel, Session, call
from tests.loopback.session_peers import (
    PATIENCE,
    answer,
    connected,
    echo,
    frame,
    logprobs,
    raw_stream,
    replies,
    request,
    run,
    serving,
    unary,
)

ROOT = Path(__file__).parents[2]
Log = pytest.LogCaptureFixture
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, PING, GOAWAY = 4, 6, 7  # types of frames in HTTP/2 (RFC 9113)
CALM = 11  # the code of a GOAWAY: ENHANCE_YOUR_CALM


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "_counts", refusals.Counter())


# ------------------------------------------------------------------------------------------------------- unfinished bodies


async def refused(rpc: Any) -> str:
    """Why the stream was ended."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await replies(rpc, 1)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    return error.value.details() or ""


def test_a_stream_of_unfinished_bodies_is_refused_and_another_one_is_served() -> None:
    async def test() -> None:
        async with serving(echo) as address, raw_stream(address) as friend:
            await friend.write(frame(logprobs(1, b"friend")))
            assert answer((await replies(friend, 1))[0]) == b"friend"
            async with raw_stream(address) as rpc:
                await rpc.write(frame(*(logprobs(id_, b"", more=True) for id_ in range(stream.UNFINISHED + 1))))
                assert await refused(rpc) == f"more than {stream.UNFINISHED} unfinished messages"
            await friend.write(frame(logprobs(2, b"still")))
            assert answer((await replies(friend, 1))[0]) == b"still"

    run(test())


def test_all_streams_together_are_held_to_a_budget_which_their_ends_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "HELD_IN_ALL", 1000)

    async def test() -> None:
        async with serving(echo) as address, Channel(address):
            for _ in range(5):  # each has as much as all may
                async with raw_stream(address) as first, raw_stream(address) as second:
                    await first.write(frame(logprobs(1, b"", body=bytes(900), more=True), logprobs(2, b"whole")))
                    assert answer((await replies(first, 1))[0]) == b"whole"  # so all before it has been read
                    await second.write(frame(logprobs(1, b"", body=bytes(200), more=True)))
                    assert "over all streams" in await refused(second)
                    await first.write(frame(logprobs(1, b"", body=bytes(200), more=True)))
                    assert "over all streams" in await refused(first)

    run(test())


# ----------------------------------------------------------------------------------------------------------- no messages


def warnings(log: Log) -> list[str]:
    """Ours: gRPC's poller logs by asyncio that the event loop of an earlier test is closed."""
    return [record.getMessage() for record in log.records if record.levelno >= logging.WARNING and record.name != "asyncio"]


async def send(address: str, path: str, data: bytes, stream_: bool) -> grpc.StatusCode:
    async with Channel(address) as channel:
        try:
            if not stream_:
                await channel.grpc.unary_unary(path)(data, timeout=PATIENCE)
            else:
                rpc = channel.grpc.stream_stream(path)(timeout=PATIENCE)
                await rpc.write(data)
                await rpc.read()
        except grpc.aio.AioRpcError as error:
            return error.code()
    raise AssertionError("it was taken for a message")


@pytest.mark.parametrize(
    ("path", "stream_", "code"),
    [
        ("/sluice.v1.Reference/Session", True, grpc.StatusCode.INVALID_ARGUMENT),
        ("/sluice.v1.Reference/Logprobs", False, grpc.StatusCode.INVALID_ARGUMENT),
        ("/grpc.health.v1.Health/Check", False, grpc.StatusCode.UNKNOWN),
        ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", True, grpc.StatusCode.UNKNOWN),
    ],
)
def test_what_is_no_message_is_refused_and_is_a_line_of_the_log(
    path: str, stream_: bool, code: grpc.StatusCode, caplog: Log
) -> None:
    async def test() -> None:
        async with serving(echo) as address:
            for _ in range(9):
                assert await send(address, path, b"\xff\xff", stream_) is code
            assert await unary(address, request(b"x")) == b"x"

    run(test())
    assert len(warnings(caplog)) == 1  # the next is the tenth
    assert "\n" not in caplog.text.strip(), "a traceback"


def test_refusals_are_told_at_powers_of_ten_for_each_host(caplog: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "PEERS", 2)
    for port in range(1000):
        refusals.tell(f"ipv4:10.0.0.1:{port}", "why")
        refusals.tell(f"ipv6:%5B::1%5D:{port}", "why")
        refusals.tell(f"ipv4:10.0.1.{port}:1", "why")
        refusals.tell(f"ipv4:10.0.2.{port}:1", "why")
    counts = (1, 10, 100, 1000)
    assert [line for line in warnings(caplog) if "10.0.0.1" in line] == [
        f"ipv4:10.0.0.1: {count} refused so far: why" for count in counts
    ]
    assert len([line for line in warnings(caplog) if "ipv6:[::1]: " in line]) == 4
    assert len(warnings(caplog)) == 4 + 4 + 4  # more hosts than are told apart are one


def test_an_answer_that_is_no_frame_ends_the_session() -> None:
    async def serve(received: Any, context: Any) -> Any:
        async for _ in received:
            yield b"\xff\xff"

    async def test() -> None:
        bare = grpc.aio.server()
        handlers = {"Session": grpc.stream_stream_rpc_method_handler(serve)}
        bare.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("sluice.v1.Reference", handlers),))
        address = f"127.0.0.1:{bare.add_insecure_port('127.0.0.1:0')}"
        await bare.start()
        try:
            async with connected(address) as session:
                with pytest.raises(errors.Unreachable, match=r"not a sluice\.v1\.ReplyFrame"):
                    await session.call("Logprobs", request(), PATIENCE)
        finally:
            await bare.stop(0)

    run(test())


# ------------------------------------------------------------------------------------------ calls, pings and connections


def test_a_server_takes_so_many_calls_at_once_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "RPCS", 2)

    async def test() -> None:
        async with serving(echo) as address, raw_stream(address) as one, raw_stream(address) as other:
            for rpc in (one, other):
                await rpc.write(frame(logprobs(1, b"x")))
                await replies(rpc, 1)
            async with Channel(address) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await channel.grpc.unary_unary("/sluice.v1.Reference/Logprobs")(b"", timeout=PATIENCE)
            assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    run(test())


def test_a_thousand_calls_of_a_moment_over_one_connection_are_all_answered() -> None:
    async def test() -> None:
        async with serving(echo) as address, Channel(address) as channel:
            path = contract.METHODS["Reference", "Logprobs"]
            answers = [call(channel, "reference-0", path, request(b"x"), PATIENCE) for _ in range(1000)]
            assert await asyncio.gather(*answers) == [b"x"] * 1000

    run(test())


def http2(kind: int, payload: bytes = b"", flags: int = 0) -> bytes:
    """A frame of HTTP/2 on stream 0."""
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + bytes(4) + payload


class Frames:
    """The frames that a server sends on a connection of ours."""

    def __init__(self, address: str):
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), PATIENCE)
        self.socket.sendall(PREFACE + http2(SETTINGS))

    def next(self) -> tuple[int, int, bytes] | None:
        """Type, flags and payload; None once the connection is closed."""
        with suppress(ConnectionError):
            if len(head := self._read(9)) == 9:
                return head[3], head[4], self._read(int.from_bytes(head[:3], "big"))
        return None

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size and (more := self.socket.recv(size - len(data))):
            data += more
        return data


async def beside(address: str, work: Callable[[Frames], Any]) -> Any:
    def connection() -> Any:
        frames = Frames(address)
        with frames.socket:
            return work(frames)

    return await asyncio.to_thread(connection)


def test_who_pings_without_end_is_told_to_be_calm() -> None:
    def flood(frames: Frames) -> bytes:
        """The code of the GOAWAY, and its words."""
        with suppress(ConnectionError):
            frames.socket.sendall(100 * http2(PING, bytes(8)))
        while (found := frames.next()) is not None:
            if found[0] == GOAWAY:
                return found[2][4:]
        raise AssertionError("closed without a word")

    async def test() -> None:
        held = Server({"Reference": {"Logprobs": echo}}, {}, silence=30.0)
        address = held.bind("127.0.0.1", 0)
        await held.start()
        try:
            assert await beside(address, flood) == CALM.to_bytes(4, "big") + b"too_many_pings"
            assert await unary(address, request(b"x")) == b"x"
        finally:
            await held.stop(0)

    run(test())


class Relay:
    """Between a session and its peer: counts the pings of the former, and sets `enough` after so many."""

    def __init__(self, address: str, pings: int):
        self._host, _, self._port = address.rpartition(":")
        self._left = pings
        self.enough = asyncio.Event()
        self.connections = 0
        self.goaways = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        back, forth = await asyncio.open_connection(self._host, int(self._port))
        forth.write(await reader.readexactly(len(PREFACE)))
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            await asyncio.gather(self._carry(reader, forth, self._client_says), self._carry(back, writer, self._server_says))
        forth.close()
        writer.close()

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, look: Callable[[int, int], None]
    ) -> None:
        while True:
            head = await reader.readexactly(9)
            look(head[3], head[4])
            writer.write(head + await reader.readexactly(int.from_bytes(head[:3], "big")))

    def _client_says(self, kind: int, flags: int) -> None:
        if kind == PING and not flags:  # not the answer to one
            self._left -= 1
            if not self._left:
                self.enough.set()

    def _server_says(self, kind: int, flags: int) -> None:
        self.goaways += kind == GOAWAY


@pytest.mark.parametrize("silence", [0.1, 1.0, 2.0, 3.4, 6.6, 30.0, 600.0])
def test_a_server_takes_pings_twice_as_often_as_they_are_sent(silence: float) -> None:
    found = dict(server.options(silence))
    assert 2 * found["grpc.http2.min_ping_interval_without_data_ms"] <= found["grpc.keepalive_time_ms"]


def test_our_own_pings_are_never_too_many() -> None:
    """An idle session outlives more of them than a server bears of those that come too early."""

    async def test() -> None:
        held = Server({"Reference": {"Logprobs": echo}}, {}, silence=0.5)
        relay = Relay(held.bind("127.0.0.1", 0), pings=4)
        await held.start()
        listener = await asyncio.start_server(relay.serve, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        session = Session(f"127.0.0.1:{port}", "reference-0", "Reference", silence=0.5)
        try:
            await session.open(PATIENCE)
            assert await session.call("Logprobs", request(b"x"), PATIENCE) == b"x"
            await relay.enough.wait()
            assert await session.call("Logprobs", request(b"y"), PATIENCE) == b"y"
            assert (relay.connections, relay.goaways) == (1, 0)
        finally:
            await session.close()
            listener.close()
            await held.stop(0)

    run(test())


def test_a_connection_that_says_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    short = [(key, 100 if key == "grpc.server_handshake_timeout_ms" else value) for key, value in server.OPTIONS]
    assert dict(short) != dict(server.OPTIONS)
    monkeypatch.setattr(server, "OPTIONS", tuple(short))

    def until_closed(address: str) -> None:
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), PATIENCE) as silent:
            while silent.recv(4096):  # the server says its settings before it hears ours
                pass

    async def test() -> None:
        async with serving(echo) as address:
            await asyncio.to_thread(until_closed, address)

    run(test())


SERVED = """
import asyncio, resource
from runtime import timeouts
timeouts.HANDSHAKE = 1000.0  # the connections stay
from services.rpc.server import Server
from tests.loopback.session_peers import echo
from runtime.process import os_process

async def serve():
    server = Server({"Reference": {"Logprobs": echo}}, {})
    print(server.bind("127.0.0.1", 0), flush=True)
    await server.start()
    await asyncio.Event().wait()

resource.setrlimit(resource.RLIMIT_NOFILE, (200, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
os_process.raise_descriptor_limit()
asyncio.run(serve())
"""


def test_a_server_answers_beside_more_idle_connections_than_files_that_it_might_open_at_first() -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 1000:
        pytest.skip("this process may open too few files itself")

    async def test() -> None:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", SERVED, stdout=asyncio.subprocess.PIPE)
        try:
            assert process.stdout is not None
            address = (await asyncio.wait_for(process.stdout.readline(), PATIENCE)).decode().strip()
            host, _, port = address.rpartition(":")
            with ExitStack() as idle:
                for _ in range(400):
                    idle.enter_context(socket.create_connection((host, int(port)), PATIENCE))
                assert await unary(address, request(b"x")) == b"x"
        finally:
            process.kill()
            await process.wait()

    run(test())


LIMITED = """
import resource
from pathlib import Path

def limits():
    return resource.getrlimit(resource.RLIMIT_NOFILE)

resource.setrlimit(resource.RLIMIT_NOFILE, (200, limits()[1]))
"""
SUPERVISED = "from launcher.node.supervisor import Supervisor\nSupervisor(Path())\nprint(*limits())"
LED = """
from services.process import lead

async def work():
    print(*limits())

lead(Path("configs/quickstart.yaml"), "test", lambda config, phases: work())
"""


@pytest.mark.parametrize("code", [SUPERVISED, LED], ids=["launcher", "service"])
def test_every_process_may_open_as_many_files_as_the_system_allows(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED + code], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    soft, hard = done.stdout.split()
    assert soft == hard != "200", done.stderr
