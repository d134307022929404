"""An environment behind a server of OpenEnv's (openenv 0.10), as an agent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import openenv

from sluice.agents.conversation import Conversation, system_messages
from sluice.agents.episode import Episode, InfrastructureError

CONVERSATION = ("prompt", "messages")  # columns that are no arguments of `reset`
SEEDS = 2**31


class OpenEnvClient:
    """Each episode is a session of its own, reset with the row's columns. A class of your own says in `action` and `text`, and
    where need be in `client`, how it is played in words."""

    def __init__(self, url: str = "", *, turns: int = 32, turn_rewards: bool = False, system: str = ""):
        """`url`: of the server. The others as those of GymnasiumText."""
        self._url = url
        self._turns, self._turn_rewards, self._system = turns, turn_rewards, system

    def client(self) -> Any:
        """A client that is not connected yet, such as an environment's own class."""
        return openenv.GenericEnvClient(base_url=self._url)

    def action(self, reply: str) -> Any:
        """What a reply does: here its JSON. Raises ValueError for one that is no action: it ends the episode."""
        if not isinstance(found := json.loads(reply), dict):
            raise ValueError("an action is an object")
        return found

    def text(self, observation: Any) -> str:
        """What the policy reads: here the observation's JSON."""
        found = observation if isinstance(observation, Mapping) else observation.model_dump(mode="json")
        return json.dumps(found, ensure_ascii=False)

    async def run(self, data: dict[str, Any], *, episode: Episode, **_: Any) -> float | None:
        conversation = Conversation(episode, system_messages(self._system))
        columns = {name: value for name, value in data.items() if name not in CONVERSATION}
        try:
            async with self.client() as client:

                async def step(reply: str) -> tuple[str, float, bool]:
                    found = await client.step(self.action(reply))
                    return self.text(found.observation), float(found.reward or 0.0), bool(found.done)

                begun = await client.reset(**{"seed": episode.seed % SEEDS, **columns})
                conversation.append(self.text(begun.observation))
                return await conversation.play(step, self._turns, self._turn_rewards)
        except OSError as error:  # the server is not there, or has gone
            raise InfrastructureError(f"OpenEnv's server: {error}") from None
