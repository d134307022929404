"""The programs of `sluice bench concurrency`: `python -m benchmarks.concurrency_trial`, with its settings on standard input.

They play as many episodes as the gateway has tasks, until standard input ends; then what failed is printed. An episode that the
bench has withdrawn is no failure.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from contextlib import suppress
from random import Random
from typing import Any

import aiohttp
import msgspec
import uvloop
from msgspec import Struct

from runtime.process import os_process

PATIENCE = 600.0  # seconds that a program waits for an answer
WAIT = 60.0  # and the gateway for a task
ASKERS = 8  # programs that ask for a task at once
WITHDRAWN = (401, 404)  # how calls of an episode that is over are answered
NO_TASK = 429
RESULT = "The tool has looked, and found something."


class ProgramSettings(Struct, frozen=True):
    """`tool`: seconds between two calls, on average, uniform from half to one and a half of it. `turns`: at least, at most."""

    url: str
    key: str
    tool: float
    turns: tuple[int, int]


class Programs:
    """All in this process, with real HTTP."""

    def __init__(self, settings: ProgramSettings, session: aiohttp.ClientSession):
        self._settings, self._session = settings, session
        self._playing: set[asyncio.Task[None]] = set()
        self._random = Random(0)
        self.failures: Counter[str] = Counter()

    async def ask(self) -> None:
        """Until cancelled: begin each episode that there is."""
        while True:
            try:
                begun = await self._post("/v1/episodes", self._settings.key, {"wait": WAIT})
            except aiohttp.ClientResponseError as error:
                if error.status != NO_TASK:
                    raise
                continue
            task = asyncio.create_task(self._counted(begun))
            self._playing.add(task)
            task.add_done_callback(self._playing.discard)

    async def end(self) -> None:
        """Give up what is played."""
        playing = list(self._playing)
        for task in playing:
            task.cancel()
        await asyncio.gather(*playing, return_exceptions=True)

    async def _counted(self, begun: dict[str, Any]) -> None:
        try:
            await self._play(begun)
        except aiohttp.ClientResponseError as error:
            if error.status not in WITHDRAWN:
                self.failures[f"{error.status}"] += 1
        except (TimeoutError, aiohttp.ClientError) as error:
            self.failures[type(error).__name__] += 1

    async def _play(self, begun: dict[str, Any]) -> None:
        base, key, messages = begun["base"], begun["key"], list(begun["task"]["messages"])
        for _ in range(self._random.randint(*self._settings.turns)):
            answer = await self._post(f"{base}/v1/chat/completions", key, {"model": "policy", "messages": messages})
            reply = answer["choices"][0]["message"]["content"] or ""
            messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": RESULT}]
            await asyncio.sleep(self._settings.tool * self._random.uniform(0.5, 1.5))
        await self._post(f"/v1/episodes/{begun['id']}/reward", key, {"reward": 1.0})
        await self._post(f"/v1/episodes/{begun['id']}/end", key, {})

    async def _post(self, path: str, key: str, body: dict[str, Any]) -> Any:
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        async with self._session.post(self._settings.url + path, data=msgspec.json.encode(body), headers=headers) as answer:
            answer.raise_for_status()
            return msgspec.json.decode(await answer.read())


async def play(settings: ProgramSettings) -> None:
    timeout = aiohttp.ClientTimeout(total=PATIENCE)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        programs = Programs(settings, session)
        asking = asyncio.gather(*(programs.ask() for _ in range(ASKERS)))
        print("playing", flush=True)
        told = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
        await asyncio.wait({told, asking}, return_when=asyncio.FIRST_COMPLETED)
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking  # raises what went wrong
        await programs.end()
    print(msgspec.json.encode(programs.failures).decode(), flush=True)


if __name__ == "__main__":
    os_process.die_with_parent()
    os_process.raise_descriptor_limit()
    uvloop.install()
    asyncio.run(play(msgspec.json.decode(sys.stdin.readline(), type=ProgramSettings)))
