"""A class as TRL's `environment_factory` takes them, as an agent. TRL need not be installed. The standard library alone."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from sluice.agents.conversation import Conversation, Message, opening, system_messages, value_of
from sluice.agents.episode import DataError, Episode
from sluice.agents.functions import Toolset, with_tools

NO_TOOLS = ("reset", "get_reward")


class TrlEnvironment:
    """`factory`: the class, whose public methods are tools; or classes by the names that the column `environment` has. An
    object of it plays one episode: `reset` is given the row, and may give text that is added to the task; `get_reward` gives
    what was earned.

    `reward_funcs`: functions as TRL's, which are called with lists of one and added up. `tools`: functions besides the methods.
    """

    def __init__(
        self, factory: Any, *, reward_funcs: Iterable[Any] = (), tools: Iterable[Any] = (), turns: int = 8, system: str = ""
    ):
        self._factory, self._functions = factory, list(reward_funcs)
        self._tools, self._turns, self._system = list(tools), turns, system

    async def run(self, data: dict[str, Any], *, episode: Episode, **_: Any) -> float | None:
        environment, row = self._made(data)
        seen = await value_of(environment.reset, **row)
        begins = data.get("prompt") or data.get("messages")
        messages = with_text(opening(data, self._system) if begins else system_messages(self._system), seen)
        conversation = Conversation(episode, messages)
        begun = len(messages)
        tools = Toolset([*self._tools, *methods_of(environment)], episode.tools.seconds)
        tools.episode = episode
        try:
            await tools.open()
            await with_tools(conversation, tools, self._turns)
        finally:
            await tools.close()
        return await self._earned(environment, row, messages[:begun], conversation.messages[begun:])

    def _made(self, data: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The environment, and what `reset` is given."""
        if not isinstance(self._factory, Mapping):
            return self._factory(), dict(data)
        if (name := data.get("environment")) not in self._factory:
            raise DataError(f"environment: {name!r} is none of {', '.join(self._factory)}")
        return self._factory[name](), {column: value for column, value in data.items() if column != "environment"}

    async def _earned(
        self, environment: Any, row: Mapping[str, Any], prompt: list[Message], said: list[Message]
    ) -> float | None:
        """The sum of all that judge; None: nothing does."""
        columns = {name: [value] for name, value in row.items() if name != "prompt"}
        found = [await value_of(environment.get_reward)] if hasattr(environment, "get_reward") else []
        for function in self._functions:
            values = await value_of(function, prompts=[prompt], completions=[said], environments=[environment], **columns)
            found += values
        known = [float(value) for value in found if value is not None]
        return sum(known) if known else None


def methods_of(environment: Any) -> list[Any]:
    """Those that are tools: the public ones of its class, in the order of their names, as TRL has them."""
    names = [name for name, _ in inspect.getmembers(type(environment), inspect.isfunction)]
    return [getattr(environment, name) for name in names if name not in NO_TOOLS and not name.startswith("_")]


def with_text(messages: list[Message], text: str | None) -> list[Message]:
    """With `text` behind the last message's own, if that is the user's, else as a message of the user's. Raises DataError where
    the user says nothing at all."""
    asked = bool(messages) and messages[-1]["role"] == "user"
    if not asked and not text:
        raise DataError("the row has no prompt, and reset gave none")
    if not asked:
        return [*messages, {"role": "user", "content": text}]
    return [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + (text or "")}]
