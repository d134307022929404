"""An environment behind a server of OpenEnv's, as an agent."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from sluice.agents.conversation import Conversation, package, told_by
from sluice.agents.episode import Episode, InfrastructureError

NO_ARGUMENTS = ("prompt", "messages")


class OpenEnvClient:
    """Each episode is a session of its own, reset with the row's columns.

    `server`: its URL, or a function that gives a client, such as a class of OpenEnv's. `action`: from a reply's text to an
    action; without it the reply is the action's JSON. It raises ValueError for a text that is none, which ends the episode.
    `text`: from an observation to what the policy reads; without it, its JSON. `turns`, `turn_rewards`, `system`: as those of
    GymnasiumText.
    """

    def __init__(
        self,
        server: str | Callable[[], Any],
        *,
        action: Callable[[str], Any] | None = None,
        text: Callable[[Any], str] | None = None,
        turns: int = 32,
        turn_rewards: bool = False,
        system: str = "",
    ):
        """Raises ImportError where OpenEnv is missing."""
        openenv = package("openenv", "openenv>=0.10")
        self._client = (lambda: openenv.GenericEnvClient(base_url=server)) if isinstance(server, str) else server
        self._action, self._text = action or read, text or written
        self._turns, self._turn_rewards, self._system = turns, turn_rewards, system

    async def run(self, data: dict[str, Any], *, episode: Episode, **_: Any) -> float | None:
        conversation = Conversation(episode, told_by(self._system))
        asked = {"seed": episode.seed % 2**31, **{name: value for name, value in data.items() if name not in NO_ARGUMENTS}}
        try:
            async with self._client() as client:

                async def step(reply: str) -> tuple[str, float, bool]:
                    found = await client.step(self._action(reply))
                    return self._text(found.observation), float(found.reward or 0.0), bool(found.done)

                conversation.tell(self._text((await client.reset(**asked)).observation))
                return await conversation.play(step, self._turns, self._turn_rewards)
        except OSError as error:  # the server is not there, or has gone
            raise InfrastructureError(f"OpenEnv's server: {error}") from None


def read(reply: str) -> Any:
    """The reply as JSON. Raises ValueError where it is no object."""
    if not isinstance(found := json.loads(reply), dict):
        raise ValueError("an action is an object")
    return found


def written(observation: Any) -> str:
    """An observation as JSON."""
    found = observation if isinstance(observation, Mapping) else observation.model_dump(mode="json")
    return json.dumps(found, ensure_ascii=False)
