"""A gateway over a scripted backend, as a program: it tells its URL and key on standard output, and ends with its input.

`python -m tests.agents.scripted_server`, from the repository and its environment. SLUICE_TEST_BODIES names a file to which it
adds the body of each request: what `tests/unit/client_bodies.jsonl` is made from.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from aiohttp import web

from runtime.gateway.http import server
from runtime.process import network
from tests.scripted_gateway import KEY, ScriptedBackend

MAX_BODY = 1 << 20


async def serve() -> None:
    made = server(ScriptedBackend(), MAX_BODY)
    if path := os.environ.get("SLUICE_TEST_BODIES"):
        made.runner.app.middlewares.append(_recorder(Path(path)))
    url = await made.open(network.listener("127.0.0.1", 0, 64))
    print(json.dumps({"url": url, "key": KEY}), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await made.close()


def _recorder(path: Path):  # type: ignore[no-untyped-def]
    @web.middleware
    async def record(request: web.Request, handler) -> web.StreamResponse:  # type: ignore[no-untyped-def]
        if body := await request.read():
            with path.open("a") as file:
                route = request.path.partition("/v1/")[2]
                print(json.dumps({"route": f"/v1/{route}", "body": json.loads(body)}), file=file)
        return await handler(request)

    return record


if __name__ == "__main__":
    asyncio.run(serve())
