"""Tools of an agent: Python functions, whose schemas are their signatures, and servers that have tools. The standard library
alone."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from sluice.agents.conversation import Conversation, opening, value_of
from sluice.agents.episode import DataError, Episode, InfrastructureError
from sluice.agents.schemas import GIVEN, function_schema


class Toolset:
    """Several tools as one. `schemas`: the `tools` of a request; those of servers are among them once it is open. `seconds`: of
    one call. `episode`: whose tools these are."""

    def __init__(self, tools: Iterable[Any], seconds: float):
        """`tools`: functions, and what has `connect`, such as McpServer. Raises TypeError for a function without a schema,
        ValueError for two tools of one name."""
        self.schemas: list[dict[str, Any]] = []
        self.seconds = seconds
        self.episode: Episode | None = None
        self._calls: dict[str, Any] = {}
        self._open: list[Any] = []
        tools = list(tools)
        self._servers = [tool for tool in tools if hasattr(tool, "connect")]
        for tool in tools:
            if not hasattr(tool, "connect"):
                self._add(function_schema(tool), partial(self._call_function, tool))

    def _add(self, schema: dict[str, Any], call: Any) -> None:
        name = schema["function"]["name"]
        if name in self._calls:
            raise ValueError(f"two tools have the name {name!r}")
        self.schemas.append(schema)
        self._calls[name] = call

    async def open(self) -> None:
        """Connect to the servers. Raises what they raise."""
        for server in self._servers:
            self._open.append(connection := await server.connect())
            for schema in connection.schemas:
                self._add(schema, partial(connection.call, schema["function"]["name"]))

    async def close(self) -> None:
        """The servers that were reached are let go."""
        while self._open:
            await self._open.pop().close()

    async def answers(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        """A message for each of the calls of tools of the policy's message, in its order; they are made at the same time."""
        calls = message.get("tool_calls") or ()
        texts = await asyncio.gather(*(self.call(call["function"]["name"], call["function"]["arguments"]) for call in calls))
        return [{"role": "tool", "tool_call_id": call["id"], "content": text} for call, text in zip(calls, texts, strict=True)]

    async def call(self, name: str, arguments: str | Mapping[str, Any]) -> str:
        """What the model is told: what the tool gave, as text or as JSON, or what was wrong with the call. `arguments`: an
        object, or its JSON. Raises InfrastructureError and DataError, which no model can mend."""
        try:
            if name not in self._calls:
                raise ValueError(f"there is no tool {name!r}; there are {', '.join(self._calls) or 'none'}")
            given = json.loads(arguments) if isinstance(arguments, str) else arguments
            if not isinstance(given, Mapping):
                raise ValueError("the arguments of a tool are a JSON object")
            found = await self._in_time(name, self._calls[name](given))
        except (InfrastructureError, DataError):
            raise
        except Exception as error:  # noqa: BLE001 - whatever the tool raises is told
            return f"Error: {type(error).__name__}: {error}"
        return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False, default=str)

    async def _in_time(self, name: str, work: Any) -> Any:
        task = asyncio.ensure_future(work)
        try:
            if not (await asyncio.wait({task}, timeout=self.seconds))[0]:
                raise ValueError(f"{name} did not answer within {self.seconds:g} s")
            return task.result()
        finally:
            task.cancel()

    async def _call_function(self, function: Any, given: Mapping[str, Any]) -> Any:
        signature = inspect.signature(function)
        if GIVEN in given:
            raise TypeError(f"there is no parameter {GIVEN!r}")
        own = {GIVEN: self.episode} if GIVEN in signature.parameters else {}
        signature.bind(**given, **own)  # raises TypeError, which names the parameter
        return await value_of(function, **given, **own)


class ToolAgent:
    """An agent that asks the policy until it answers without a call of a tool.

    `tools`: as those of Toolset. `reward(data, messages)`, which may also await and may take `episode`: what the episode
    earned, from all that was said. `turns`: replies at most. `system`: what the conversation begins with, before the row's
    `messages` or `prompt`.
    """

    def __init__(self, tools: Iterable[Any] = (), *, reward: Any, turns: int = 8, system: str = ""):
        self.tools, self._reward, self._turns, self._system = list(tools), reward, turns, system
        self._given = GIVEN in inspect.signature(reward).parameters

    async def run(self, data: dict[str, Any], *, episode: Episode, **_: Any) -> Any:
        conversation = Conversation(episode, opening(data, self._system))
        await with_tools(conversation, episode.tools, self._turns)
        return await value_of(self._reward, data, conversation.messages, **({GIVEN: episode} if self._given else {}))


async def with_tools(conversation: Conversation, tools: Toolset, turns: int) -> None:
    """Until a reply calls no tool, or is cut, or there were `turns` of them; the episode's stop reason says which."""
    fields = {"tools": tools.schemas} if tools.schemas else {}
    for _ in range(turns):
        message = await conversation.reply(**fields)
        if message is None:
            return
        if not message.get("tool_calls"):
            if message["finish_reason"] == "length":
                conversation.episode.stop_reason = "max_tokens"
            return
        conversation.messages += await tools.answers(message)
    conversation.episode.stop_reason = "max_turns"
