"""Rewards from a user's process, which serves RemoteReward of proto/remote_reward.proto. `services.reward` has the client."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import chain

import msgspec

from runtime import config, types
from runtime.rewards.rules import RuleOutcome
from runtime.rewards.scorer import column, read_replies
from runtime.types import GroupPayload, ScoreRequest, Scores, TextDecoder

# ---- Remote messages
# The messages of proto/remote_reward.proto, the protocol that a process of the user serves.


class ChatMessage(msgspec.Struct):
    role: str
    content: str


class RemoteItem(msgspec.Struct, kw_only=True):
    """One reply and its problem; for an episode, text and conversation are as in `RuleContext`."""

    text: str
    label: str
    source: str
    tokens: int
    finish_reason: str
    prompt: list[ChatMessage]
    extra: str  # a JSON object
    conversation: str = ""


class RemoteScoreRequest(msgspec.Struct):
    items: list[RemoteItem]


class RemoteResult(msgspec.Struct):
    """A value, or the reason why there is none."""

    value: float | None = None
    error: str = ""


class RemoteScoreReply(msgspec.Struct):
    results: list[RemoteResult]


log = logging.getLogger("sluice")

MARK = "remote:"  # prefix of the reasons under which failures are counted
CALL_CHARACTERS = 1 << 20  # characters of one call: by default, gRPC servers refuse messages of more than 4 MiB
SHOWN = 60  # characters of a reason from the other process


class RemoteFailure(Exception):
    """A call without an answer. `reason`: gRPC's name of the failure, such as UNAVAILABLE."""

    def __init__(self, reason: str, details: str):
        super().__init__(f"{reason}: {details}")
        self.reason = reason


Ask = Callable[[Sequence[RemoteItem], float], Awaitable[list[RemoteResult]]]  # raises RemoteFailure within so many seconds


class RemoteScorer:
    """Scores groups by one entry of `rewards.remote`."""

    def __init__(self, settings: config.RemoteReward, tokenizer: TextDecoder, ask: Ask, fail: bool):
        """Create the scorer. `fail`: a reply without a value raises ServiceFault; otherwise it is masked."""
        self._settings = settings
        self._tokenizer = tokenizer
        self._ask = ask
        self._blamed = "reward" if fail else ""

    async def score(self, request: ScoreRequest) -> Scores:
        """Return the scores of a group; a sample without a finite value is as in `column`. All calls run at once, under one
        deadline. Raises InvalidMessage if the payload does not decode, ServiceFault for such a sample with `on_error: fail`."""
        payload = types.decode(GroupPayload, request.payload)
        calls = _calls(self._items(request, payload), self._settings.batch)
        outcomes = list(chain.from_iterable(await asyncio.gather(*map(self._call, calls))))
        return column(payload.group_id, self._settings.name, self._settings.weight, outcomes, self._blamed)

    def _items(self, request: ScoreRequest, payload: GroupPayload) -> list[RemoteItem]:
        prompt = msgspec.convert(request.messages, list[ChatMessage])
        extra = msgspec.json.encode(request.extra).decode()
        return [
            RemoteItem(
                text=reply.text,
                label=request.label,
                source=request.source,
                tokens=len(reply.row.tokens),
                finish_reason=reply.row.finish_reason,
                prompt=prompt,
                extra=extra,
                conversation=reply.conversation,
            )
            for reply in read_replies(payload, self._tokenizer)
        ]

    async def _call(self, items: Sequence[RemoteItem]) -> list[RuleOutcome]:
        name = self._settings.name
        try:
            results = await self._ask(items, self._settings.timeout)
        except RemoteFailure as failure:
            log.warning("rewards.remote %s: %d replies without a value: %s", name, len(items), failure)
            return [RuleOutcome(error=f"{MARK}{failure.reason}")] * len(items)
        if len(results) != len(items):  # the results cannot be assigned to replies
            log.warning("rewards.remote %s: %d results for %d replies", name, len(results), len(items))
            return [RuleOutcome(error=f"{MARK}wrong number of results")] * len(items)
        return list(map(_outcome, results))


def _calls(items: Sequence[RemoteItem], batch: int) -> Iterator[Sequence[RemoteItem]]:
    """Yield runs of at most `batch` items and CALL_CHARACTERS; a longer item goes alone."""
    start, characters = 0, 0
    for index, item in enumerate(items):
        said = len(item.text) + len(item.conversation) + sum(len(message.content) for message in item.prompt)
        size = said + len(item.label) + len(item.extra)
        if index > start and (index - start == batch or characters + size > CALL_CHARACTERS):
            yield items[start:index]
            start, characters = index, 0
        characters += size
    if start < len(items):
        yield items[start:]


def _outcome(result: RemoteResult) -> RuleOutcome:
    if result.error:
        return RuleOutcome(error=MARK + " ".join(result.error.split())[:SHOWN])
    if result.value is None:
        return RuleOutcome(error=f"{MARK}no value")
    return RuleOutcome(result.value) if math.isfinite(result.value) else RuleOutcome(error=f"{MARK}not finite")
