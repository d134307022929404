"""Other processes of `sluice bench gateway`: `python -m benchmarks.gateway_trial WHAT`, with its settings on standard input.

`rollout` serves Rollout and answers from the script. `echo` is a plain aiohttp server that reads each body and answers as the
gateway would. Both print where they serve and end with their standard input. `load` plays episodes and prints what came of it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import msgspec
import numpy as np
import uvloop
from aiohttp import web
from msgspec import Struct
from tokenizers import Tokenizer

from benchmarks.gateway_script import END, TOOLS, Speaker
from runtime import types
from runtime.process import os_process
from runtime.types import GeneratedGroup, GroupPayload, GroupRequest, PolicyVersion, RolloutLoad, Sample
from services.gateway import LoopLag
from services.rpc.server import Server

HOST = "127.0.0.1"
REPLIES = 256  # that are drawn beforehand
ROOM = 1_000_000  # tokens of the rollout's cache, as it reports
PATIENCE = 60.0  # seconds that a client waits for an answer


class TrialSettings(Struct, frozen=True, kw_only=True):
    """`url`, `key`: of the server under load; without a key it has no episodes. `reply`, `tool`: seconds that a generation
    takes, and what a program does between two calls: on average, uniform from half to one and a half of it."""

    model: str  # the folder
    context: int  # tokens
    url: str = ""
    key: str = ""
    episodes: int
    turns: int
    reply: float
    tool: float
    seed: int = 0


class Played(Struct):
    """Seconds of each call that was answered, and from the first one's beginning to the last one's end; `failures` by kind:
    each has ended an episode."""

    calls: list[float]
    seconds: float
    failures: dict[str, int]


def taking(seconds: float, random: Random) -> float:
    return seconds * random.uniform(0.5, 1.5)


def tokens_of(model: str) -> list[np.ndarray]:
    """int32, of each reply of the script."""
    tokenizer, speaker = Tokenizer.from_file(str(Path(model) / "tokenizer.json")), Speaker(1)
    end = tokenizer.token_to_id(END)
    return [np.array([*tokenizer.encode(speaker.reply()).ids, end], np.int32) for _ in range(REPLIES)]


# ------------------------------------------------------------------------------------------ rollouts


class ScriptedRollout:
    """Answers each request after a while with one of the replies."""

    def __init__(self, settings: TrialSettings):
        self._replies = tokens_of(settings.model)
        self._settings, self._random = settings, Random(settings.seed)

    async def generate(self, request: GroupRequest) -> GeneratedGroup:
        if self._settings.reply:
            await asyncio.sleep(taking(self._settings.reply, self._random))
        version = PolicyVersion(0, 1)
        samples = [self._sample(self._replies[(request.seed + index) % REPLIES], version) for index in range(request.n)]
        payload = GroupPayload.of(request.group_id, request.prompt, samples)
        return GeneratedGroup(
            group_id=request.group_id,
            prompt_tokens=len(request.prompt),
            response_tokens=payload.lengths.tolist(),
            truncated=0,
            oldest=version,
            newest=version,
            load=RolloutLoad(cached=len(request.prompt) // 2, prefill_seconds=0.05, samples=1, room=ROOM),
            payload=types.encode(payload),
        )

    def _sample(self, tokens: np.ndarray, version: PolicyVersion) -> Sample:
        return Sample(
            tokens=tokens,
            loss_mask=np.ones(len(tokens), np.uint8),
            logprobs=np.full(len(tokens), -1.0, np.float32),
            versions=np.full(len(tokens), version.pack(), np.int64),
            finish_reason="stop",
        )


async def rollout(settings: TrialSettings) -> None:
    scripted = ScriptedRollout(settings)
    server = Server({"Rollout": {"Generate": scripted.generate}})
    print(server.bind(HOST, 0), flush=True)
    await server.start()
    await until_told()
    await server.stop(0.0)


# ------------------------------------------------------------------------------------------ the plain server


class ServerLag(LoopLag):
    """A server's, as the gateway has it."""

    def told(self) -> list[float]:
        """p50, p99 and the most, since they were told before."""
        found = [self.quantile(share) for share in (0.5, 0.99, 1.0)]
        self._lags.clear()
        self._lags.append(0.0)
        return found


