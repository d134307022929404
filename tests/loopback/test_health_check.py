"""The probe that containers run: its exit code is what they act on."""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path

import pytest

from services.rpc.server import Server
from tests.loopback.session_peers import echo, run

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
