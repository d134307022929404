"""Agents that know nothing of training: openai-agents and mini-swe-agent, with nothing but base URL and key changed."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest
from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, RunConfig, Runner, function_tool
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel
from openai import AsyncOpenAI

from tests.agents.conftest import Episode

SUMS = """Use the tool.
think which numbers
say adding
call add {"a": 2, "b": 3}
call add {"a": 4, "b": 5}
---
say 5 and 9"""
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


def test_mini_swe_agent(episode: Episode, tmp_path: Any, scripted: None) -> None:
    model = LitellmModel(
        model_name="openai/policy",
        model_kwargs={"api_base": f"{episode.url}/v1", "api_key": episode.key},
        cost_tracking="ignore_errors",
    )
    templates = {"system_template": "You use a shell.", "instance_template": "{{task}}"}
    agent = DefaultAgent(model, LocalEnvironment(cwd=str(tmp_path), env=dict(os.environ)), step_limit=4, **templates)
    info = agent.run(TASK)
    assert (info["exit_status"], info["submission"].strip()) == ("Submitted", "hello")
    observations = [message["content"] for message in agent.messages if message["role"] == "tool"]
    assert "hello-42" in observations[0]


def test_mini_swe_agent_by_anthropics_api(episode: Episode, tmp_path: Any, scripted: None) -> None:
    model = LitellmModel(
        model_name="anthropic/policy",
        model_kwargs={"api_base": episode.url, "api_key": episode.key},
        cost_tracking="ignore_errors",
    )
    templates = {"system_template": "You use a shell.", "instance_template": "{{task}}"}
    agent = DefaultAgent(model, LocalEnvironment(cwd=str(tmp_path)), step_limit=4, **templates)
    assert agent.run(TASK)["exit_status"] == "Submitted"
