"""A taskset or environment of the package verifiers (its API of version 0.4, `verifiers.v1`) as an agent."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Mapping
from typing import Any

import verifiers.v1 as vf
from mcp_tools import McpServer
from verifiers.v1.dialects.chat import message_to_wire

from sluice.agents.conversation import Conversation, system_messages
from sluice.agents.episode import DataError, Episode, InfrastructureError, PolicyRefused
from sluice.agents.functions import Toolset, with_tools

HARNESS = "sluice_chat"  # by which verifiers finds the harness of this file
TURNS = 1 << 30  # verifiers counts them itself: `max_turns` of an agent's config


class VerifiersTaskset:
    """`VerifiersTaskset("my-taskset", agent={"max_turns": 4})`: the row's `task` is the task's number in the taskset, from 0.

    The first is its name, as of an installed package. `config`: sections of its environment, `taskset` among them. An agent of
    the environment whose harness is not named, here or by the taskset, talks to the policy from this process, with the tools of
    the task; its `runtime` is "subprocess" unless another is named. Rewards are verifiers' own, with their weights; metrics are
    logged.
    """

    def __init__(self, name: str, /, **config: Any):
        """Raises what verifiers does for the configuration."""
        sys.modules.setdefault(HARNESS, harness_module())
        fields = vf.env_config_type(name).model_fields
        roles = [role for role, field in fields.items() if isinstance(field.default, vf.AgentConfig)]
        own = {"harness": {"id": HARNESS}} if vf.default_harness_id(name) == "bash" else {}
        agents = {role: {"runtime": {"type": "subprocess"}, **own, **config.get(role, {})} for role in roles}
        config = {**config, **agents, "taskset": {**config.get("taskset", {}), "id": name}}
        self._config = vf.resolve_env_config(config)
        self._ahead = iter(vf.load_environment(self._config).taskset)
        self._tasks: list[Any] = []

    async def run(self, data: dict[str, Any], *, episode: Episode, **_: Any) -> float | None:
        environment, task, name = vf.load_environment(self._config), self._task(data), f"SLUICE_KEY_{episode.id}"
        os.environ[name] = episode.api_key  # where verifiers looks for it, before the first call
        try:
            client = vf.EvalClientConfig(base_url=episode.base_url, api_key_var=name)
            async with environment.serving():
                done = await environment.run_episode(task, vf.ModelContext(model="policy", client=client))
        finally:
            del os.environ[name]
        for trace in done.traces:
            episode.log(**{name: value for name, value in trace.metrics.items() if value is not None})
        return self._earned(done, episode)

    def _task(self, data: Mapping[str, Any]) -> Any:
        """Raises DataError."""
        number = data.get("task")
        if not isinstance(number, int) or number < 0:
            raise DataError(f"task: {number!r} is no number of a task, from 0")
        while len(self._tasks) <= number:
            if (task := next(self._ahead, None)) is None:
                raise DataError(f"task: the taskset has {len(self._tasks)} tasks, and no number {number}")
            self._tasks.append(task)
        return self._tasks[number]

    def _earned(self, done: Any, episode: Episode) -> float | None:
        """The sum over the agents. Raises InfrastructureError for what is not the policy's doing."""
        errors = [error for part in (done, *done.traces) for error in part.errors]
        if any("context_length_exceeded" in error.message for error in errors):
            episode.stop_reason = "context_overflow"
        elif errors:
            raise InfrastructureError(f"verifiers: {errors[-1].type}: {errors[-1].message}")
        elif any(trace.stop_condition == "max_turns" for trace in done.traces):
            episode.stop_reason = "max_turns"
        known = [reward for trace in done.traces for reward in trace.rewards.values() if reward is not None]
        return sum(reward.value for reward in known) if known else 0.0


class _NoChannel:
    """The channel of an episode that verifiers judges: nothing is reported."""

    def notify(self, episode: str, **news: Any) -> None:
        pass

    async def ask(self, episode: str, what: str, **fields: Any) -> Any:
        raise InfrastructureError(f"{what}: there is none within verifiers")


def harness_module() -> types.ModuleType:
    """What verifiers imports by the name HARNESS."""

    class ChatHarness(vf.Harness[vf.HarnessConfig]):
        """Asks the policy until it answers without a call of a tool, in this process, by way of verifiers' own server."""

        APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = SUPPORTS_RESUME = True
        EXECUTES_CODE = NEEDS_CONTAINER = False

        async def launch(
            self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Mapping[str, str], data: Any
        ) -> Any:
            system, prompt = self.resolve_prompt(data)
            said = (
                [{"role": "user", "content": prompt}]
                if isinstance(prompt, str)
                else [message_to_wire(each) for each in prompt or ()]
            )
            tools = Toolset([McpServer(url) for url in mcp_urls.values()] if mcp_urls else (), self.config.tool_timeout)
            fields = {"id": trace.id, "task": {}, "base_url": endpoint.removesuffix("/v1"), "api_key": secret, "seed": 0}
            policy = Episode({**fields, "purpose": "", "call_seconds": self.config.tool_timeout}, _NoChannel())
            try:
                await tools.open()
                await with_tools(Conversation(policy, [*system_messages(system or ""), *said]), tools, TURNS)
            except PolicyRefused:
                if trace.stop_condition is None:  # else verifiers refused a turn, and knows why
                    raise
            finally:
                await tools.close()
            return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    module = types.ModuleType(HARNESS)
    module.ChatHarness, module.__all__ = ChatHarness, ["ChatHarness"]
    return module
