"""An episode, as the agent that plays it sees it. The standard library alone.

agent ── chat, generate ──► the run's gateway          by HTTP, as every client of OpenAI's API
  └──── reward, log, sandbox ──► the environment's process (the `channel`: sluice/agents/worker.py)
"""

from __future__ import annotations

import asyncio
import json
import math
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

STOP_REASONS = (
    *("completed", "max_turns", "max_tokens", "context_overflow", "parse_error", "tool_failed", "timeout", "cancelled"),
)


class InfrastructureError(Exception):
    """Raise it for a failure that the agent did not cause: the episode is played again, from the same seed."""


class DataError(Exception):
    """Raise it for a faulty task: the episode is left out, and the task's row is reported."""


class PolicyRefused(Exception):
    """The gateway refused a call. `status`: of HTTP; `code`: "context_length_exceeded" if the conversation is too long."""

    def __init__(self, status: int, message: str, code: str = ""):
        super().__init__(f"{status}: {message}")
        self.status, self.code = status, code


class EpisodeBranch:
    """A part of the episode, such as a sub-agent's: conversations of its own, which are rewarded by the branch's name."""

    def __init__(self, episode: Episode, name: str):
        self.name, self._episode = name, episode
        self.base_url = f"{episode.root}/branches/{name}/v1"
        self.api_key = episode.api_key

    def reward(self, value: float) -> None:
        """Reward the newest completion of this branch, besides the episode."""
        self._episode.notify(reward=finite(value), branch=self.name)

    async def chat(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> dict[str, Any]:
        """Return the policy's reply in this branch; see `Episode.chat`."""
        return await self._episode.chat(messages, base_url=self.base_url, **fields)


class Episode:
    """`data`: the task, a row of the data. `base_url` (which ends in /v1) and `api_key`: for a client of OpenAI's API; a client
    of Anthropic's takes the URL without /v1, `root`. `seed`: in [0, 2^63), the same when the episode is played again.
    `purpose`: "train" or "evaluate"."""

    def __init__(self, fields: Mapping[str, Any], channel: Any, tools: Any = None):
        """Create the episode. `fields`: from the environment's process. `tools`: of the agent, a Toolset."""
        self.id: str = fields["id"]
        self.data: dict[str, Any] = fields["task"]
        self.root: str = fields["base_url"]
        self.base_url, self.api_key = f"{self.root}/v1", str(fields["api_key"])
        self.seed, self.purpose = int(fields["seed"]), str(fields["purpose"])
        self.tools = tools
        self.stop_reason = ""
        """One of STOP_REASONS: an agent may set why it ended. Empty: completed."""
        self.rewarded = False
        self._call_seconds, self._channel = float(fields["call_seconds"]), channel

    def notify(self, **news: Any) -> None:
        self._channel.notify(self.id, **news)

    def reward(self, value: float, turn: int | str | None = None) -> None:
        """Reward the episode, or one turn of it: the number of the policy's reply, from 0, or its completion id. Raises
        ValueError if `value` is no finite number."""
        self.rewarded = True
        of = {} if turn is None else {"completion_id" if isinstance(turn, str) else "turn": turn}
        self.notify(reward=finite(value), **of)

    def log(self, **numbers: float) -> None:
        """Log figures of this episode. Their means over a step's episodes are metrics of the run."""
        self.notify(log={name: finite(value) for name, value in numbers.items()})

    def branch(self, name: str) -> EpisodeBranch:
        """Return a branch with a URL of its own, for a sub-agent. Raises ValueError if the name is no identifier."""
        if not name.replace("-", "_").isidentifier():
            raise ValueError(f"branch: {name!r} must consist of letters, digits, _ and -")
        return EpisodeBranch(self, name)

    def sandbox(self, spec: Mapping[str, Any] | None = None) -> SandboxHandle:
        """Return a sandbox, for `async with`. `spec`: stricter keys of `services.environment.NAME.sandbox`."""
        return SandboxHandle(self._channel, self.id, dict(spec or {}))

    async def chat(self, messages: Sequence[Mapping[str, Any]], *, base_url: str = "", **fields: Any) -> dict[str, Any]:
        """Return the policy's reply as a message of OpenAI's API, with its completion id as "id". `fields`: of the request,
        such as `tools`. Raises PolicyRefused."""
        body = {"model": "policy", "messages": [_said(message) for message in messages], **fields}
        answer = await asyncio.to_thread(self._post, (base_url or self.base_url) + "/chat/completions", body)
        choice = answer["choices"][0]
        return {**choice["message"], "id": answer["id"], "finish_reason": choice["finish_reason"]}

    async def generate(self, ids: Sequence[int], **sampling: Any) -> list[int]:
        """Return the token ids that the policy generates after `ids`. Raises PolicyRefused."""
        body = {"token_ids": list(ids), "sampling_params": sampling}
        answer = await asyncio.to_thread(self._post, self.root + "/inference/v1/generate", body)
        found: list[int] = answer["choices"][0]["token_ids"]
        return found

    def _post(self, url: str, body: Mapping[str, Any]) -> Any:
        head = {"Authorization": f"Bearer {self.api_key}", "Content-Type": "application/json"}
        request = urllib.request.Request(url, json.dumps(body).encode(), head)
        try:
            with urllib.request.urlopen(request, timeout=self._call_seconds) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            try:
                failure = json.loads(text)["error"]
            except (ValueError, KeyError, TypeError):
                failure = {"message": text}
            raise PolicyRefused(error.code, str(failure.get("message")), str(failure.get("code") or "")) from None
        except OSError as error:  # refused, broken off, or not answered in time
            raise InfrastructureError(f"{url}: {error}") from None


class SandboxHandle:
    """A sandbox with a folder of its own, which runs commands one after the other."""

    def __init__(self, channel: Any, episode: str, spec: dict[str, Any]):
        self._channel, self._episode, self._spec = channel, episode, spec
        self._name = ""

    async def __aenter__(self) -> SandboxHandle:
        self._name = await self._channel.ask(self._episode, "sandbox_open", spec=self._spec)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._channel.ask(self._episode, "sandbox_close", name=self._name)

    async def run(self, *command: str, stdin: str = "", timeout: float | None = None) -> dict[str, Any]:
        """Run a command. Returns `{"code", "stdout", "stderr", "reason"}`: `reason` is empty, or the limit that ended the
        command. `timeout`: seconds; None: the sandbox's."""
        given = {"name": self._name, "command": list(command), "stdin": stdin, "timeout": timeout}
        found: dict[str, Any] = await self._channel.ask(self._episode, "sandbox_run", **given)
        return found


def _said(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message without what `chat` added to the policy's reply."""
    return {name: value for name, value in message.items() if name not in ("id", "finish_reason")}


def finite(value: Any) -> float:
    """Return `value` as a float. Raises ValueError if it is no finite number."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{value!r} is not a number") from None
    if not math.isfinite(number):
        raise ValueError(f"{number} is not a finite number")
    return number
