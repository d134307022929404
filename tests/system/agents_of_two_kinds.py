"""Two kinds of agents for tests/system/test_environments.py: a function with a tool, and a class with every method."""

from __future__ import annotations

import asyncio
from typing import Any


async def sums(data: dict[str, Any], *, episode: Any, **_: Any) -> float:
    message = await episode.chat(data["messages"])
    await asyncio.sleep(data.get("tool", 0.0))  # a tool that is slow
    return len(set(message["content"] or "")) / 16


class Maze:
    """Two turns, of which the second has a reward of its own. Its tasks have no conversation."""

    async def setup(self, data: dict[str, Any], **_: Any) -> None:
        self.walls = data["walls"]

    async def run(self, data: dict[str, Any], *, episode: Any, **_: Any) -> None:
        messages = [{"role": "user", "content": f"{self.walls} walls"}]
        for _turn in range(2):
            message = await episode.chat(messages)
            messages += [{"role": "assistant", "content": message["content"]}, {"role": "user", "content": "on?"}]
        episode.reward(len(set(message["content"] or "")) / 16, turn=1)
        episode.log(walls=self.walls)

    async def score(self, data: dict[str, Any], **_: Any) -> float:
        return 0.5
