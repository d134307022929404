"""Anthropic's Python package, with nothing but its base URL and key changed."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest
from anthropic import Anthropic

from tests.agents.conftest import Episode

MODEL = "claude-6"
TOOLS: list[Any] = [
    {
        "name": "add",
        "description": "Adds two numbers.",
        "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    }
]
SUMS = """Use the tool.
think which numbers
say adding
call add {"a": 2, "b": 3}
call add {"a": 4, "b": 5}
---
say 5 and 9"""


@pytest.fixture
def client(episode: Episode) -> Anthropic:
    return Anthropic(base_url=episode.url, api_key=episode.key, max_retries=0)


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def test_a_message_whole(client: Anthropic) -> None:
    message = client.messages.create(model=MODEL, max_tokens=8, system="Be brief.", messages=user("say hello there"))
    assert (message.role, message.type) == ("assistant", "message")
    assert message.stop_reason in ("end_turn", "max_tokens")
    assert message.usage.input_tokens > 0 and message.usage.output_tokens > 0


def test_a_stop_sequence(client: Anthropic, scripted: None) -> None:
    message = client.messages.create(model=MODEL, max_tokens=8, stop_sequences=["three"], messages=user("say one two three"))
    assert (message.stop_reason, message.stop_sequence, message.content[0].text) == (  # type: ignore[union-attr]
        "stop_sequence",
        "three",
        "one two ",
    )


def test_a_stream_says_what_the_whole_answer_does(client: Anthropic, scripted: None) -> None:
    with client.messages.stream(model=MODEL, max_tokens=64, messages=user(SUMS), tools=TOOLS) as stream:
        texts = list(stream.text_stream)
        streamed = stream.get_final_message()
    whole = client.messages.create(model=MODEL, max_tokens=64, messages=user(SUMS), tools=TOOLS)
    assert "".join(texts) == "adding"
    kinds = [block.type for block in streamed.content]
    assert sorted(kinds) == sorted(block.type for block in whole.content) == ["text", "thinking", "tool_use", "tool_use"]
    calls = [[block.input for block in message.content if block.type == "tool_use"] for message in (streamed, whole)]
    assert calls == [[{"a": 2, "b": 3}, {"a": 4, "b": 5}]] * 2
    assert streamed.stop_reason == whole.stop_reason == "tool_use"
    assert streamed.usage.input_tokens == whole.usage.input_tokens


def test_tools_and_their_results(client: Anthropic, scripted: None) -> None:
    messages = user(SUMS)
    first = client.messages.create(model=MODEL, max_tokens=64, messages=messages, tools=TOOLS, tool_choice={"type": "any"})
    results: list[Any] = []
    for block in first.content:
        if block.type == "tool_use":
            content = str(int(block.input["a"]) + int(block.input["b"]))  # type: ignore[arg-type,call-overload]
            results.append({"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": content}]})
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    second = client.messages.create(model=MODEL, max_tokens=64, messages=messages, tools=TOOLS)
    assert [block.text for block in second.content if block.type == "text"] == ["5 and 9"]
    assert second.stop_reason == "end_turn"


def test_the_tool_runner(client: Anthropic, scripted: None) -> None:
    @anthropic.beta_tool
    def add(a: int, b: int) -> str:
        """Adds two numbers.

        Args:
            a: one
            b: another
        """
        return str(a + b)

    runner = client.beta.messages.tool_runner(model=MODEL, max_tokens=64, tools=[add], messages=user(SUMS))  # type: ignore
    assert [block.text for block in runner.until_done().content if block.type == "text"] == ["5 and 9"]


def test_models(client: Anthropic) -> None:
    (model,) = client.models.list()
    assert model.id and model.display_name


def test_errors_have_their_classes(client: Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match=r"thinking\.type") as refused:
        client.messages.create(
            model=MODEL, max_tokens=2000, messages=user("hi"), thinking={"type": "enabled", "budget_tokens": 1024}
        )
    assert refused.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="another").messages.create(model=MODEL, max_tokens=8, messages=user("hi"))
    with pytest.raises(anthropic.NotFoundError):
        client.get("/v1/nothing", cast_to=object)


def test_errors_of_the_backend_have_their_classes(client: Anthropic, scripted: None) -> None:
    for status, error in ((429, anthropic.RateLimitError), (503, anthropic.InternalServerError)):
        with pytest.raises(error):
            client.messages.create(model=MODEL, max_tokens=8, messages=user(f"fail {status}"))
