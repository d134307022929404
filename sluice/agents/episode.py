"""An episode, as the agent that plays it sees it. The standard library alone.

agent ── chat, generate ──► the run's gateway          by HTTP, as every client of OpenAI's API
  └──── reward, log, sandbox ──► the environment's process (`AgentChannel`)
"""

from __future__ import annotations

import asyncio
import json
import math
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

STOP_REASONS = (
    *("completed", "max_turns", "max_tokens", "context_overflow", "parse_error", "tool_failed", "timeout", "cancelled"),
)


class InfrastructureError(Exception):
    """Raise it where something failed that is not the agent's doing: the episode is played again, from the same seed."""


class DataError(Exception):
    """Raise it where the task itself is at fault: it is reported by its row, and left out."""


class PolicyRefused(Exception):
    """The gateway does not answer a call. `status`: of HTTP; `code`: "context_length_exceeded" where the conversation is too
    long."""

    def __init__(self, status: int, message: str, code: str = ""):
        super().__init__(f"{status}: {message}")
        self.status, self.code = status, code


class AgentChannel(Protocol):
    """To the process that has the episode played."""

    def tell(self, episode: str, **news: Any) -> None:
        """Nothing is answered."""

    async def ask(self, episode: str, what: str, **fields: Any) -> Any:
        """The answer. Raises InfrastructureError where there is none."""


class EpisodeBranch:
    """A part of the episode, such as a sub-agent's: conversations of its own, with a name by which they are rewarded."""

    def __init__(self, episode: Episode, name: str):
        self.name, self._episode = name, episode
        self.base_url = f"{episode.root}/branches/{name}/v1"
        self.api_key = episode.api_key

    def reward(self, value: float) -> None:
        """What this branch earned, besides what the episode did: of its newest completion."""
        self._episode.tell(reward=finite(value), branch=self.name)

    async def chat(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> dict[str, Any]:
        """As that of Episode."""
        return await self._episode.chat(messages, base_url=self.base_url, **fields)


class Episode:
    """`data`: the task, a row of the data. `base_url` (which ends in /v1) and `api_key`: for a client of OpenAI's API;
    Anthropic's wants the URL without /v1, `root`. `seed`: in [0, 2^63), the same when the episode is played
    again. `purpose`: "train" or "evaluate"."""

    def __init__(self, told: Mapping[str, Any], channel: AgentChannel, tools: Any = None):
        """`told`: what the environment's process says of it. `tools`: of the agent, a Toolset."""
        self.id: str = told["id"]
        self.data: dict[str, Any] = told["task"]
        self.root: str = told["base_url"]
        self.base_url, self.api_key = f"{self.root}/v1", str(told["api_key"])
        self.seed, self.purpose = int(told["seed"]), str(told["purpose"])
        self.tools = tools
        self.stop_reason = ""
        """One of STOP_REASONS, where the agent wants to say why it ended. Empty: completed."""
        self.rewarded = False
        self._call_seconds, self._channel = float(told["call_seconds"]), channel

    def tell(self, **news: Any) -> None:
        self._channel.tell(self.id, **news)

    def reward(self, value: float, turn: int | str | None = None) -> None:
        """What the episode earned; or one turn of it: the number of the policy's reply, from 0, or its completion id. Raises
        ValueError where it is no finite number."""
        self.rewarded = True
        self.tell(reward=finite(value), **({} if turn is None else {"turn": turn}))

    def log(self, **numbers: float) -> None:
        """Figures of this episode, whose mean over a step's episodes are metrics of the run."""
        self.tell(log={name: finite(value) for name, value in numbers.items()})

    def branch(self, name: str) -> EpisodeBranch:
        """A URL of its own for a sub-agent. Raises ValueError for a name that is no identifier."""
        if not name.replace("-", "_").isidentifier():
            raise ValueError(f"branch: {name!r} must consist of letters, digits, _ and -")
        return EpisodeBranch(self, name)

    def sandbox(self, spec: Mapping[str, Any] | None = None) -> SandboxHandle:
        """`async with episode.sandbox() as box:`. `spec`: keys of `services.environment.NAME.sandbox`, to be
        stricter."""
        return SandboxHandle(self._channel, self.id, dict(spec or {}))

    async def chat(self, messages: Sequence[Mapping[str, Any]], *, base_url: str = "", **fields: Any) -> dict[str, Any]:
        """The policy's reply as a message of OpenAI's API, with its completion id as "id". `fields`: of the request, such as
        `tools`. Raises PolicyRefused."""
        body = {"model": "policy", "messages": [_said(message) for message in messages], **fields}
        answer = await self._post((base_url or self.base_url) + "/chat/completions", body)
        choice = answer["choices"][0]
        return {**choice["message"], "id": answer["id"], "finish_reason": choice["finish_reason"]}

    async def generate(self, ids: Sequence[int], **sampling: Any) -> list[int]:
        """The token ids that follow `ids`. Raises PolicyRefused."""
        body = {"token_ids": list(ids), "sampling_params": sampling}
        answer = await self._post(self.root + "/inference/v1/generate", body)
        found: list[int] = answer["choices"][0]["token_ids"]
        return found

    async def _post(self, url: str, body: Mapping[str, Any]) -> Any:
        return await asyncio.to_thread(self._post_now, url, body)

    def _post_now(self, url: str, body: Mapping[str, Any]) -> Any:
        head = {"Authorization": f"Bearer {self.api_key}", "Content-Type": "application/json"}
        request = urllib.request.Request(url, json.dumps(body).encode(), head)
        try:
            with urllib.request.urlopen(request, timeout=self._call_seconds) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            try:
                told = json.loads(text)["error"]
            except (ValueError, KeyError, TypeError):
                told = {"message": text}
            raise PolicyRefused(error.code, str(told.get("message")), str(told.get("code") or "")) from None
        except OSError as error:  # refused, broken off, or no answer in time
            raise InfrastructureError(f"{url}: {error}") from None


class SandboxHandle:
    """A sandbox with a folder of its own, in which commands are run one after the other."""

    def __init__(self, channel: AgentChannel, episode: str, spec: dict[str, Any]):
        self._channel, self._episode, self._spec = channel, episode, spec
        self._name = ""

    async def __aenter__(self) -> SandboxHandle:
        self._name = await self._channel.ask(self._episode, "sandbox_open", spec=self._spec)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._channel.ask(self._episode, "sandbox_close", name=self._name)

    async def run(self, *command: str, stdin: str = "", timeout: float | None = None) -> dict[str, Any]:
        """`{"code", "stdout", "stderr", "reason"}`: `reason` is empty, or the limit that ended it. `timeout`: seconds;
        None: the sandbox's."""
        found: dict[str, Any] = await self._channel.ask(
            self._episode, "sandbox_run", name=self._name, command=list(command), stdin=stdin, timeout=timeout
        )
        return found


def _said(message: Mapping[str, Any]) -> dict[str, Any]:
    """Without what `chat` added to the policy's reply."""
    return {name: value for name, value in message.items() if name not in ("id", "finish_reason")}


def finite(value: Any) -> float:
    """Raises ValueError where it is no finite number."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{value!r} is not a number") from None
    if not math.isfinite(number):
        raise ValueError(f"{number} is not a finite number")
    return number
