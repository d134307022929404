"""OpenAI's and Anthropic's Python packages, with nothing but their base URL and key changed."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest
from anthropic import Anthropic
from openai import OpenAI
from openai.types.chat import ChatCompletion

from tests.agents.conftest import Episode

MODEL = "gpt-6"  # one model is served, by whatever name
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
ADD = {"name": "add", "description": "Adds two numbers.", "parameters": SCHEMA}
TOOLS: list[Any] = [{"type": "function", "function": ADD}]
RESPONSES_TOOLS: list[Any] = [{"type": "function", "strict": True, **ADD}]
ANTHROPIC_TOOLS: list[Any] = [{"name": "add", "description": "Adds two numbers.", "input_schema": SCHEMA}]
SUMS = """Use the tool.
think which numbers
say adding
call add {"a": 2, "b": 3}
call add {"a": 4, "b": 5}
---
say 5 and 9"""


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


# ---- OpenAI's package


@pytest.fixture
def client(episode: Episode) -> OpenAI:
    return OpenAI(base_url=f"{episode.url}/v1", api_key=episode.key, max_retries=0)


def parallel(answer: ChatCompletion) -> list[dict[str, Any]]:
    """The messages behind the answer: itself, as the client has it, and its calls' results."""
    message = answer.choices[0].message
    assert message.tool_calls is not None and answer.choices[0].finish_reason == "tool_calls"
    results = []
    for call in message.tool_calls:
        assert call.type == "function"
        given = json.loads(call.function.arguments)
        results.append({"role": "tool", "tool_call_id": call.id, "content": str(given["a"] + given["b"])})
    assert len({result["tool_call_id"] for result in results}) == len(results)
    return [message.to_dict(), *results]


def test_streamed_tools(client: OpenAI, scripted: None) -> None:
    with client.chat.completions.stream(model=MODEL, messages=user(SUMS), tools=TOOLS) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        streamed = stream.get_final_completion()
    assert [event.arguments for event in done] == ['{"a": 2, "b": 3}', '{"a": 4, "b": 5}']
    whole = client.chat.completions.create(model=MODEL, messages=user(SUMS), tools=TOOLS)
    ours, theirs = parallel(streamed), parallel(whole)  # type: ignore[arg-type]
    assert ours[1:] == theirs[1:]
    assert [one["content"] for one in (ours[0], theirs[0])] == ["adding"] * 2
    assert [one["reasoning_content"] for one in (ours[0], theirs[0])] == ["which numbers"] * 2


def test_streamed_responses(client: OpenAI, scripted: None) -> None:
    with client.responses.stream(model=MODEL, input=SUMS, tools=RESPONSES_TOOLS) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "adding"
    arguments = [event.arguments for event in events if event.type == "response.function_call_arguments.done"]
    assert arguments == ['{"a": 2, "b": 3}', '{"a": 4, "b": 5}']
    assert sorted(item.type for item in final.output) == ["function_call", "function_call", "message", "reasoning"]
    assert final.output_text == "adding"
    with client.responses.stream(model=MODEL, previous_response_id=final.id, input="say five") as stream:
        assert stream.get_final_response().output_text == "five"


def test_completions(client: OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt="say one two", max_tokens=2, logprobs=0)
    assert whole.choices[0].logprobs is not None and len(whole.choices[0].logprobs.token_logprobs or []) <= 2
    assert client.completions.create(model=MODEL, prompt=[3, 1, 2], max_tokens=2).usage.prompt_tokens == 3  # type: ignore
    chunks = list(client.completions.create(model=MODEL, prompt="say one two", max_tokens=4, stream=True))
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")


def test_errors_have_their_classes(client: OpenAI, episode: Episode) -> None:
    with pytest.raises(openai.BadRequestError, match="frequency_penalty") as refused:
        client.chat.completions.create(model=MODEL, messages=user("hi"), frequency_penalty=1.5)
    assert (refused.value.param, refused.value.type) == ("frequency_penalty", "invalid_request_error")
    with pytest.raises(openai.BadRequestError, match="no vision"):
        image: Any = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": image}])
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="another").chat.completions.create(model=MODEL, messages=user("hi"))
    with pytest.raises(openai.NotFoundError):
        client.with_options(base_url=episode.url + "0/v1").chat.completions.create(model=MODEL, messages=user("hi"))
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model=MODEL, messages=user("word " * 100_000))
    assert long.value.code == "context_length_exceeded"


# ---- Anthropic's package


@pytest.fixture
def claude(episode: Episode) -> Anthropic:
    return Anthropic(base_url=episode.url, api_key=episode.key, max_retries=0)


def test_a_stop_sequence(claude: Anthropic, scripted: None) -> None:
    message = claude.messages.create(model=MODEL, max_tokens=8, stop_sequences=["three"], messages=user("say one two three"))
    assert (message.stop_reason, message.stop_sequence, message.content[0].text) == (  # type: ignore[union-attr]
        "stop_sequence",
        "three",
        "one two ",
    )


def test_a_stream_of_anthropics_says_what_the_whole_answer_does(claude: Anthropic, scripted: None) -> None:
    with claude.messages.stream(model=MODEL, max_tokens=64, messages=user(SUMS), tools=ANTHROPIC_TOOLS) as stream:
        texts = list(stream.text_stream)
        streamed = stream.get_final_message()
    whole = claude.messages.create(model=MODEL, max_tokens=64, messages=user(SUMS), tools=ANTHROPIC_TOOLS)
    assert "".join(texts) == "adding"
    kinds = [block.type for block in streamed.content]
    assert sorted(kinds) == sorted(block.type for block in whole.content) == ["text", "thinking", "tool_use", "tool_use"]
    calls = [[block.input for block in message.content if block.type == "tool_use"] for message in (streamed, whole)]
    assert calls == [[{"a": 2, "b": 3}, {"a": 4, "b": 5}]] * 2
    assert streamed.stop_reason == whole.stop_reason == "tool_use"
    assert streamed.usage.input_tokens == whole.usage.input_tokens


def test_the_tool_runner(claude: Anthropic, scripted: None) -> None:
    @anthropic.beta_tool
    def add(a: int, b: int) -> str:
        """Adds two numbers.

        Args:
            a: one
            b: another
        """
        return str(a + b)

    runner = claude.beta.messages.tool_runner(model=MODEL, max_tokens=64, tools=[add], messages=user(SUMS))  # type: ignore
    assert [block.text for block in runner.until_done().content if block.type == "text"] == ["5 and 9"]


def test_models_of_anthropics(claude: Anthropic) -> None:
    (model,) = claude.models.list()
    assert model.id and model.display_name


def test_errors_of_anthropics_have_their_classes(claude: Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match=r"thinking\.type") as refused:
        claude.messages.create(
            model=MODEL, max_tokens=2000, messages=user("hi"), thinking={"type": "enabled", "budget_tokens": 1024}
        )
    assert refused.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    with pytest.raises(anthropic.AuthenticationError):
        claude.with_options(api_key="another").messages.create(model=MODEL, max_tokens=8, messages=user("hi"))
    with pytest.raises(anthropic.NotFoundError):
        claude.get("/v1/nothing", cast_to=object)
