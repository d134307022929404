"""A run whose tasks are played by programs that know nothing of training, with nothing but base URL and key changed.

A program plays the two episodes of a group, and the step that follows has to be trained on what the program was told. The model
writes calls of the one tool, and bytes that are seldom UTF-8: their text, encoded again, is other tokens (tool_model.py).
"""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
)
from anthropic import Anthropic
from minisweagent.agents.default import DefaultAgent
from minisweagent.config import get_config_from_spec
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel
from openai import AsyncOpenAI, OpenAI

from tests.agents.conftest import PATIENCE, PYTHON, ROOT, Episode, posted
from tests.system.runs import START, Live, check_gone, sluice, started, steps, write_config

pytestmark = pytest.mark.timeout(400)

REWARDS = (0.0, 1.0)  # of a group's episodes
MODEL = "gpt-6"  # one model is served, by whatever name
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
BASH: dict[str, Any] = {"name": "bash", "description": "Runs a command.", "parameters": SCHEMA}


class Turn(NamedTuple):
    """A reply as its program was told of it. `prompt`: tokens that the model was given. `calls`: of tools."""

    prompt: int
    reply: int
    calls: int
    logprobs: list[float] | None = None


class Played(NamedTuple):
    """An episode as its program knows it: its turns, and the branches of its history."""

    turns: list[Turn]
    branches: int = 1


class TrainingRun:
    """Steps have one group, and are trained in the order in which groups are played."""

    def __init__(self, live: Live, url: str, key: str):
        self.live, self.url, self.key = live, url, key
        self.groups = 0  # that were begun

    def begin(self) -> dict[str, Any]:
        """The next task's episode, which there is once the step before is done."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                begun: dict[str, Any] = posted(self.url, "/v1/episodes", {"wait": 60}, self.key)
            except urllib.error.HTTPError as refused:
                with refused:
                    if refused.code != HTTPStatus.TOO_MANY_REQUESTS or time.monotonic() > deadline:
                        raise
            else:
                return begun

    def play(self, program: Callable[[Episode, str], Played]) -> list[Played]:
        """The episodes of the next group, the last of which is rewarded; they end, whatever becomes of the program."""
        group = [self.begin() for _ in REWARDS]
        self.groups += 1
        try:
            return [
                program(Episode(self.url + each["base"], each["key"], each["id"]), each["task"]["messages"][0]["content"])
                for each in group
            ]
        finally:
            for each, reward in zip(group, REWARDS, strict=True):
                posted(self.url, f"/v1/episodes/{each['id']}/reward", {"reward": reward}, each["key"])
                posted(self.url, f"/v1/episodes/{each['id']}/end", {"stop_reason": "completed"}, each["key"])

    def trained(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The step of the newest group: its metrics, and its episodes by the ledger."""
        step = self.groups
        self.live.reaches(step, PATIENCE)
        (point,) = [point for point in steps(self.live.folder) if point["step"] == step]
        command = [str(PYTHON), "-m", "tests.agents.ledger_turns", str(self.live.folder), str(step)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=True)
        return point, json.loads(done.stdout)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingRun]:
    folder = tmp_path_factory.mktemp("training")
    model = folder / "tiny"
    subprocess.run([str(PYTHON), "-m", "tests.agents.tool_model", str(model)], cwd=ROOT, timeout=START, check=True)
    config = write_config(
        folder / "config.yaml",
        model,
        data={"max_prompt_tokens": 32},
        sampling={"group_size": 2, "max_new_tokens": 32},
        rewards={"rules": []},
        gateway={"context": 16384},
        algorithm={"kl_coefficient": 0.0},
        training={"steps": 1000, "groups_per_step": 1, "staleness": 0, "max_tokens_per_microbatch": 32768},
        services={"rollout": {"replicas": 1, "max_num_seqs": 4}},
    )
    with started(config, folder=folder / "run", python=PYTHON) as live:
        live.says("training", START)
        told = sluice("status", str(live.folder), "--gateway", python=PYTHON).stdout.split()
        url, key = (line.partition("=")[2] for line in told if "=" in line)
        yield TrainingRun(live, url, key)
        live.interrupt()
        assert live.wait(START) == 0, live.output + live.errors
        check_gone(live.folder)


# ----------------------------------------------------------------------------------------------------------------------
# openai


def chat_turns(answer: Any) -> list[Turn]:
    """Of all its choices."""
    turns = []
    for choice in answer.choices:
        logprobs = [token.logprob for token in choice.logprobs.content]
        turns.append(Turn(answer.usage.prompt_tokens, len(logprobs), len(choice.message.tool_calls or ()), logprobs))
    assert answer.usage.completion_tokens == sum(turn.reply for turn in turns)
    return turns


def behind(message: Any) -> list[Any]:
    """The answer as the client has it, and the results of its calls."""
    results = [{"role": "tool", "tool_call_id": call.id, "content": "42"} for call in message.tool_calls or ()]
    return [message, *(results or [{"role": "user", "content": "Go on."}])]


