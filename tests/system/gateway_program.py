"""A program that asks a run for tasks, and plays episodes of two turns. It knows a URL and a key."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import aiohttp

URL, KEY = os.environ["SLUICE_GATEWAY_URL"], os.environ["SLUICE_GATEWAY_KEY"]
AT_ONCE = 16


async def play(http: aiohttp.ClientSession, begun: dict[str, Any]) -> None:
    own = {"authorization": f"Bearer {begun['key']}"}
    messages = list(begun["task"]["messages"])
    earned = 0.0
    for _ in range(2):
        body = {"model": "any", "messages": messages}
        async with http.post(f"{URL}{begun['base']}/v1/chat/completions", json=body, headers=own) as answer:
            if answer.status != 200:
                return
            told = await answer.json()
        message = told["choices"][0]["message"]
        earned += len(set(message["content"] or "")) / 16
        messages += [{"role": "assistant", "content": message["content"]}, {"role": "user", "content": "sure?"}]
    for what, sent in (("reward", {"reward": earned}), ("end", {})):
        async with http.post(f"{URL}/v1/episodes/{begun['id']}/{what}", json=sent, headers=own):
            pass


async def keep_playing(http: aiohttp.ClientSession) -> None:
    while True:
        headers = {"authorization": f"Bearer {KEY}"}
        async with http.post(f"{URL}/v1/episodes", json={"wait": 20}, headers=headers) as answer:
            begun = await answer.json() if answer.status == 200 else None
        if begun is not None:
            await play(http, begun)


async def main() -> None:
    async with aiohttp.ClientSession() as http:
        await asyncio.gather(*(keep_playing(http) for _ in range(AT_ONCE)))


asyncio.run(main())
