"""A gateway over a scripted backend, as a program: it tells its URL and key on standard output, and ends with its input.

`python -m tests.agents.scripted_server`, from the repository and its environment.
"""

from __future__ import annotations

import asyncio
import json
import sys

from runtime.gateway.http import server
from runtime.process import network
from tests.scripted_gateway import KEY, ScriptedBackend

MAX_BODY = 1 << 20


async def serve() -> None:
    made = server(ScriptedBackend(), MAX_BODY)
    url = await made.open(network.listener("127.0.0.1", 0, 64))
    print(json.dumps({"url": url, "key": KEY}), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await made.close()


if __name__ == "__main__":
    asyncio.run(serve())