CHAT_TOOLS: list[Any] = [{"type": "function", "function": BASH}]
CHOICES: list[Any] = [{"type": "function", "function": {"name": "bash"}}, "required", "auto"]


def openai_whole(episode: Episode, question: str) -> Played:
    """The last turn has two replies."""
    client = OpenAI(base_url=f"{episode.url}/v1", api_key=episode.key, max_retries=0, timeout=PATIENCE)
    messages: list[Any] = [{"role": "system", "content": "Add."}, {"role": "user", "content": question}]
    turns = list[Turn]()
    for number, choice in enumerate(CHOICES):
        answer = client.chat.completions.create(
            model=MODEL,
            messages=messages,
            tools=CHAT_TOOLS,
            tool_choice=choice,
            parallel_tool_calls=number > 0,
            logprobs=True,
            n=2 if number == 2 else 1,
        )
        turns += chat_turns(answer)
        messages += behind(answer.choices[0].message)
    return Played(turns, branches=2)


def openai_streamed(episode: Episode, question: str) -> Played:
    client = OpenAI(base_url=f"{episode.url}/v1", api_key=episode.key, max_retries=0, timeout=PATIENCE)
    messages: list[Any] = [{"role": "user", "content": question}]
    turns = list[Turn]()
    for choice in CHOICES:
        with client.chat.completions.stream(
            model=MODEL,
            messages=messages,
            tools=CHAT_TOOLS,
            tool_choice=choice,
            logprobs=True,
            stream_options={"include_usage": True},
        ) as stream:
            answer = stream.get_final_completion()
        turns += chat_turns(answer)
        messages += behind(answer.choices[0].message)
    return Played(turns)


def openai_async(episode: Episode, question: str) -> Played:
    """Two conversations at once, one of which is written over at its end."""

    async def converse(client: AsyncOpenAI, texts: list[str]) -> list[Turn]:
        messages, turns = list[Any](), list[Turn]()
        for text in texts:
            messages.append({"role": "user", "content": text})
            answer = await client.chat.completions.create(model=MODEL, messages=messages, logprobs=True)
            turns += chat_turns(answer)
            messages.append(answer.choices[0].message)
        messages[-2:] = [{"role": "user", "content": "Or rather?"}]
        turns += chat_turns(await client.chat.completions.create(model=MODEL, messages=messages, logprobs=True))
        return turns

    async def both() -> list[Turn]:
        async with AsyncOpenAI(base_url=f"{episode.url}/v1", api_key=episode.key, max_retries=0, timeout=PATIENCE) as client:
            found = await asyncio.gather(converse(client, [question, "And then?"]), converse(client, ["Why?", "And then?"]))
            return [turn for turns in found for turn in turns]

    return Played(asyncio.run(both()), branches=4)


def openai_responses(episode: Episode, question: str) -> Played:
    """Whole, by a former response; streamed, by the conversation."""
    client = OpenAI(base_url=f"{episode.url}/v1", api_key=episode.key, max_retries=0, timeout=PATIENCE)
    tools: Any = [{"type": "function", "strict": True, **BASH}]

    def turn(answer: Any) -> Turn:
        calls = sum(item.type == "function_call" for item in answer.output)
        return Turn(answer.usage.input_tokens, answer.usage.output_tokens, calls)

    def results(answer: Any) -> list[Any]:
        calls = [item for item in answer.output if item.type == "function_call"]
        outputs = [{"type": "function_call_output", "call_id": call.call_id, "output": "42"} for call in calls]
        return outputs or [{"role": "user", "content": "Go on."}]

    conversation: list[Any] = [{"role": "user", "content": question}]
    first = client.responses.create(
        model=MODEL, input=conversation, tools=tools, tool_choice={"type": "function", "name": "bash"}, instructions="Add."
    )
    second = client.responses.create(model=MODEL, input=results(first), tools=tools, previous_response_id=first.id)
    for answer in (first, second):
        conversation += [item.to_dict() for item in answer.output] + results(answer)
    with client.responses.stream(model=MODEL, input=conversation, tools=tools, instructions="Add.") as stream:
        third = stream.get_final_response()
    return Played([turn(first), turn(second), turn(third)])


# ----------------------------------------------------------------------------------------------------------------------
# anthropic


def anthropic(episode: Episode, question: str, streamed: bool) -> Played:
    client = Anthropic(base_url=episode.url, api_key=episode.key, max_retries=0, timeout=PATIENCE)
    tools: Any = [{"name": "bash", "description": "Runs a command.", "input_schema": SCHEMA}]
    messages: list[Any] = [{"role": "user", "content": question}]
    turns = list[Turn]()
    choices: list[Any] = [
        {"type": "tool", "name": "bash"},
        {"type": "any", "disable_parallel_tool_use": True},
        {"type": "auto"},
    ]
    for choice in choices:
        asked: Any = {"model": MODEL, "max_tokens": 24, "messages": messages, "tools": tools, "tool_choice": choice}
        if streamed:
            with client.messages.stream(**asked) as stream:
                message = stream.get_final_message()
        else:
            message = client.messages.create(**asked)
        calls = [block for block in message.content if block.type == "tool_use"]
        turns.append(Turn(message.usage.input_tokens, message.usage.output_tokens, len(calls)))
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": "42"} for call in calls]
        messages += [
            {"role": "assistant", "content": [block.to_dict() for block in message.content]},
            {"role": "user", "content": results or "Go on."},
        ]
    return Played(turns)


