"""An agent of two turns, which runs of the tests have play."""

from __future__ import annotations

from typing import Any


async def run(data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any, episode: Any, **_: Any) -> float:
    messages, earned = list(data["messages"]), 0.0
    for _turn in range(2):
        message = await episode.chat(messages)
        earned += len(set(message["content"] or "")) / 16
        messages += [{"role": "assistant", "content": message["content"]}, {"role": "user", "content": "sure?"}]
    episode.log(asked=len(messages))
    return earned
