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

from runtime.gateway.http import runner
from tests.scripted_gateway import KEY, ScriptedBackend

MAX_BODY = 1 << 20


async def serve() -> None:
    made = runner(ScriptedBackend(), MAX_BODY)
    if path := os.environ.get("SLUICE_TEST_BODIES"):
        made.app.middlewares.append(_recorder(Path(path)))
    await made.setup()
    await web.TCPSite(made, "127.0.0.1", 0).start()
    host, port = made.addresses[0]
    print(json.dumps({"url": f"http://{host}:{port}", "key": KEY}), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await made.cleanup()


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
