"""A Gymnasium environment as an agent: what is seen becomes the user's message, and the reply an action."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sluice.agents.conversation import Conversation, package, told_by, value_of
from sluice.agents.episode import Episode


class GymnasiumText:
    """An environment is made for each episode, reset with the row's `seed`, or the episode's where it has none, and its
    `options`.

    `make`: an environment's id, or a function from the row to the environment. `action`: from a reply's text to an action; it
    raises ValueError for a text that is none, which ends the episode. `text(observation, environment)`: what the policy reads;
    without it, what the environment renders as text, else the observation. `turns`: replies at most. `turn_rewards`: each turn
    is rewarded by itself, rather than the episode with the sum. `system`: what the conversation begins with.
    """

    def __init__(
        self,
        make: str | Callable[[dict[str, Any]], Any],
        *,
        action: Callable[[str], Any],
        text: Callable[[Any, Any], str] | None = None,
        turns: int = 32,
        turn_rewards: bool = False,
        system: str = "",
    ):
        """Raises ImportError where Gymnasium is missing."""
        gymnasium = package("gymnasium", "gymnasium>=1")
        self._make = (lambda _: gymnasium.make(make)) if isinstance(make, str) else make
        self._action, self._text = action, text or seen
        self._turns, self._turn_rewards, self._system = turns, turn_rewards, system

    async def run(self, data: dict[str, Any], *, episode: Episode, **_: Any) -> float | None:
        environment = await value_of(self._make, data)

        async def step(reply: str) -> tuple[str, float, bool]:
            observation, earned, terminated, truncated, _ = await value_of(environment.step, self._action(reply))
            return self._text(observation, environment), float(earned), bool(terminated or truncated)

        try:
            seed = data.get("seed", episode.seed)
            observation, _ = await value_of(environment.reset, seed=seed, options=data.get("options"))
            conversation = Conversation(episode, told_by(self._system))
            conversation.tell(self._text(observation, environment))
            return await conversation.play(step, self._turns, self._turn_rewards)
        finally:
            await value_of(environment.close)


def seen(observation: Any, environment: Any) -> str:
    """What the environment renders, if as text, else the observation."""
    return str(environment.render() if environment.render_mode == "ansi" else observation).strip()
