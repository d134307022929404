"""What a server offers over real gRPC besides session calls, the probe of its health, and peers that exhaust it."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from runtime import errors, timeouts
from runtime.process import os_process
from runtime.status import Progress
from services import health_check
from services.rpc import contract, security, server
from services.rpc.client import Channel, call, watch
from services.rpc.server import OPTIONS, Server
from tests.coroutines import driven_by
from tests.loopback.session_peers import (
    PATIENCE,
    Peer,
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
    started,
    unary,
)


@driven_by(run)
async def test_what_is_compressed_is_refused_before_it_is_expanded() -> None:
    """A few hundred bytes of it may be hundreds of megabytes."""
    peer = Peer()
    async with serving(peer.logprobs) as address, grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_unary("/sluice.Reference/Logprobs")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(bytes(1 << 20), compression=grpc.Compression.Gzip, timeout=PATIENCE)
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert "ompress" in refused.value.details()


@driven_by(run)
async def test_a_unary_call_that_its_caller_gives_up_is_withdrawn() -> None:
    peer = Peer()
    async with serving(peer.logprobs) as address:
        with pytest.raises(errors.Unanswered, match="reference-0: Logprobs: did not answer"):
            await unary(address, request(), 1.0)
        await peer.withdrawn.wait()


@driven_by(run)
async def test_a_watch_gives_what_the_source_gives_and_ends_with_it() -> None:
    async def source(_: None) -> AsyncGenerator[Progress, None]:
        for step in range(3):
            yield Progress(phase="training", step=step, steps=3, detail=f"{step / 2}")

    server = Server({"Coordinator": {"Watch": source}})
    async with started(server) as address:
        assert [(one.step, one.detail) async for one in watch(address)] == [(step, f"{step / 2}") for step in range(3)]


@driven_by(run)
async def test_reflection_describes_what_is_served() -> None:
    def reflect(address: str) -> tuple[set[str], list[str]]:
        with grpc.insecure_channel(address, options=OPTIONS) as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            file = database.FindFileContainingSymbol("sluice.v1.Reference")
            return set(database.get_services()), [
                method.name for service in file.service if service.name == "Reference" for method in service.method
            ]

    async with serving(echo) as address:
        services, methods = await asyncio.to_thread(reflect, address)
    assert services == {"sluice.v1.Reference", "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    assert methods == ["Session", "Logprobs", "Onload", "Offload"]


@driven_by(run)
async def test_a_proxy_for_http_is_passed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    async with serving(echo) as address, connected(address) as session:
        assert await session.call("Logprobs", request(b"x"), PATIENCE) == b"x"
        assert await unary(address, request(b"y")) == b"y"


@driven_by(run)
async def test_an_address_of_ipv6_has_brackets_and_a_port_that_is_taken_is_the_users_to_mend() -> None:
    async with serving(echo) as address:
        port = int(address.rpartition(":")[2])
        with pytest.raises(errors.UserError, match=f"^cannot listen on 127.0.0.1:{port}: the port is in use") as taken:
            Server({"Reference": {"Logprobs": echo}}).bind("127.0.0.1", port)
        assert "\n" not in str(taken.value)
    server = Server({"Reference": {"Logprobs": echo}})
    try:
        assert server.bind("::1", 0).startswith("[::1]:")
    finally:
        await server.start()
        await server.stop(0)


@driven_by(run)
async def test_the_port_of_whom_it_follows_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection of another program's may have got it meanwhile."""
    server, held = Server({"Reference": {"Logprobs": echo}}), socket.create_server(("127.0.0.1", 0))
    port = held.getsockname()[1]
    monkeypatch.setattr(timeouts, "PORT_POLL", 0.0)
    binding = asyncio.create_task(server.rebind(f"127.0.0.1:{port}"))
    for _ in range(3):
        await asyncio.sleep(0)
    assert not binding.done()
    held.close()
    await asyncio.wait_for(binding, PATIENCE)
    await server.start()
    await server.stop(0)
    with socket.create_server(("127.0.0.1", port)):  # held for ever
        monkeypatch.setattr(timeouts, "PORT_AGAIN", 0.0)
        with pytest.raises(errors.UserError, match=f"^cannot listen on 127.0.0.1:{port}: the port is in use"):
            await Server({"Reference": {"Logprobs": echo}}).rebind(f"127.0.0.1:{port}")


