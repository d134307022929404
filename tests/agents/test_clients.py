"""OpenAI's and Anthropic's Python packages, and agents, with nothing but their base URL and key changed."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import anthropic
import openai
import pytest
from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, RunConfig, Runner, function_tool
from anthropic import Anthropic
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel
from openai import AsyncOpenAI, OpenAI
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


def test_a_stream_says_what_the_whole_answer_does(client: OpenAI, scripted: None) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=user("say one two\nsay three"))
    with client.chat.completions.stream(model=MODEL, messages=user("say one two\nsay three")) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == final.choices[0].message.content == whole.choices[0].message.content == "one two\nthree"
    assert len(deltas) > 1
    assert final.choices[0].finish_reason == "stop"


def test_a_stream_tells_of_its_tokens_and_its_replies(client: OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=user("say a b"), n=2, max_tokens=4, stream=True, stream_options={"include_usage": True}
        )
    )
    assert len({chunk.id for chunk in chunks}) == 1
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    ends = {choice.index: choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason}
    assert ends.keys() == {0, 1} and set(ends.values()) <= {"stop", "length"}


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


def test_parallel_tools(client: OpenAI, scripted: None) -> None:
    messages: list[Any] = user(SUMS)
    first = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
    messages += parallel(first)
    assert [message["content"] for message in messages[2:]] == ["5", "9"]
    second = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
    assert second.choices[0].message.content == "5 and 9" and second.choices[0].message.tool_calls is None


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


def test_responses_with_tools_by_hand(client: OpenAI, scripted: None) -> None:
    conversation: list[Any] = [{"role": "user", "content": SUMS}]
    first = client.responses.create(model=MODEL, input=conversation, tools=RESPONSES_TOOLS, instructions="Add.")
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "function_call"]
    assert first.output_text == "adding"
    conversation += [item.to_dict() for item in first.output]
    for item in first.output:
        if item.type == "function_call":
            given = json.loads(item.arguments)
            output = str(given["a"] + given["b"])
            conversation.append({"type": "function_call_output", "call_id": item.call_id, "output": output})
    second = client.responses.create(model=MODEL, input=conversation, tools=RESPONSES_TOOLS, instructions="Add.")
    assert (second.output_text, second.status) == ("5 and 9", "completed")
    assert second.usage is not None and second.usage.total_tokens == second.usage.input_tokens + second.usage.output_tokens


def test_a_response_goes_on_with_a_former_one(client: OpenAI) -> None:
    first = client.responses.create(model=MODEL, input="say one", max_output_tokens=8)
    second = client.responses.create(model=MODEL, input="say two", previous_response_id=first.id, max_output_tokens=8)
    assert second.previous_response_id == first.id
    assert first.usage is not None and second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens  # it has the first one's conversation before its own
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model=MODEL, input="say two", previous_response_id="resp_of_nobody")


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


def test_a_response_that_is_too_long_is_incomplete(client: OpenAI) -> None:
    events = list(client.responses.create(model=MODEL, input="say one two three four", max_output_tokens=2, stream=True))
    assert (events[0].type, events[-1].type) == ("response.created", "response.incomplete")
    assert events[-1].response.incomplete_details.reason == "max_output_tokens"  # type: ignore[union-attr]


def test_completions(client: OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt="say one two", max_tokens=2, logprobs=0)
    assert whole.choices[0].logprobs is not None and len(whole.choices[0].logprobs.token_logprobs or []) <= 2
    assert client.completions.create(model=MODEL, prompt=[3, 1, 2], max_tokens=2).usage.prompt_tokens == 3  # type: ignore
    chunks = list(client.completions.create(model=MODEL, prompt="say one two", max_tokens=4, stream=True))
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")


def test_models(client: OpenAI) -> None:
    (model,) = client.models.list()
    assert model.id


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


def test_errors_of_the_backend_have_their_classes(client: OpenAI, scripted: None) -> None:
    for status, error in ((429, openai.RateLimitError), (503, openai.InternalServerError), (500, openai.InternalServerError)):
        with pytest.raises(error):
            client.chat.completions.create(model=MODEL, messages=user(f"fail {status}"))
    with pytest.raises(openai.RateLimitError):
        client.chat.completions.create(model=MODEL, messages=user("fail 429"), stream=True)
    with pytest.raises(openai.APIStatusError) as large:
        client.chat.completions.create(model=MODEL, messages=user("x" * (2 << 20)))
    assert large.value.status_code == 413


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


def test_tools_and_their_results(claude: Anthropic, scripted: None) -> None:
    messages = user(SUMS)
    first = claude.messages.create(
        model=MODEL, max_tokens=64, messages=messages, tools=ANTHROPIC_TOOLS, tool_choice={"type": "any"}
    )
    results: list[Any] = []
    for block in first.content:
        if block.type == "tool_use":
            content = str(int(block.input["a"]) + int(block.input["b"]))  # type: ignore[arg-type,call-overload]
            results.append({"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": content}]})
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    second = claude.messages.create(model=MODEL, max_tokens=64, messages=messages, tools=ANTHROPIC_TOOLS)
    assert [block.text for block in second.content if block.type == "text"] == ["5 and 9"]
    assert second.stop_reason == "end_turn"


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


# ---- Agents that know nothing of training

QUIET = RunConfig(tracing_disabled=True)


@function_tool
def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


@pytest.mark.parametrize("model", [OpenAIChatCompletionsModel, OpenAIResponsesModel])
@pytest.mark.parametrize("streamed", [False, True])
def test_openai_agents(episode: Episode, model: Any, streamed: bool, scripted: None) -> None:
    async def run() -> tuple[str, list[Any]]:
        async with AsyncOpenAI(base_url=f"{episode.url}/v1", api_key=episode.key, max_retries=0) as client:
            agent = Agent(name="Adder", instructions="Add.", model=model("gpt-4o", client), tools=[add])
            if not streamed:
                result: Any = await Runner.run(agent, SUMS, run_config=QUIET)
            else:
                result = Runner.run_streamed(agent, SUMS, run_config=QUIET)
                async for _ in result.stream_events():
                    pass
            return result.final_output, result.new_items

    final, items = asyncio.run(run())
    assert final == "5 and 9"
    assert [item.output for item in items if item.type == "tool_call_output_item"] == ["5", "9"]


TASK = """Say hello.
think where am I
say I look first.
call bash {"command": "echo hello-$((40 + 2))"}
---
say Done.
call bash {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo hello"}"""


@pytest.mark.parametrize(("name", "path"), [("openai/policy", "/v1"), ("anthropic/policy", "")])
def test_mini_swe_agent(episode: Episode, tmp_path: Any, scripted: None, name: str, path: str) -> None:
    own: Any = {"model_kwargs": {"api_base": episode.url + path, "api_key": episode.key}, "cost_tracking": "ignore_errors"}
    templates = {"system_template": "You use a shell.", "instance_template": "{{task}}"}
    environment = LocalEnvironment(cwd=str(tmp_path), env=dict(os.environ))
    agent = DefaultAgent(LitellmModel(model_name=name, **own), environment, step_limit=4, **templates)
    info = agent.run(TASK)
    assert (info["exit_status"], info["submission"].strip()) == ("Submitted", "hello")
    if path:
        observations = [message["content"] for message in agent.messages if message["role"] == "tool"]
        assert "hello-42" in observations[0]
