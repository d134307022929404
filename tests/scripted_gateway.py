"""A gateway's backend without a model: it says what the conversation tells it to. For tests of the HTTP side, and of clients.

The last user message that has such lines is the script. `---` parts its turns; a turn has lines `think TEXT`, `say TEXT`
(several are lines of one text), `call TOOL JSON`, or `fail STATUS`. Which turn it is, is told by the assistant's messages
behind it. Where there is no script, the last message is repeated. A token is a word with the space before it; its id is its
length, and 0 at a reply's end.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import secrets
from typing import Any

import numpy as np
from msgspec.structs import replace

from runtime.gateway.conversation import Completion, Message, OnText, PolicyCall, PolicyReply, Refused, ReplyEnd, ToolCall
from runtime.gateway.episodes import Begun
from runtime.types import EpisodeTask

LINE = re.compile(r"^(think|say|call|fail) (.*)$|^---$", re.MULTILINE)
CONTEXT = 4096  # words
KEY = "the-gateways-own"


class ScriptedEpisode:
    def __init__(self, id: str):
        self.id, self.key = id, secrets.token_hex(8)
        self.calls: list[PolicyCall] = []
        self.conversations: dict[str, tuple[Message, ...]] = {}
        self.rewards: list[tuple[float, str]] = []
        self.ended: str | None = None
        self.graph = self

    def history(self, completion_id: str) -> tuple[Message, ...]:
        if completion_id not in self.conversations:
            raise Refused(404, f"the episode has no completion {completion_id!r}", "previous_response_id")
        return self.conversations[completion_id]


class ScriptedBackend:
    """`hold`: a call waits until it is set, once it has told `hold_after` words. `cancelled`: calls that were given up.
    `loose`: calls with the gateway's own key belong to no episode."""

    def __init__(self, tasks: list[EpisodeTask] | None = None, loose: bool = False):
        self.model, self.key = "scripted", KEY
        self.tasks = tasks
        self.episodes: dict[str, ScriptedEpisode] = {}
        self.hold = asyncio.Event()
        self.hold.set()
        self.hold_after = 0
        self.under_way = asyncio.Event()
        self.withdrawn = asyncio.Event()
        self.cancelled: list[PolicyCall] = []
        self._loose = ScriptedEpisode("") if loose else None
        self._numbers = itertools.count(1)

    def check(self, key: str) -> None:
        if key != KEY:
            raise Refused(401, "this is not the gateway's key")

    async def begin(self, key: str, wait: float) -> Begun:
        if self.tasks == []:
            raise Refused(429, f"no task came within {wait:g} s", retry_after=0.5)
        episode = ScriptedEpisode(f"e{next(self._numbers)}")
        self.episodes[episode.id] = episode
        return Begun(episode.id, episode.key, f"/episodes/{episode.id}", self.tasks.pop(0) if self.tasks else None)

    def episode(self, id: str, key: str) -> Any:
        if self._loose is not None and not id and key == KEY:
            return self._loose
        for episode in self.episodes.values():
            if episode.key == id:
                return episode
        if id and id not in self.episodes:
            raise Refused(404, f"there is no open episode {id!r}")
        for episode in self.episodes.values():
            if episode.key == key and id in ("", episode.id):
                return episode
        raise Refused(401, "the key is of no open episode")

    async def call(self, episode: Any, call: PolicyCall, on_text: OnText | None) -> Completion:
        episode.calls.append(call)
        self.under_way.set()
        try:
            if not self.hold_after:
                await self.hold.wait()
            return await self._answer(episode, call, on_text)
        except asyncio.CancelledError:
            self.cancelled.append(call)
            self.withdrawn.set()
            raise

    async def _answer(self, episode: Any, call: PolicyCall, on_text: OnText | None) -> Completion:
        prompt = words_of(prompt_text(call)) if call.tokens is None else list(call.tokens)
        if len(prompt) > CONTEXT:
            message = f"this model's maximum context length is {CONTEXT} tokens, and the prompt has {len(prompt)}"
            raise Refused(400, message, "messages", code="context_length_exceeded")
        id = f"c{next(self._numbers)}"
        replies = tuple([await self._reply(call, id, index, on_text) for index in range(call.n)])
        episode.conversations[id] = (*call.messages, replies[0].message)
        tokens = np.array([one if isinstance(one, int) else len(one) for one in prompt], np.int32)
        return Completion(id=id, created=1_700_000_000.0, model=self.model, prompt=tokens, replies=replies)

    async def _reply(self, call: PolicyCall, id: str, index: int, on_text: OnText | None) -> PolicyReply:
        message = said(call)
        text, stop = message.content, ""
        for candidate in call.stop:
            if candidate in text:
                text, stop = text[: text.index(candidate)], candidate
        words = words_of(text)
        cut = call.max_tokens is not None and len(words) >= call.max_tokens
        if cut:
            words, message = words[: call.max_tokens], replace(message, tool_calls=())
        for end in range(1, len(words) + 1):
            if on_text is not None:
                on_text(id, index, Message("assistant", "".join(words[:end])))
            await (self.hold.wait() if end == self.hold_after else asyncio.sleep(0))
        message = replace(message, content="".join(words))
        tokens = np.array([len(word) for word in words] + [0] * (not cut), np.int32)
        logprobs = (-0.5 - np.arange(len(tokens))).astype(np.float32)
        end: ReplyEnd = "length" if cut else "tool_calls" if message.tool_calls else "stop"
        return PolicyReply(message, tokens, logprobs, np.zeros(len(tokens), np.int64), end, "" if cut else stop)

    def reward(self, episode: Any, value: float, completion: str) -> None:
        if completion and completion not in episode.conversations:
            raise Refused(404, f"the episode has no completion {completion!r}", "completion_id")
        episode.rewards.append((value, completion))

    async def end(self, episode: Any, stop_reason: str) -> None:
        episode.ended = stop_reason
        del self.episodes[episode.id]


def words_of(text: str) -> list[str]:
    return re.findall(r"\s*\S+|\s+$", text)


def prompt_text(call: PolicyCall) -> str:
    return call.text if call.text is not None else "\n".join(message.content for message in call.messages)


def said(call: PolicyCall) -> Message:
    """What the script has the assistant say next. Calls of tools are numbered over the conversation."""
    messages = [Message("user", call.text or "")] if not call.messages else list(call.messages)
    found = [at for at, message in enumerate(messages) if message.role == "user" and LINE.search(message.content)]
    if not found:
        return Message("assistant", messages[-1].content)
    turns: list[list[tuple[str, str]]] = [[]]
    for line in LINE.finditer(messages[found[-1]].content):
        if line[1]:
            turns[-1].append((line[1], line[2]))
        else:
            turns.append([])
    past = sum(message.role == "assistant" for message in messages[found[-1] :])
    turn = turns[min(past, len(turns) - 1)]
    for kind, text in turn:
        if kind == "fail":
            if text == "500":
                raise ConnectionResetError("a fault of the backend")  # and none of the client's connection
            raise Refused(int(text), "the script says so", retry_after=0.1 if text in ("429", "503") else None)
    texts = {kind: "\n".join(text for each, text in turn if each == kind) for kind in ("think", "say")}
    before = sum(len(message.tool_calls) for message in messages)
    calls = [text.partition(" ") for kind, text in turn if kind == "call"] if call.tool_choice != "none" else []
    tool_calls = tuple(ToolCall(f"call_{before + at}", name, given) for at, (name, _, given) in enumerate(calls))
    return Message("assistant", texts["say"], tool_calls, reasoning=texts["think"])