@driven_by(run)
async def test_a_range_of_ports_is_taken_port_by_port_until_none_is_left() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        # Below the ports that the system gives away by itself, and hardly those of a run of this test beside this one.
        first = 20_000 + 3 * (listener.getsockname()[1] % 4_000)
    ports = (first, first + 2)
    servers = [Server({"Reference": {"Logprobs": echo}}) for _ in range(4)]
    try:
        addresses = {server.bind("127.0.0.1", 0, ports) for server in servers[:3]}
        assert addresses == {f"127.0.0.1:{port}" for port in range(first, first + 3)}
        said = f"^network.port_range: all ports from {first} to {first + 2} are in use on 127.0.0.1$"
        with pytest.raises(errors.UserError, match=said):
            servers[3].bind("127.0.0.1", 0, ports)
    finally:
        for server in servers:
            await server.start()  # one that is only bound keeps its port when it is stopped
            await server.stop(0)


# ---- The probe that containers run: its exit code is what they act on

NO_ANSWER = "no answer within 0.3 s; a process with TLS answers only with --run DIR or SLUICE_SECRET\n"


def probe(*arguments: str) -> tuple[Any, str]:
    """Exit code, and all that was said."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            code: Any = health_check.main(arguments)
        except SystemExit as end:
            code = end.code
    return code, said.getvalue()


@driven_by(run)
async def test_it_says_whether_a_process_and_its_services_serve() -> None:
    server = Server({"Reference": {"Logprobs": echo}})
    async with started(server) as address:
        for serves, more, said in (
            (False, (), (1, "not serving")),
            (True, (), (0, "serving")),
            (True, ("--service", "sluice.v1.Reference"), (0, "serving")),
            (True, ("--service", "sluice.v1.Trainer"), (1, "has no service 'sluice.v1.Trainer'")),
        ):
            await server.set_serving(serves)
            assert await asyncio.to_thread(probe, address, *more) == (said[0], f"{address}: {said[1]}\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("localhost",), "'localhost' is not host:port or [IPv6]:port"),
        (("::1:7077",), "'::1:7077' is not host:port or [IPv6]:port"),
        (("host:70000",), "'host:70000' is not host:port or [IPv6]:port"),
        (("host:1", "--timeout", "0"), "'0' is not a number of seconds above 0"),
    ],
)
def test_a_mistake_is_told_and_distinguished(arguments: tuple[str, ...], said: str) -> None:
    code, output = probe(*arguments)
    assert code == 2
    assert said in output.splitlines()[-1]


def test_what_does_not_answer_does_not_serve_whatever_packages_the_working_folder_has(tmp_path: Path) -> None:
    (tmp_path / "services").mkdir()
    (tmp_path / "services" / "__init__.py").write_text("raise SystemExit('the package of the project')\n")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        words = (address, "--timeout", "0.3")
        done = subprocess.run(
            [sys.executable, "-m", "sluice.health_check", *words], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout, done.stderr) == (1, "", f"{address}: {NO_ANSWER}")
        silent.listen()
        assert probe(*words) == (1, f"{address}: {NO_ANSWER}")


# ---- Peers that send too much, too often, nothing, or what is no message: each is refused, and others are answered

ROOT = Path(__file__).parents[2]
Log = pytest.LogCaptureFixture
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, PING, GOAWAY = 4, 6, 7  # types of frames in HTTP/2 (RFC 9113)
CALM = 11  # the code of a GOAWAY: ENHANCE_YOUR_CALM


@pytest.fixture(autouse=True)
def fresh() -> None:
    os_process.counts.clear()


async def refused(rpc: Any) -> str:
    """Why the stream was ended."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await replies(rpc, 1)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    return error.value.details() or ""


