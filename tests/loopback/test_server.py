"""What a server offers over real gRPC besides session calls: unary calls, watches, health, reflection, ports, probes."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from runtime import commands, errors, timeouts
from runtime.status import Progress, Status
from runtime.types import LogprobRequest, PolicyVersion
from services.rpc.server import OPTIONS, Server
from services.rpc.session import Channel, watch
from tests.loopback.session_peers import (
    PATIENCE,
    Peer,
    connected,
    echo,
    request,
    run,
    serving,
    unary,
)

# ---- What a server offers over real gRPC beside plain session calls: unary calls, watches, health, reflection, its port

# ---------------------------------------------------------------------------------------------- unary calls and streams


def test_unary_calls_reach_the_same_handlers() -> None:
    async def test() -> None:
        async def handler(message: LogprobRequest) -> bytes:
            return message.payload

        async def status(_: None) -> Status:
            return Status(role="reference", name="reference-0", version=PolicyVersion(1, 2), rates={"tokens": 2.0})

        async with serving(handler, Process={"Status": status}) as address, connected(address) as session:
            assert await unary(address, request(b"x"), 300.0) == b"x"
            told = await session.unary("Process", "Status")
            assert (told.name, told.version, told.rates) == ("reference-0", PolicyVersion(1, 2), {"tokens": 2.0})

    run(test())


def test_what_is_compressed_is_refused_before_it_is_expanded() -> None:
    """A few hundred bytes of it may be hundreds of megabytes."""

    async def test() -> None:
        peer = Peer()
        async with serving(peer.logprobs) as address, grpc.aio.insecure_channel(address) as channel:
            call = channel.unary_unary("/sluice.Reference/Logprobs")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(bytes(1 << 20), compression=grpc.Compression.Gzip, timeout=PATIENCE)
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
            assert "ompress" in refused.value.details()

    run(test())


def test_a_unary_call_that_its_caller_gives_up_is_withdrawn() -> None:
    async def test() -> None:
        peer = Peer()
        async with serving(peer.logprobs) as address:
            with pytest.raises(errors.Unanswered, match="reference-0: Logprobs: did not answer"):
                await unary(address, request(), 1.0)
            await peer.withdrawn.wait()

    run(test())


def test_a_watch_gives_what_the_source_gives_and_ends_with_it() -> None:
    async def source(_: None) -> AsyncGenerator[Progress, None]:
        for step in range(3):
            yield Progress(phase="training", step=step, steps=3, detail=f"{step / 2}")

    async def test() -> None:
        server = Server({"Coordinator": {}}, {("Coordinator", "Watch"): source})
        address = server.bind("127.0.0.1", 0)
        await server.start()
        try:
            assert [(one.step, one.detail) async for one in watch(address)] == [(step, f"{step / 2}") for step in range(3)]
        finally:
            await server.stop(0)

    run(test())


def test_control_commands_arrive_as_their_structs() -> None:
    async def test() -> None:
        seen: list[Any] = []

        async def commit(message: commands.CommitWeights) -> commands.WeightsCommitted:
            seen.append(message)
            return commands.WeightsCommitted(0.25)

        async with serving(echo, Rollout={"CommitWeights": commit}) as address, connected(address, "Rollout") as session:
            command = commands.CommitWeights(PolicyVersion(2, 5), 3)
            assert await session.call("CommitWeights", command, PATIENCE) == commands.WeightsCommitted(0.25)
            assert seen == [command]

    run(test())


# ----------------------------------------------------------------------------------------- health, reflection, the port


def test_health_is_told_for_the_process_and_each_service() -> None:
    async def test() -> None:
        server = Server({"Reference": {"Logprobs": echo}}, {})
        address = server.bind("127.0.0.1", 0)
        await server.start()
        try:
            async with Channel(address) as channel:
                stub = health_pb2_grpc.HealthStub(channel.grpc)
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
            return set(database.get_services()), [
                method.name for service in file.service if service.name == "Reference" for method in service.method
            ]

    async def test() -> None:
        async with serving(echo) as address:
            services, methods = await asyncio.to_thread(reflect, address)
        assert services == {"sluice.v1.Reference", "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
        assert methods == ["Session", "Logprobs", "Onload", "Offload"]

    run(test())


def test_a_proxy_for_http_is_passed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")

    async def test() -> None:
        async with serving(echo) as address, connected(address) as session:
            assert await session.call("Logprobs", request(b"x"), PATIENCE) == b"x"
            assert await unary(address, request(b"y")) == b"y"

    run(test())


def test_a_port_that_is_taken_is_the_users_to_mend() -> None:
    async def test() -> None:
        async with serving(echo) as address:
            port = int(address.rpartition(":")[2])
            with pytest.raises(errors.UserError, match=f"^cannot listen on 127.0.0.1:{port}: the port is in use") as taken:
                Server({"Reference": {"Logprobs": echo}}, {}).bind("127.0.0.1", port)
            assert "\n" not in str(taken.value)

    run(test())


def test_the_port_of_whom_it_follows_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection of another program's may have got it meanwhile."""

    async def test() -> None:
        server, held = Server({"Reference": {"Logprobs": echo}}, {}), socket.create_server(("127.0.0.1", 0))
        port = held.getsockname()[1]
        monkeypatch.setattr(timeouts, "PORT_POLL", 0.0)
        binding = asyncio.create_task(server.bind_again(f"127.0.0.1:{port}"))
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
                await Server({"Reference": {"Logprobs": echo}}, {}).bind_again(f"127.0.0.1:{port}")

    run(test())


