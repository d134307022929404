"""A Gymnasium environment (gymnasium 1) as an agent: what is seen becomes the user's message, and the reply an action."""

from __future__ import annotations

from typing import Any

import gymnasium

from sluice.agents.conversation import Conversation, system_messages, value_of
from sluice.agents.episode import Episode


class GymnasiumText:
    """An environment is made for each episode, and reset with the row's `seed`, or the episode's where it has none, and with
    the row's `options`. A class of your own says in `action`, and where need be in `text` and `make`, how it is played in
    words."""

    def __init__(self, id: str = "", *, turns: int = 32, turn_rewards: bool = False, system: str = "", **made: Any):
        """`id` and `made`: what `gymnasium.make` is given. `turns`: replies at most. `turn_rewards`: each turn is rewarded by
        itself, rather than the episode with the sum. `system`: what the conversation begins with."""
        self._id, self._made = id, made
        self._turns, self._turn_rewards, self._system = turns, turn_rewards, system

    def make(self, data: dict[str, Any]) -> Any:
        """The environment of a row."""
        return gymnasium.make(self._id, **self._made)

    def action(self, reply: str) -> Any:
        """What a reply does. Raises ValueError for one that is no action: it ends the episode."""
        return int(reply)

    def text(self, observation: Any, environment: Any) -> str:
        """What the policy reads: here what the environment renders, if as text, else the observation."""
        return str(environment.render() if environment.render_mode == "ansi" else observation).strip()

    async def run(self, data: dict[str, Any], *, episode: Episode, **_: Any) -> float | None:
        environment = await value_of(self.make, data)

        async def step(reply: str) -> tuple[str, float, bool]:
            observation, earned, terminated, truncated, _ = await value_of(environment.step, self.action(reply))
            return self.text(observation, environment), float(earned), bool(terminated or truncated)

        try:
            seed = data.get("seed", episode.seed)
            observation, _ = await value_of(environment.reset, seed=seed, options=data.get("options"))
            conversation = Conversation(episode, system_messages(self._system))
            conversation.append(self.text(observation, environment))
            return await conversation.play(step, self._turns, self._turn_rewards)
        finally:
            await value_of(environment.close)
