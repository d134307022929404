"""The HTTP client that agents are given, where their interpreter has httpx. The standard library alone, but for that."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any


@cache
def trust() -> Any:
    """What httpx makes of the authorities on this machine, which takes tens of milliseconds; None where there is no httpx."""
    if importlib.util.find_spec("httpx") is None:
        return None
    import httpx

    return httpx.create_ssl_context()


def http_client() -> Any:
    """For all episodes of a process; None where there is no httpx."""
    if (known := trust()) is None:
        return None
    import httpx

    return httpx.AsyncClient(verify=known, timeout=None, limits=httpx.Limits(max_connections=None))
