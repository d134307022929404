"""Tools of agents: schemas from functions, calls, and what the model is answered."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, Optional, TypedDict, Union

import pytest

from sluice.agents.episode import DataError, InfrastructureError
from sluice.agents.functions import Toolset, function_schema, type_schema

# ---- What the model is told of a Python function that is a tool


class Place(TypedDict, total=False):
    name: str
    height: float


def search(text: str, limit: int = 5, *, order: Literal["new", "old"] = "new", tags: list[str] | None = None) -> str:
    """Search the archive.

    All of it, also what is old.

    Args:
        text: What to look for,
            language: any.
        limit (int): How many.

    Returns:
        What was found.
    """
    return f"{text} {limit} {order} {tags}"


def test_signature_and_docstring_are_the_schema() -> None:
    assert function_schema(search) == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the archive.\n\nAll of it, also what is old.",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string", "description": "What to look for, language: any."},
                    "limit": {"type": "integer", "description": "How many.", "default": 5},
                    "order": {"type": "string", "enum": ["new", "old"], "default": "new"},
                    "tags": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
                },
                "required": ["text"],
            },
        },
    }


@pytest.mark.parametrize(
    ("hint", "schema"),
    [
        (bool, {"type": "boolean"}),
        (Any, {}),
        (list, {"type": "array"}),
        (list[dict[str, int]], {"type": "array", "items": {"type": "object", "additionalProperties": {"type": "integer"}}}),
        (Sequence[float], {"type": "array", "items": {"type": "number"}}),
        (Mapping[str, Any], {"type": "object", "additionalProperties": {}}),
        (Optional[int], {"anyOf": [{"type": "integer"}, {"type": "null"}]}),  # noqa: UP045 - as others write it
        (Union[int, str], {"anyOf": [{"type": "integer"}, {"type": "string"}]}),  # noqa: UP007
        (int | str, {"anyOf": [{"type": "integer"}, {"type": "string"}]}),
        (Literal[1, 2], {"type": "integer", "enum": [1, 2]}),
        (Literal[1, "a"], {"enum": [1, "a"]}),
        (Annotated[int, "How many."], {"type": "integer", "description": "How many."}),
        (Place, {"type": "object", "properties": {"name": {"type": "string"}, "height": {"type": "number"}}, "required": []}),
    ],
)
def test_annotations(hint: Any, schema: dict[str, Any]) -> None:
    assert type_schema(hint) == schema


@pytest.mark.parametrize("hint", [bytes, dict[int, str], Callable[[], int], tuple[int, int], complex])
def test_what_json_does_not_have_is_refused_by_name(hint: Any) -> None:
    def tool(value: Any) -> None: ...

    tool.__annotations__["value"] = hint
    with pytest.raises(TypeError, match=r"the tool tool: value: .* cannot be a tool's parameter"):
        function_schema(tool)


def test_the_episode_is_not_the_models_to_give() -> None:
    def tool(episode: Any, key: str, *more: Any, **rest: Any) -> None: ...

    assert list(function_schema(tool)["function"]["parameters"]["properties"]) == ["key"]

    def positional(key: str, /) -> None: ...

    with pytest.raises(TypeError, match="key cannot be given by name"):
        function_schema(positional)


# ---- Calls of tools: what the model is told of what they gave, and of what went wrong

SECONDS = 30.0


def add(a: int, b: int = 1) -> int:
    return a + b


async def note(text: str) -> dict[str, str]:
    return {"noted": text, "by": "ä"}


def fail(how: str) -> None:
    raise {"data": DataError, "infrastructure": InfrastructureError, "own": KeyError}[how]("gone")


def called(name: str, arguments: Any, tools: Any = (add, note, fail), seconds: float = SECONDS) -> str:
    return asyncio.run(Toolset(tools, seconds).call(name, arguments))


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("add", '{"a": 2, "b": 3}', "5"),
        ("add", {"a": 2}, "3"),
        ("note", '{"text": "x"}', '{"noted": "x", "by": "ä"}'),
        ("add", "{", "Error: JSONDecodeError: "),
        ("add", "[1]", "Error: ValueError: the arguments of a tool are a JSON object"),
        ("add", '{"c": 2}', "Error: TypeError: missing a required argument: 'a'"),
        ("add", '{"a": 1, "episode": 2}', "Error: TypeError: there is no parameter 'episode'"),
        ("multiply", "{}", "Error: ValueError: there is no tool 'multiply'; there are add, note, fail"),
        ("fail", '{"how": "own"}', "Error: KeyError: 'gone'"),
    ],
)
def test_what_the_model_reads(name: str, arguments: Any, told: str) -> None:
    assert called(name, arguments).startswith(told)


@pytest.mark.parametrize(("how", "error"), [("data", DataError), ("infrastructure", InfrastructureError)])
def test_what_no_model_can_mend_is_raised(how: str, error: type[Exception]) -> None:
    with pytest.raises(error, match="gone"):
        called("fail", {"how": how})


def test_a_tool_has_its_seconds() -> None:
    async def work() -> str:
        ended = asyncio.Event()

        async def wait() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        told = await Toolset([wait], 0.01).call("wait", "{}")
        await asyncio.wait_for(ended.wait(), SECONDS)
        return told

    assert asyncio.run(work()) == "Error: ValueError: wait did not answer within 0.01 s"


def test_calls_of_one_message_are_made_at_the_same_time_and_answered_in_order() -> None:
    meeting = threading.Barrier(2)  # neither answers without the other

    def meet(name: str) -> str:
        meeting.wait(SECONDS)
        return name

    calls = [{"id": id, "function": {"name": "meet", "arguments": json.dumps({"name": id})}} for id in ("b", "a")]
    answers = asyncio.run(Toolset([meet], SECONDS).answers({"tool_calls": calls}))
    assert answers == [{"role": "tool", "tool_call_id": id, "content": id} for id in ("b", "a")]
    assert asyncio.run(Toolset([meet], SECONDS).answers({"content": "no calls", "tool_calls": None})) == []


def test_a_tool_may_take_the_episode() -> None:
    def secret(episode: Any, key: str) -> str:
        return str(episode[key])

    tools = Toolset([secret], SECONDS)
    episode: Any = {"a": 7}
    tools.episode = episode
    assert asyncio.run(tools.call("secret", {"key": "a"})) == "7"


class PretendServer:
    """What McpServer is to a Toolset."""

    def __init__(self, *names: str) -> None:
        self.schemas = [{"type": "function", "function": {"name": name}} for name in names]
        self.open = 0

    async def connect(self) -> PretendServer:
        self.open += 1
        return self

    async def call(self, name: str, arguments: Any) -> str:
        return f"{name} {arguments}"

    async def close(self) -> None:
        self.open -= 1


def test_servers_are_reached_when_it_is_opened_and_let_go_when_it_is_closed() -> None:
    server = PretendServer("far")

    async def use() -> str:
        tools = Toolset([add, server], SECONDS)
        await tools.open()
        assert server.open == 1 and [each["function"]["name"] for each in tools.schemas] == ["add", "far"]
        told = await tools.call("far", "{}")
        await tools.close()
        return told

    assert asyncio.run(use()) == "far {}" and server.open == 0


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two tools have the name 'add'"):
        Toolset([add, add], SECONDS)
    server = PretendServer("add")

    async def use() -> None:
        tools = Toolset([add, server], SECONDS)
        try:
            await tools.open()
        finally:
            await tools.close()

    with pytest.raises(ValueError, match="two tools have the name 'add'"):
        asyncio.run(use())
    assert server.open == 0
