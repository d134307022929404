"""The HTTP client that agents are given, where their interpreter has httpx, or httpx2, which newer clients of OpenAI's come
with. The standard library alone, but for that."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import socket
from contextlib import suppress
from functools import cache
from typing import Any

PACKAGES = ("httpx", "httpx2")  # the first that is there: every client takes one of httpx


@cache
def _package() -> Any:
    return next((importlib.import_module(name) for name in PACKAGES if importlib.util.find_spec(name) is not None), None)


@cache
def trust() -> Any:
    """What httpx makes of the authorities on this machine, which takes tens of milliseconds; None where there is no httpx."""
    return None if (httpx := _package()) is None else httpx.create_ssl_context()


def import_all() -> None:
    """What the first client and its first request import, which takes tens of milliseconds: a worker that is forked has it."""
    if (httpx := _package()) is None:
        return

    async def ask(port: int) -> None:
        async with httpx.AsyncClient(verify=trust(), trust_env=False) as client:
            with suppress(httpx.HTTPError):
                await client.get(f"http://127.0.0.1:{port}")

    with suppress(OSError), socket.socket() as deaf:  # it has the port, and does not listen; a machine may have no IPv4
        deaf.bind(("127.0.0.1", 0))
        asyncio.run(ask(deaf.getsockname()[1]))


def http_client() -> Any:
    """For all episodes of a process; None where there is no httpx."""
    if (httpx := _package()) is None:
        return None
    return httpx.AsyncClient(verify=trust(), timeout=None, limits=httpx.Limits(max_connections=None))
