"""Tools of an agent: Python functions, whose signatures are schemas, and servers with tools. The standard library alone."""

from __future__ import annotations

import asyncio
import collections.abc
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from sluice.agents.conversation import Conversation, opening, value_of
from sluice.agents.episode import DataError, Episode, InfrastructureError

# ---- Schemas
# From a Python function to a tool's description: the signature gives the schema, the docstring gives the texts. Pure.

GIVEN = "episode"  # the model does not give a parameter of this name
NAMES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null", list: "array", dict: "object"}
PLAIN: dict[Any, Any] = {Any: {}, inspect.Parameter.empty: {}} | {kind: {"type": name} for kind, name in NAMES.items()}
ARRAYS = (list, collections.abc.Sequence, collections.abc.Iterable)
OBJECTS = (dict, collections.abc.Mapping)
SECTION = re.compile(r"(Args|Arguments|Parameters|Returns?|Yields?|Raises|Examples?|Notes?):\s*$")
ENTRY = re.compile(r"(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")


def function_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the function as an entry of a request's `tools`. Raises TypeError for a parameter that JSON cannot give."""
    text, said = described(inspect.getdoc(function) or "")
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise TypeError(f"the tool {function.__name__}: {error}") from None
    properties, required = {}, []
    for name, parameter in inspect.signature(function).parameters.items():
        if name == GIVEN or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise TypeError(f"the tool {function.__name__}: {name} cannot be given by name")
        try:
            schema = type_schema(hints.get(name, parameter.empty))
        except TypeError as error:
            raise TypeError(f"the tool {function.__name__}: {name}: {error}") from None
        properties[name] = {**schema, **({"description": said[name]} if name in said else {})}
        if parameter.default is parameter.empty:
            required.append(name)
        elif isinstance(parameter.default, (str, int, float, bool)):
            properties[name]["default"] = parameter.default
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": function.__name__, "description": text, "parameters": parameters}}


def type_schema(hint: Any) -> dict[str, Any]:
    """Return the JSON schema of an annotation. Raises TypeError if JSON does not have its values."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        texts = [text for text in inner[1:] if isinstance(text, str)]
        return {**type_schema(inner[0]), **({"description": texts[0]} if texts else {})}
    if origin is typing.Literal:
        kinds = {type(value) for value in inner}
        return {**(PLAIN[kinds.pop()] if len(kinds) == 1 else {}), "enum": list(inner)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [type_schema(each) for each in inner]}
    if origin in ARRAYS:
        return {"type": "array", "items": type_schema(inner[0])}
    if origin in OBJECTS and inner[0] is str:
        return {"type": "object", "additionalProperties": type_schema(inner[1])}
    if typing.is_typeddict(hint):
        fields = {name: type_schema(each) for name, each in typing.get_type_hints(hint).items()}
        return {"type": "object", "properties": fields, "required": sorted(hint.__required_keys__)}
    try:
        return dict(PLAIN[hint])
    except (KeyError, TypeError):
        known = "str, int, float, bool, None, list, dict, Literal, TypedDict, Any and unions of them"
        raise TypeError(f"{hint} cannot be a tool's parameter; must be one of {known}") from None


def described(doc: str) -> tuple[str, dict[str, str]]:
    """Return a docstring's texts on the function and on each parameter, by Google's sections."""
    about: list[str] = []
    said: dict[str, str] = {}
    section, name, indent = "", "", 0
    for line in doc.splitlines():
        text, depth = line.strip(), len(line) - len(line.lstrip())
        if not depth and SECTION.match(line):
            section, name, indent = text[:3], "", 0
        elif section in ("Arg", "Par") and (match := ENTRY.match(text)) and (not indent or depth <= indent):
            indent, name = depth, match[1]
            said[name] = match[2]
        elif section and name and text:
            said[name] = f"{said[name]} {text}".strip()
        elif not section:
            about.append(text)
    return "\n".join(about).strip(), said


class Toolset:
    """Several tools as one. `schemas`: the `tools` of a request, with those of servers once it is open. `seconds`: limit of one
    call. `episode`: the one that these tools serve."""

    def __init__(self, tools: Iterable[Any], seconds: float):
        """Collect `tools`: functions, and objects with `connect`, such as McpServer. Raises TypeError for a function without a
        schema, ValueError for two tools of one name."""
        self.schemas: list[dict[str, Any]] = []
        self.seconds = seconds
        self.episode: Episode | None = None
        self._calls: dict[str, Any] = {}
        self._open = AsyncExitStack()
        self._servers: list[Any] = []
        for tool in tools:
            if hasattr(tool, "connect"):
                self._servers.append(tool)
            else:
                self._add(function_schema(tool), partial(self._call_function, tool))

    def _add(self, schema: dict[str, Any], call: Any) -> None:
        name = schema["function"]["name"]
        if name in self._calls:
            raise ValueError(f"two tools have the name {name!r}")
        self.schemas.append(schema)
        self._calls[name] = call

    async def open(self) -> None:
        """Connect to the servers. Raises their errors."""
        for server in self._servers:
            connection = await server.connect()
            self._open.push_async_callback(connection.close)
            for schema in connection.schemas:
                self._add(schema, partial(connection.call, schema["function"]["name"]))

    async def close(self) -> None:
        await self._open.aclose()

    async def answers(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Make the tool calls of the policy's message, all at the same time. Returns a message for each call, in order."""
        calls = message.get("tool_calls") or ()
        texts = await asyncio.gather(*(self.call(call["function"]["name"], call["function"]["arguments"]) for call in calls))
        return [{"role": "tool", "tool_call_id": call["id"], "content": text} for call, text in zip(calls, texts, strict=True)]

    async def call(self, name: str, arguments: str | Mapping[str, Any]) -> str:
        """Call a tool and return a text for the model: the result, as text or JSON, or what was wrong with the call.
        `arguments`: an object, or its JSON. Raises InfrastructureError and DataError, which no model can correct."""
        try:
            if name not in self._calls:
                raise ValueError(f"there is no tool {name!r}; there are {', '.join(self._calls) or 'none'}")
            given = json.loads(arguments) if isinstance(arguments, str) else arguments
            if not isinstance(given, Mapping):
                raise ValueError("the arguments of a tool are a JSON object")
            found = await self._in_time(name, self._calls[name](given))
        except (InfrastructureError, DataError):
            raise
        except Exception as error:  # noqa: BLE001 - the model gets any error of the tool
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
        signature.bind(**given, **own)  # raises TypeError with the parameter's name
        return await value_of(function, **given, **own)


class ToolAgent:
    """An agent that asks the policy until a reply calls no tool.

    `tools`: as for Toolset. `reward(data, messages)`: the episode's reward, from all messages. It may be async and may take
    `episode`. `turns`: replies at most. `system`: text before the row's `messages` or `prompt`."""

    def __init__(self, tools: Iterable[Any] = (), *, reward: Any, turns: int = 8, system: str = ""):
        self.tools, self._reward, self._turns, self._system = list(tools), reward, turns, system
        self._given = GIVEN in inspect.signature(reward).parameters

    async def run(self, data: dict[str, Any], *, episode: Episode, **_: Any) -> Any:
        conversation = Conversation(episode, opening(data, self._system))
        await with_tools(conversation, episode.tools, self._turns)
        return await value_of(self._reward, data, conversation.messages, **({GIVEN: episode} if self._given else {}))


async def with_tools(conversation: Conversation, tools: Toolset, turns: int) -> None:
    """Ask the policy until a reply calls no tool, or is cut, or is the last of `turns`. The stop reason says which."""
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
