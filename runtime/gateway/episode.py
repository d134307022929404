"""An episode of a gateway, the group of the episode, and the result that leaves the gateway."""

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
from runtime.types import EpisodeTask, GeneratedGroup, Outcomes, RunEpisodesRequest

KEY_BYTES = 24


class Begun(Struct, frozen=True):
    """An episode as its player sees it. `base`: the path of its API, "/episodes/ID". `key`: the episode's own key."""

    id: str
    key: str
    base: str
    task: EpisodeTask | None  # None: the caller has its own task


class GatewayEpisode:
    """An open or ended episode; or the private episode of a single call that belongs to no episode."""

    def __init__(self, renderer: TemplateRenderer, group: EpisodeRun | None = None, index: int = 0):
        """Create the episode. `group`: None without a run. `index`: position in the group."""
        self.id, self.key = secrets.token_hex(8), secrets.token_urlsafe(KEY_BYTES)
        self.graph = EpisodeGraph(renderer)
        self.group, self.index = group, index
        self.request = None if group is None else group.request
        self.reward: float | None = None
        self.left_out = ""  # why training leaves the episode out; "": training uses it
        self.log: dict[str, float] = {}  # figures that the agent reported
        self.branches: dict[str, str] = {}  # the newest completion of each named branch
        self.overflowed = False  # a call was refused because the conversation was too long
        self.stop_reason = ""  # set once the episode is over
        self.rollout = ""  # the rollout that answered last; the next call prefers it
        self.calls = 0  # so far
        self.call_seconds: float | None = None  # limit of one call; None: `deadlines.generate`
        self.under_way: dict[str, SharedCall] = {}  # by `PolicyCall.repeats`
        self.answered: dict[str, Completion] = {}  # the newest answers to requests with an idempotency key
        self.timer: asyncio.TimerHandle | None = None
        self._phase, self._since = "", 0.0
        self._tools, self._tools_since = "", 0.0

    def enter(self, phase: str) -> None:
        """Enter `phase` ("": none). Record a span of this process for the phase before."""
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
        """Note that the policy called these tools. Record a span for the tools that it called before: they are done now."""
        now = time.monotonic()
        if self._tools:
            self.trace(spans.TOOL, self._tools_since, now, f"{self._player}: {self._tools}")
        self._tools, self._tools_since = ", ".join(dict.fromkeys(names)), now

    def begin(self) -> None:
        """Enter the phase "run", unless the player has reported a phase."""
        if not self._phase:
            self.enter("run")

    def trace(self, name: str, start: float, end: float, who: str) -> None:
        """Record a span of the episode, in seconds of time.monotonic. An episode without a group has no spans."""
        if self.request is not None:
            spans.log.add(name, start, end, spans.EPISODES, self.request.group_id, detail=f"{self.index} {who}")

    @property
    def over(self) -> bool:
        return bool(self.stop_reason)

    @property
    def seed(self) -> int:
        """Seed of an episode that belongs to a group, in [0, 2^63)."""
        assert self.request is not None
        return mixed(self.request.seed, self.request.first + self.index)

    @property
    def outcome(self) -> str:
        """Stop reason, or the reason why training leaves the episode out."""
        return LEFT_OUT + self.left_out if self.left_out else self.stop_reason


class EpisodeRun:
    """A group of episodes that are played."""

    def __init__(self, request: RunEpisodesRequest, done: asyncio.Future[GeneratedGroup]):
        self.request, self.done = request, done
        self.episodes: dict[int, GatewayEpisode] = {}  # by index
        self.left = request.n  # episodes that are not over
        self.repeated: Counter[str] = Counter()  # episodes that are played again, by reason


class SharedCall:
    """A running call that repeats of the same request share. It is cancelled when no request waits for it."""

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
    request: RunEpisodesRequest,
    episodes: Sequence[GatewayEpisode],
    renderer: TemplateRenderer,
    repeated: Mapping[str, int],
    given: bool,
) -> GeneratedGroup:
    """Return the result of the group: header and encoded payload. A group without trained tokens gets the request's version.
    `given`: whether the rewards of the episodes count."""
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
    """Return the reward that counts, or NaN if none does."""
    return math.nan if episode.reward is None or episode.left_out else episode.reward


def mixed(seed: int, *parts: int) -> int:
    """Return a seed in [0, 2^63), derived from `seed` and `parts`."""
    return xxhash.xxh3_64_intdigest(types.encode([seed, *parts])) >> 1