@driven_by(run)
async def test_all_streams_together_are_held_to_a_budget_which_their_ends_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "HELD_IN_ALL", 1000)
    async with serving(echo) as address, Channel(address):
        for _ in range(5):  # each has as much as all may
            async with raw_stream(address) as first, raw_stream(address) as second:
                await first.write(frame(logprobs(1, b"", body=bytes(900), more=True), logprobs(2, b"whole")))
                assert answer((await replies(first, 1))[0]) == b"whole"  # so all before it has been read
                await second.write(frame(logprobs(1, b"", body=bytes(200), more=True)))
                assert "over all streams" in await refused(second)
                await first.write(frame(logprobs(1, b"", body=bytes(200), more=True)))
                assert "over all streams" in await refused(first)


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
@driven_by(run)
async def test_what_is_no_message_is_refused_and_is_a_line_of_the_log(
    path: str, stream_: bool, code: grpc.StatusCode, caplog: Log
) -> None:
    async with serving(echo) as address:
        for _ in range(9):
            assert await send(address, path, b"\xff\xff", stream_) is code
        assert await unary(address, request(b"x")) == b"x"
    (told,) = warnings(caplog)  # the next is the tenth
    assert "\n" not in told and not any(record.exc_info for record in caplog.records if record.name != "asyncio"), "a traceback"


def test_refusals_are_told_at_powers_of_ten_for_each_host(caplog: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os_process, "KINDS", 2)
    for port in range(1000):
        security.log_refusal(f"ipv4:10.0.0.1:{port}", "why")
        security.log_refusal(f"ipv6:%5B::1%5D:{port}", "why")
        security.log_refusal(f"ipv4:10.0.1.{port}:1", "why")
        security.log_refusal(f"ipv4:10.0.2.{port}:1", "why")
    counts = (1, 10, 100, 1000)
    assert [line for line in warnings(caplog) if "10.0.0.1" in line] == [
        f"ipv4:10.0.0.1: {count} refused so far: why" for count in counts
    ]
    assert len([line for line in warnings(caplog) if "ipv6:[::1]: " in line]) == 4
    assert len(warnings(caplog)) == 4 + 4 + 4  # more hosts than are told apart are one


@driven_by(run)
async def test_an_answer_that_is_no_frame_ends_the_session() -> None:
    async def serve(received: Any, context: Any) -> Any:
        async for _ in received:
            yield b"\xff\xff"

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


@driven_by(run)
async def test_a_server_takes_so_many_calls_at_once_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "RPCS", 2)
    async with serving(echo) as address, raw_stream(address) as one, raw_stream(address) as other:
        for rpc in (one, other):
            await rpc.write(frame(logprobs(1, b"x")))
            await replies(rpc, 1)
        async with Channel(address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await channel.grpc.unary_unary("/sluice.v1.Reference/Logprobs")(b"", timeout=PATIENCE)
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@driven_by(run)
async def test_a_thousand_calls_of_a_moment_over_one_connection_are_all_answered() -> None:
    async with serving(echo) as address, Channel(address) as channel:
        path = contract.METHODS["Reference", "Logprobs"]
        answers = [call(channel, "reference-0", path, request(b"x"), PATIENCE) for _ in range(1000)]
        assert await asyncio.gather(*answers) == [b"x"] * 1000


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


@driven_by(run)
async def test_who_pings_without_end_is_told_to_be_calm() -> None:
    def flood(frames: Frames) -> bytes:
        """The code of the GOAWAY, and its words."""
        with suppress(ConnectionError):
            frames.socket.sendall(100 * http2(PING, bytes(8)))
        while (found := frames.next()) is not None:
            if found[0] == GOAWAY:
                return found[2][4:]
        raise AssertionError("closed without a word")

    held = Server({"Reference": {"Logprobs": echo}}, silence=30.0)
    async with started(held) as address:
        assert await beside(address, flood) == CALM.to_bytes(4, "big") + b"too_many_pings"
        assert await unary(address, request(b"x")) == b"x"


@pytest.mark.parametrize("silence", [0.1, 1.0, 2.0, 3.4, 6.6, 30.0, 600.0])
def test_a_server_takes_pings_twice_as_often_as_they_are_sent(silence: float) -> None:
    found = dict(server.options(silence))
    assert 2 * found["grpc.http2.min_ping_interval_without_data_ms"] <= found["grpc.keepalive_time_ms"]


@driven_by(run)
async def test_a_connection_that_says_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    short = [(key, 100 if key == "grpc.server_handshake_timeout_ms" else value) for key, value in server.OPTIONS]
    assert dict(short) != dict(server.OPTIONS)
    monkeypatch.setattr(server, "OPTIONS", tuple(short))

    def until_closed(address: str) -> None:
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), PATIENCE) as silent:
            while silent.recv(4096):  # the server says its settings before it hears ours
                pass

    async with serving(echo) as address:
        await asyncio.to_thread(until_closed, address)


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