async def echo(settings: TrialSettings) -> None:
    """Its answers are as long as the gateway's, and say nothing that is looked at."""
    speaker, random, lag = Speaker(1), Random(settings.seed), ServerLag()
    answers = [json.dumps(_answer(speaker.reply())).encode() for _ in range(REPLIES)]

    async def ask(request: web.Request) -> web.Response:
        body = await request.read()
        if settings.reply:
            await asyncio.sleep(taking(settings.reply, random))
        return web.Response(body=answers[len(body) % REPLIES], content_type="application/json")

    async def lags(_: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(lag.told()))

    application = web.Application(client_max_size=8 << 20)
    application.router.add_post("/v1/chat/completions", ask)
    application.router.add_get("/lags", lags)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, HOST, 0, backlog=settings.episodes)
    await site.start()
    looking = asyncio.create_task(lag.run())
    print(f"http://{HOST}:{runner.addresses[0][1]}", flush=True)
    await until_told()
    looking.cancel()
    await runner.cleanup()


def _answer(reply: str) -> dict[str, Any]:
    """A chat completion."""
    text, opener, call = reply.partition("\n<tool_call>\n")
    message: dict[str, Any] = {"role": "assistant", "content": text or None, "refusal": None}
    if opener:
        made = json.loads(call.partition("\n</tool_call>")[0])
        function = {"name": made["name"], "arguments": json.dumps(made["arguments"])}
        message["tool_calls"] = [{"id": "call_0123456789abcdef01234567", "type": "function", "function": function}]
    return {
        "id": "call-0123456789abcdef01234567",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": "model",
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "tool_calls" if opener else "stop"}],
        "usage": {"prompt_tokens": 1000, "completion_tokens": 50, "total_tokens": 1050},
    }


# ------------------------------------------------------------------------------------------ the load


class Load:
    """Programs that play, all in this process: each has a conversation of so many turns, and sends all of it each time."""

    def __init__(self, settings: TrialSettings, session: aiohttp.ClientSession):
        self._settings, self._session = settings, session
        self.calls: list[float] = []
        self.failures: Counter[str] = Counter()
        self._speakers = [Speaker(index) for index in range(16)]

    async def episode(self, index: int) -> None:
        try:
            await self._play(index)
        except TimeoutError:
            self.failures["timed out"] += 1
        except aiohttp.ClientError as error:
            self.failures[type(error).__name__] += 1

    async def _play(self, index: int) -> None:
        settings, random, speaker = self._settings, Random(index), self._speakers[index % len(self._speakers)]
        begun = {"base": "", "key": ""}
        if settings.key:
            begun = await self._post("/v1/episodes", settings.key, {"wait": PATIENCE})
        await asyncio.sleep(random.uniform(0.0, settings.tool))
        messages = speaker.opening()
        for _ in range(settings.turns):
            body = {"model": "policy", "messages": messages, "tools": TOOLS, "max_tokens": 512}
            began = time.perf_counter()
            answer = await self._post(f"{begun['base']}/v1/chat/completions", begun["key"], body)
            self.calls.append(time.perf_counter() - began)
            message = answer["choices"][0]["message"]
            messages += [{name: value for name, value in message.items() if value is not None}, *speaker.environment(message)]
            await asyncio.sleep(taking(settings.tool, random))
        if settings.key:
            await self._post(f"/v1/episodes/{begun['id']}/reward", begun["key"], {"reward": 1.0})
            await self._post(f"/v1/episodes/{begun['id']}/end", begun["key"], {})

    async def _post(self, path: str, key: str, body: dict[str, Any]) -> Any:
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        async with self._session.post(self._settings.url + path, data=msgspec.json.encode(body), headers=headers) as answer:
            answer.raise_for_status()
            return msgspec.json.decode(await answer.read())


async def load(settings: TrialSettings) -> None:
    timeout = aiohttp.ClientTimeout(total=PATIENCE)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        playing = Load(settings, session)
        began = time.perf_counter()
        await asyncio.gather(*(playing.episode(index) for index in range(settings.episodes)))
        seconds = time.perf_counter() - began
    print(msgspec.json.encode(Played(playing.calls, seconds, dict(playing.failures))).decode(), flush=True)


async def until_told() -> None:
    await asyncio.to_thread(sys.stdin.read)


WHAT: dict[str, Callable[[TrialSettings], Awaitable[None]]] = {"rollout": rollout, "echo": echo, "load": load}

if __name__ == "__main__":
    os_process.die_with_parent()
    os_process.raise_descriptor_limit()
    uvloop.install()
    asyncio.run(WHAT[sys.argv[1]](msgspec.json.decode(sys.stdin.readline(), type=TrialSettings)))  # type: ignore[arg-type]
