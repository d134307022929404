"""The HTTP client that agents are given: what it imports is there before workers are forked, on a machine without IPv4 too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("httpx", reason="needs httpx: make install-dev")

ROOT = Path(__file__).parents[2]
FIRST_REQUEST = """
import asyncio, socket, sys
import httpx
from sluice.agents import clients

clients.import_all()
before = set(sys.modules)

async def ask(port):
    async with clients.http_client() as client:
        try:
            await client.get(f"http://127.0.0.1:{port}")
        except httpx.ConnectError:
            print(sorted(set(sys.modules) - before))

with socket.socket() as deaf:
    deaf.bind(("127.0.0.1", 0))
    asyncio.run(ask(deaf.getsockname()[1]))
"""
WITHOUT_IPV4 = """
import socket
from sluice.agents import clients

def bind(self, address):
    raise OSError(99, "Cannot assign requested address")

socket.socket = type("Socket", (socket.socket,), {"bind": bind})
clients.import_all()
print(clients.http_client() is not None)
"""


@pytest.mark.parametrize(("code", "said"), [(FIRST_REQUEST, "[]"), (WITHOUT_IPV4, "True")], ids=["first request", "no IPv4"])
def test_what_a_client_needs_is_imported(code: str, said: str) -> None:
    command, env = [sys.executable, "-c", code], {**os.environ, "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, said), done.stderr