def test_a_range_of_ports_is_taken_port_by_port_until_none_is_left() -> None:
    async def test() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            # Below the ports that the system gives away by itself, and hardly those of a run of this test beside this one.
            first = 20_000 + 3 * (listener.getsockname()[1] % 4_000)
        ports = (first, first + 2)
        servers = [Server({"Reference": {"Logprobs": echo}}, {}) for _ in range(4)]
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

    run(test())


def test_an_address_of_ipv6_has_brackets() -> None:
    async def test() -> None:
        server = Server({"Reference": {"Logprobs": echo}}, {})
        try:
            assert server.bind("::1", 0).startswith("[::1]:")
        finally:
            await server.start()
            await server.stop(0)

    run(test())


# ---- The probe that containers run: its exit code is what they act on

TLS = "one that has TLS answers with --run DIR or SLUICE_SECRET alone"


async def probe(*arguments: str, folder: Path | None = None) -> tuple[int | None, str]:
    """Exit code, and all that was said."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sluice.health_check", *arguments),
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await process.communicate()
    return process.returncode, said.decode()


def test_it_says_whether_a_process_and_its_services_serve() -> None:
    async def test() -> None:
        server = Server({"Reference": {"Logprobs": echo}}, {})
        address = server.bind("127.0.0.1", 0)
        await server.start()
        try:
            await server.set_serving(False)
            assert await probe(address) == (1, f"{address}: not serving\n")
            await server.set_serving(True)
            assert await probe(address) == (0, f"{address}: serving\n")
            assert await probe(address, "--service", "sluice.v1.Reference") == (0, f"{address}: serving\n")
            assert await probe(address, "--service", "sluice.v1.Trainer") == (
                1,
                f"{address}: has no service 'sluice.v1.Trainer'\n",
            )
        finally:
            await server.stop(0)

    run(test())


@pytest.mark.parametrize("listens", [True, False])
def test_whoever_does_not_answer_does_not_serve(listens: bool) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if listens:
            silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert asyncio.run(probe(address, "--timeout", "0.3")) == (1, f"{address}: no answer within 0.3 s; {TLS}\n")


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
    code, output = asyncio.run(probe(*arguments))
    assert code == 2
    assert said in output.splitlines()[-1]


def test_a_project_with_a_package_called_services_is_probed_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "services").mkdir()
    (tmp_path / "services" / "__init__.py").write_text("raise SystemExit('the package of the project')\n")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        found = asyncio.run(probe(address, "--timeout", "0.3", folder=tmp_path))
    assert found == (1, f"{address}: no answer within 0.3 s; {TLS}\n")