# ----------------------------------------------------------------------------------------------------------------------
# Agents


@function_tool
def bash(command: str) -> str:
    """Runs a command."""
    return "42"


def openai_agents(episode: Episode, question: str, model: Any, streamed: bool) -> Played:
    async def converse() -> list[Any]:
        async with AsyncOpenAI(base_url=f"{episode.url}/v1", api_key=episode.key, max_retries=0, timeout=PATIENCE) as client:
            settings = ModelSettings(tool_choice="required", include_usage=True)
            agent = Agent(name="Adder", instructions="Add.", model=model(MODEL, client), tools=[bash], model_settings=settings)
            options: Any = {"max_turns": 3, "run_config": RunConfig(tracing_disabled=True)}
            try:
                if not streamed:
                    return (await Runner.run(agent, question, **options)).raw_responses
                result = Runner.run_streamed(agent, question, **options)
                async for _ in result.stream_events():
                    pass
            except MaxTurnsExceeded as error:
                assert error.run_data is not None
                return error.run_data.raw_responses
            return result.raw_responses

    turns = []
    for response in asyncio.run(converse()):
        calls = sum(item.type == "function_call" for item in response.output)
        turns.append(Turn(response.usage.input_tokens, response.usage.output_tokens, calls))
    return Played(turns)


def mini_swe_agent(episode: Episode, question: str, name: str, path: str) -> Played:
    """With the prompts that it comes with. A reply without a call it leaves out of its history, which is a new branch."""
    config = get_config_from_spec("mini.yaml")
    own = config["model"] | {"cost_tracking": "ignore_errors"}
    own["model_kwargs"] |= {"api_base": episode.url + path, "api_key": episode.key, "timeout": PATIENCE}
    templates = {key: config["agent"][key] for key in ("system_template", "instance_template")}
    environment = LocalEnvironment(**config["environment"])
    agent = DefaultAgent(LitellmModel(model_name=name, **own), environment, step_limit=4, **templates)
    agent.run(question)
    turns, forks = list[Turn](), 0
    told = [message for message in agent.messages if "response" in message.get("extra", {})]
    assert len(told) == agent.n_calls
    for number, message in enumerate(told):
        response = message["extra"]["response"]
        calls = len(response["choices"][0]["message"]["tool_calls"] or ())
        turns.append(Turn(response["usage"]["prompt_tokens"], response["usage"]["completion_tokens"], calls))
        forks += not calls and number + 1 < len(told)
    return Played(turns, 1 + forks)


# ----------------------------------------------------------------------------------------------------------------------


PROGRAMS: dict[str, Callable[[Episode, str], Played]] = {
    "openai whole": openai_whole,
    "openai streamed": openai_streamed,
    "openai async": openai_async,
    "openai responses": openai_responses,
    "anthropic whole": partial(anthropic, streamed=False),
    "anthropic streamed": partial(anthropic, streamed=True),
    "agents chat": partial(openai_agents, model=OpenAIChatCompletionsModel, streamed=False),
    "agents chat streamed": partial(openai_agents, model=OpenAIChatCompletionsModel, streamed=True),
    "agents responses": partial(openai_agents, model=OpenAIResponsesModel, streamed=False),
    "agents responses streamed": partial(openai_agents, model=OpenAIResponsesModel, streamed=True),
    "mini-swe-agent chat": partial(mini_swe_agent, name="openai/policy", path="/v1"),
    "mini-swe-agent messages": partial(mini_swe_agent, name="anthropic/policy", path=""),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_step_is_trained_on_what_a_program_was_told(
    run: TrainingRun, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where agents work
    played = run.play(PROGRAMS[name])
    point, trained = run.trained()
    assert math.isfinite(point["actor/pg_loss"]) and point["actor/grad_norm"] > 0
    # The trainer computed each token's log-probability behind the tokens of its branch, and the rollout told it behind what it
    # was given. On-policy both have the same weights, and float32's rounding between them only if both had the same tokens.
    assert point["mismatch/abs_logprob"] < 1e-5 and point["mismatch/max"] < 1e-4
    for told, reward, each in zip(played, REWARDS, trained, strict=True):
        assert (each["reward"], each["branches"]) == (reward, told.branches)
        found = sorted((turn["prompt"], len(turn["logprobs"])) for turn in each["turns"])
        assert found == sorted((turn.prompt, turn.reply) for turn in told.turns)
        if told.turns[0].logprobs is not None:
            assert sorted(turn["logprobs"] for turn in each["turns"]) == sorted(turn.logprobs or [] for turn in told.turns)
    if name != "openai async":
        assert sum(turn.calls for each in played for turn in each.turns) > 0
