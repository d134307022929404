"""The episodes of one gateway: who plays which task, each one's graph, and the group that comes of them.

    coordinator ── play(group) ──► tasks that wait ◄── begin ── a program     which plays an episode: calls, rewards, end
                                        │
                     a group's n episodes, each with its graph ── all ended ──► GeneratedGroup

Used on one event loop. What takes longer than a millisecond is done in threads: `PolicyCalls` sees to that.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import secrets
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import xxhash
from msgspec import Struct

from runtime import codec, timeouts
from runtime.errors import Cancelled, DeadlineExceeded, SluiceError
from runtime.gateway.conversation import Completion, Message, PolicyCall, Refused, Told
from runtime.gateway.graph import EpisodeGraph, payload_of
from runtime.gateway.rendering import TemplateRenderer
from runtime.process.aio import done_within, now
from runtime.types import EpisodeTask, GeneratedGroup, PlayRequest

log = logging.getLogger("sluice")

STOP_REASONS = (
    *("completed", "max_turns", "max_tokens", "context_overflow", "parse_error", "tool_failed", "timeout", "cancelled"),
)
KEY_BYTES = 24


class Begun(Struct, frozen=True):
    """An episode, as who plays it is told. `base` is the path below which it is addressed, "/episodes/ID"; `key` is its own."""

    id: str
    key: str
    base: str
    task: EpisodeTask | None  # None: of the caller's own


class Episode:
    """One that is open, or was; or, open to nobody, that of a call which belongs to none."""

    def __init__(self, renderer: TemplateRenderer, group: Playing | None = None, index: int = 0):
        """`group`: None where there is no run; `index`: in it."""
        self.id, self.key = secrets.token_hex(8), secrets.token_urlsafe(KEY_BYTES)
        self.graph = EpisodeGraph(renderer)
        self.group, self.index = group, index
        self.request = None if group is None else group.request
        self.reward: float | None = None
        self.program = ""  # the key of who plays it
        self.stop_reason = ""  # of one that is over
        self.rollout = ""  # that it keeps to
        self.calls = 0  # so far
        self.under_way: dict[str, SharedCall] = {}  # by what makes a request the same
        self.answered: dict[str, Completion] = {}  # to those that had an idempotency key
        self.timer: asyncio.TimerHandle | None = None

    @property
    def over(self) -> bool:
        return bool(self.stop_reason)


class Playing:
    """A group whose episodes are played."""

    def __init__(self, request: PlayRequest, done: asyncio.Future[GeneratedGroup]):
        self.request, self.done = request, done
        self.episodes: dict[int, Episode] = {}  # by their index
        self.left = request.n  # that are not over


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


Answer = Callable[[Episode, PolicyCall, Told | None], Awaitable[Completion]]


class Episodes:
    """What programs ask is refused by raising Refused."""

    def __init__(
        self,
        *,
        model: str,
        renderer: TemplateRenderer,
        answer: Answer,
        most: int,
        seconds: float,
        name: str,
        serves: bool,
        rewarded: bool,
    ):
        """`answer`: has a call answered. `most`: episodes at once. `seconds`: `deadlines.episode`. `serves`: there is no run,
        and calls need no episode. `rewarded`: the run has rewards besides those of whoever plays."""
        self.model, self.key = model, ""
        self._renderer, self._answer, self._most, self._seconds = renderer, answer, most, seconds
        self._name, self._serves, self._rewarded = name, serves, rewarded
        self._waiting: deque[tuple[Playing, int]] = deque()  # tasks that nobody plays yet
        self._came = asyncio.Event()  # one of them
        self._asked = self._warns = False  # whether a program ever asked for one; whether the log will say that none did
        self._open: dict[str, Episode] = {}
        self._by_key: dict[str, Episode] = {}
        self._programs: set[str] = set()  # keys of programs of the gateway's own
        self.counts: Counter[str] = Counter()
        self.forks: Counter[str] = Counter()

    # ------------------------------------------------------------------------------------------ groups, from the coordinator

    async def play(self, request: PlayRequest) -> GeneratedGroup:
        """Answered once all its episodes are over. Raises DeadlineExceeded when no program asked for one of them in time."""
        loop = asyncio.get_running_loop()
        group = Playing(request, loop.create_future())
        timer = loop.call_later(self._seconds, self._expire, group)
        self._waiting.extend((group, index) for index in range(request.n))
        self._came.set()
        if not self._warns:
            self._warns = True
            loop.call_later(timeouts.NOBODY_ASKS, self._tell_of_nobody)
        try:
            return await group.done
        finally:  # also where the coordinator withdraws it
            timer.cancel()
            self._waiting = deque(each for each in self._waiting if each[0] is not group)
            for episode in group.episodes.values():
                self._close(episode, "cancelled")
            group.episodes.clear()  # which know the group: what knows itself is not freed at once

    def _tell_of_nobody(self) -> None:
        if not self._asked and self._waiting:
            log.warning("%d episodes wait, and no program has asked for one (POST /v1/episodes)", len(self._waiting))

    def _expire(self, group: Playing) -> None:
        unasked = group.request.n - len(group.episodes)
        if unasked and not group.done.done():
            why = f"no program has asked for {unasked} of {group.request.n} episodes of group {group.request.group_id}"
            group.done.set_exception(DeadlineExceeded(self._name, "Play", why, self._seconds))
        for episode in list(group.episodes.values()):
            self._close(episode, "timeout")

    def _finish(self, group: Playing) -> None:
        """All its episodes are over."""
        episodes = [group.episodes[index] for index in range(group.request.n)]
        rewards = [math.nan if episode.reward is None else episode.reward for episode in episodes]
        given = not self._rewarded or not all(map(math.isnan, rewards))
        graphs = [episode.graph for episode in episodes]
        try:
            found = finished(group.request, graphs, self._renderer, rewards if given else [])
        except SluiceError as error:
            group.done.set_exception(error)
        else:
            group.done.set_result(found)

    # ------------------------------------------------------------------------------------------ what programs ask

    async def begin(self, key: str, wait: float = 0.0) -> Begun:
        """The next task's episode, for who knows the gateway's own key. Refused: 401; 429 where there is no task within `wait`
        seconds, or where more episodes are not admitted."""
        self.check(key)
        self._asked = True
        if len(self._open) >= self._most:
            raise Refused(429, f"{self._most} episodes are open (gateway.episodes)", retry_after=timeouts.GATEWAY_RETRY)
        if self._serves:
            episode, task = Episode(self._renderer), None
            episode.timer = asyncio.get_running_loop().call_later(self._seconds, self._close, episode, "timeout")
        else:
            until = now() + min(wait, timeouts.TASK_WAIT)
            while not self._waiting:
                self._came.clear()
                if not await done_within(self._came.wait(), until - now()):
                    raise Refused(429, "no task waits", retry_after=timeouts.GATEWAY_RETRY)
            group, index = self._waiting.popleft()
            episode = group.episodes[index] = Episode(self._renderer, group, index)
            episode.program, task = key, group.request.task
        self._open[episode.id] = self._by_key[episode.key] = episode
        self.counts["episodes"] += 1
        return Begun(id=episode.id, key=episode.key, base=f"/episodes/{episode.id}", task=task)

    def episode(self, id: str, key: str) -> Episode:
        """By its key, and by its id where there is one; the key may stand in the place of the id, for who sends another. A new
        one that is not open for a call that belongs to none, where that may be. Refused: 404 where it is not there, 401 for a
        wrong key, or none."""
        if (named := self._by_key.get(id)) is not None:
            return named
        found = self._open.get(id) if id else self._by_key.get(key)
        if id and found is None:
            raise Refused(404, f"there is no episode {id!r}, or it is over")
        if found is not None and hmac.compare_digest(found.key.encode(), key.encode()):
            return found
        if not id and self._serves and self._is_own(key):
            return Episode(self._renderer)
        raise Refused(401, "the key is that of no episode which is open" if key else "needs the key of an episode")

    def _is_own(self, key: str) -> bool:
        return not self.key or key in self._programs or hmac.compare_digest(self.key.encode(), key.encode())

    def check(self, key: str) -> None:
        """Refused, 401, unless it is the gateway's own."""
        if not self._is_own(key):
            raise Refused(401, "needs the gateway's key")

    def admit(self) -> str:
        """A key by which one program more may ask for tasks."""
        key = secrets.token_urlsafe(KEY_BYTES)
        self._programs.add(key)
        return key

    def give_up(self, key: str) -> None:
        """The program with this key of `admit` is gone: what it was playing is played again, from the same seeds."""
        self._programs.discard(key)
        for episode in [each for each in self._open.values() if each.program == key]:
            group = episode.group
            assert group is not None
            del group.episodes[episode.index]
            self._waiting.appendleft((group, episode.index))
            self._leave(episode, "cancelled")
            self.counts["played_again"] += 1
        self._came.set()

    async def call(self, episode: Episode, call: PolicyCall, told: Told | None = None) -> Completion:
        """The policy's answer. A request that is made again gets that of the first. Cancelled when the client hangs up, which
        withdraws the call and leaves the episode."""
        if episode.over:
            raise Refused(404, f"episode {episode.id} is over ({episode.stop_reason})")
        if (known := episode.answered.get(call.repeats)) is not None:
            return known
        name = call.repeats or secrets.token_hex()
        shared = episode.under_way.get(name)
        if shared is None:
            work = asyncio.get_running_loop().create_task(self._counted(episode, call, told))
            shared = episode.under_way[name] = SharedCall(work)
            work.add_done_callback(lambda _: episode.under_way.pop(name, None))
        try:
            return await shared.answer()
        except asyncio.CancelledError:
            if episode.over:  # its end has withdrawn the call
                raise Refused(404, f"episode {episode.id} is over ({episode.stop_reason})") from None
            raise

    async def _counted(self, episode: Episode, call: PolicyCall, told: Told | None) -> Completion:
        self.counts["calls"] += 1
        self.counts["under_way"] += 1
        try:
            completion = await self._answer(episode, call, told)
        except Refused as error:
            self.counts[f"refused_{error.status}"] += 1
            raise
        finally:
            self.counts["under_way"] -= 1
        if call.repeats.startswith("key:"):
            episode.answered[call.repeats] = completion
        return completion

    def history(self, episode: Episode, completion_id: str) -> tuple[Message, ...]:
        """The conversation up to and with the reply of a completion. Refused: 404."""
        return episode.graph.history(completion_id)

    def reward(self, episode: Episode, value: float, completion: str = "") -> None:
        """Of a completion; empty: of the whole episode. Refused: 404 for an unknown completion, 400 if not finite."""
        if not math.isfinite(value):
            raise Refused(400, f"reward: {value} is not a finite number", "reward")
        if completion:
            episode.graph.reward(completion, value)
            episode.reward = episode.reward or 0.0
        else:
            episode.reward = value

    async def end(self, episode: Episode, stop_reason: str = "") -> None:
        """No more calls of the episode. Refused: 400 for a reason that is none of `STOP_REASONS`."""
        if stop_reason and stop_reason not in STOP_REASONS:
            raise Refused(400, f"stop_reason: '{stop_reason}' is not one of {', '.join(STOP_REASONS)}", "stop_reason")
        self._close(episode, stop_reason or "completed")

    def _close(self, episode: Episode, stop_reason: str) -> None:
        """Idempotent."""
        if episode.over:
            return
        self._leave(episode, stop_reason)
        self.counts[f"ended_{stop_reason}"] += 1
        self.forks.update(episode.graph.forks)
        if (group := episode.group) is not None:
            group.left -= 1
            if not group.left and not group.done.done():
                self._finish(group)

    def _leave(self, episode: Episode, stop_reason: str) -> None:
        """It is open no more, its key of no use, and what it asked for is withdrawn."""
        episode.stop_reason = stop_reason
        self._open.pop(episode.id, None)
        self._by_key.pop(episode.key, None)
        if episode.timer is not None:
            episode.timer.cancel()
        for shared in list(episode.under_way.values()):
            shared.withdraw()

    # ------------------------------------------------------------------------------------------ what is told of them

    @property
    def waiting(self) -> int:
        """Tasks that no program has asked for."""
        return len(self._waiting)

    @property
    def open(self) -> int:
        return len(self._open)

    def close(self) -> None:
        for episode in list(self._open.values()):
            self._close(episode, "cancelled")
        for group in {group for group, _ in self._waiting}:
            if not group.done.done():
                group.done.set_exception(Cancelled("the gateway was stopped"))


def finished(
    request: PlayRequest, graphs: Sequence[EpisodeGraph], renderer: TemplateRenderer, rewards: list[float]
) -> GeneratedGroup:
    """What leaves the gateway: header and encoded payload. A group of which nothing is trained is as if it were of no version
    yet."""
    messages = tuple(Message(each["role"], each["content"]) for each in request.task.messages)
    task = np.array(renderer.render(messages, ()), np.int32)
    payload, versions = payload_of(request.group_id, graphs, task)
    oldest, newest = versions or (request.version, request.version)
    return GeneratedGroup(
        group_id=request.group_id,
        prompt_tokens=len(payload.prompt),
        response_tokens=payload.lengths.tolist(),
        truncated=payload.finish_reasons.count("length"),
        oldest=oldest,
        newest=newest,
        rewards=rewards,
        payload=codec.encode(payload),
    )


def mixed(seed: int, *parts: int) -> int:
    """A seed in [0, 2^63) for one part of what has `seed`."""
    return xxhash.xxh3_64_intdigest(codec.encode([seed, *parts])) >> 1
