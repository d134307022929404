"""An episode of a gateway, the group that it belongs to, and what leaves the gateway of it."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import xxhash
from msgspec import Struct

from runtime import types
from runtime.gateway.conversation import Completion, Message
from runtime.gateway.graph import EpisodeGraph, payload_of
from runtime.gateway.rendering import TemplateRenderer
from runtime.process import spans
from runtime.telemetry.metrics import LEFT_OUT
from runtime.types import EpisodeTask, GeneratedGroup, Outcomes, PlayRequest

KEY_BYTES = 24


class Begun(Struct, frozen=True):
    """An episode, as who plays it is told. `base` is the path below which it is addressed, "/episodes/ID"; `key` is its own."""

    id: str
    key: str
    base: str
    task: EpisodeTask | None  # None: of the caller's own


class GatewayEpisode:
    """One that is open, or was; or, open to nobody, that of a call which belongs to none."""

    def __init__(self, renderer: TemplateRenderer, group: EpisodeRun | None = None, index: int = 0):
        """`group`: None where there is no run; `index`: in it."""
        self.id, self.key = secrets.token_hex(8), secrets.token_urlsafe(KEY_BYTES)
        self.graph = EpisodeGraph(renderer)
        self.group, self.index = group, index
        self.request = None if group is None else group.request
        self.reward: float | None = None
        self.left_out = ""  # why it is not trained on; "": it is
        self.log: dict[str, float] = {}  # figures that its agent told
        self.branches: dict[str, str] = {}  # by the name of each the newest completion
        self.overflowed = False  # a call was refused, as the conversation was too long
        self.stop_reason = ""  # of one that is over
        self.rollout = ""  # that it keeps to
        self.calls = 0  # so far
        self.call_seconds: float | None = None  # that one may take; None: as `deadlines.generate` says
        self.under_way: dict[str, SharedCall] = {}  # by what makes a request the same
        self.answered: dict[str, Completion] = {}  # the newest, to those that had an idempotency key
        self.timer: asyncio.TimerHandle | None = None
        self._phase, self._since = "", 0.0
        self._tools, self._tools_since = "", 0.0

    def enter(self, phase: str) -> None:
        """It is in `phase` from now on, "" where in none. The one before is a span of this process."""
        now = time.monotonic()
        self.calls_tools()
        if self._phase:
            self.trace(self._phase, self._since, now, self._player)
        self._phase, self._since = phase, now

    @property
    def _player(self) -> str:
        name = "" if self.request is None else self.request.task.environment
        return f"environment {name}" if name else "a program"

    def calls_tools(self, names: Iterable[str] = ()) -> None:
        """The policy has called these; what it called before is done, and the time until now is a span of this process."""
        now = time.monotonic()
        if self._tools:
            self.trace(spans.TOOL, self._tools_since, now, f"{self._player}: {self._tools}")
        self._tools, self._tools_since = ", ".join(dict.fromkeys(names)), now

    def begin(self) -> None:
        """It is played, though whoever plays it told of no phase."""
        if not self._phase:
            self.enter("run")

    def trace(self, name: str, start: float, end: float, who: str) -> None:
        """A span of it, on the clock of time.monotonic; of one that belongs to no group there is none."""
        if self.request is not None:
            spans.log.add(name, start, end, spans.EPISODES, self.request.group_id, detail=f"{self.index} {who}")

    @property
    def over(self) -> bool:
        return bool(self.stop_reason)

    @property
    def seed(self) -> int:
        """In [0, 2^63): of one that belongs to a group."""
        assert self.request is not None
        return mixed(self.request.seed, self.request.first + self.index)

    @property
    def outcome(self) -> str:
        """Its stop reason, or why it is left out."""
        return LEFT_OUT + self.left_out if self.left_out else self.stop_reason


class EpisodeRun:
    """A group whose episodes are played."""

    def __init__(self, request: PlayRequest, done: asyncio.Future[GeneratedGroup]):
        self.request, self.done = request, done
        self.episodes: dict[int, GatewayEpisode] = {}  # by their index
        self.left = request.n  # that are not over
        self.repeated: Counter[str] = Counter()  # by reason, episodes that are played again


class SharedCall:
    """A call under way, for which repeats of the same request wait too. It is withdrawn when nobody does."""

    def __init__(self, work: asyncio.Task[Completion]):
        self._work, self._waiting = work, 0

    async def answer(self) -> Completion:
        self._waiting += 1
        try:
            return await asyncio.shield(self._work)
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._work.cancel()

    def withdraw(self) -> None:
        self._work.cancel()


def finished(
    request: PlayRequest,
    episodes: Sequence[GatewayEpisode],
    renderer: TemplateRenderer,
    repeated: Mapping[str, int],
    given: bool,
) -> GeneratedGroup:
    """What leaves the gateway: header and encoded payload. A group of which nothing is trained is as if it were of no version
    yet. `given`: whether what they earned counts."""
    messages = tuple(Message(each["role"], each["content"]) for each in request.task.messages)
    task = np.array(renderer.render(messages, ()) if messages else [], np.int32)
    payload, versions = payload_of(request.group_id, [episode.graph for episode in episodes], task)
    log: dict[str, tuple[int, float]] = {}
    for episode in episodes:
        for name, value in episode.log.items():
            count, total = log.get(name, (0, 0.0))
            log[name] = (count + 1, total + value)
    oldest, newest = versions or (request.version, request.version)
    return GeneratedGroup(
        group_id=request.group_id,
        prompt_tokens=len(payload.prompt),
        response_tokens=payload.lengths.tolist(),
        truncated=payload.finish_reasons.count("length"),
        oldest=oldest,
        newest=newest,
        rewards=[_earned(episode) for episode in episodes] if given else [],
        outcomes=Outcomes(
            environment=request.task.environment,
            reasons=[episode.outcome for episode in episodes],
            turns=[episode.graph.calls for episode in episodes],
            log=log,
            repeated=dict(repeated),
        ),
        payload=types.encode(payload),
    )


def _earned(episode: GatewayEpisode) -> float:
    """NaN: nothing that counts."""
    return math.nan if episode.reward is None or episode.left_out else episode.reward


def mixed(seed: int, *parts: int) -> int:
    """A seed in [0, 2^63) for one part of what has `seed`."""
    return xxhash.xxh3_64_intdigest(types.encode([seed, *parts])) >> 1
