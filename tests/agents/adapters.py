"""Plays one episode with an adapter, against whatever gateway there is, as a worker of the environment's role would."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple

from sluice.agents import Episode, InfrastructureError
from sluice.agents.functions import Toolset
from tests.agents.conftest import PATIENCE, Gateway, posted

TOOL_SECONDS = 30.0


class RecordingChannel:
    """`news`: all that was told, in its order. Nothing that is asked has an answer."""

    def __init__(self) -> None:
        self.news: list[dict[str, Any]] = []

    def notify(self, episode: str, **news: Any) -> None:
        self.news.append(news)

    async def ask(self, episode: str, what: str, **fields: Any) -> Any:
        raise InfrastructureError(f"{what}: there is none here")


class PlayedEpisode(NamedTuple):
    reward: Any
    stop_reason: str
    news: list[dict[str, Any]]


def play(gateway: Gateway, agent: Any, data: Mapping[str, Any], tool_seconds: float = TOOL_SECONDS) -> PlayedEpisode:
    """One episode. Raises what the agent does; the episode has ended by then."""
    return asyncio.run(played(gateway, agent, data, tool_seconds))


async def played(gateway: Gateway, agent: Any, data: Mapping[str, Any], tool_seconds: float = TOOL_SECONDS) -> PlayedEpisode:
    begun = await asyncio.to_thread(posted, gateway.url, "/v1/episodes", {"wait": 60}, gateway.key)
    told = {"id": begun["id"], "task": data, "base_url": gateway.url + begun["base"], "api_key": begun["key"], "seed": 7}
    channel, tools = RecordingChannel(), Toolset(getattr(agent, "tools", ()), tool_seconds)
    episode = tools.episode = Episode({**told, "purpose": "train", "call_seconds": PATIENCE}, channel, tools)
    given = {"base_url": episode.base_url, "api_key": episode.api_key, "http_client": None, "episode": episode}
    try:
        await tools.open()
        reward = await agent.run(dict(data), **given)
    finally:
        await tools.close()
        await asyncio.to_thread(posted, gateway.url, f"/v1/episodes/{begun['id']}/end", {}, begun["key"])
    return PlayedEpisode(reward, episode.stop_reason, channel.news)
