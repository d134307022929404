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
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from functools import partial

import msgspec
import xxhash

from runtime import timeouts
from runtime.environments.messages import STOP_REASONS
from runtime.errors import Cancelled, DeadlineExceeded, SluiceError
from runtime.gateway.conversation import TOO_LONG, Completion, Message, PolicyCall, Refused, Told
from runtime.gateway.episode import Begun, EpisodeRun, GatewayEpisode, SharedCall, finished
from runtime.gateway.rendering import TemplateRenderer
from runtime.process.aio import done_within, first_error, now
from runtime.process.spans import POLICY
from runtime.types import GeneratedGroup, PlayRequest

log = logging.getLogger("sluice")


KEYED = "key:"  # begins the name of a request that has an idempotency key
ANSWERED = 256  # answers that are kept for repeats of their requests

Answer = Callable[[GatewayEpisode, PolicyCall, Told | None], Awaitable[Completion]]


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
        self._waiting: deque[tuple[EpisodeRun, int]] = deque()  # tasks that nobody plays yet
        self._came = asyncio.Event()  # one of them
        self._asked = self._warns = False  # whether a program ever asked for one; whether the log will say that none did
        self.players: Callable[[EpisodeRun, int], Awaitable[None]] | None = None
        """Has one of a group's episodes played, where its task names an environment."""
        self._open: dict[str, GatewayEpisode] = {}
        self._by_key: dict[str, GatewayEpisode] = {}
        self._outside = GatewayEpisode(renderer)  # nobody's: what calls of no episode are the same, by their keys
        self.counts: Counter[str] = Counter()
        self.forks: Counter[str] = Counter()

    # ------------------------------------------------------------------------------------------ groups, from the coordinator

    async def play(self, request: PlayRequest) -> GeneratedGroup:
        """Answered once all its episodes are over. Raises DeadlineExceeded when no program asked for one of them in time."""
        loop = asyncio.get_running_loop()
        group = EpisodeRun(request, loop.create_future())
        if request.task.environment:
            return await self._have_played(group)
        timer = loop.call_later(self._seconds, self._expire, group)
        self._waiting.extend((group, index) for index in range(request.n))
        self._came.set()
        if not self._warns:
            self._warns = True
            loop.call_later(timeouts.NO_PROGRAM_ASKS, self._tell_of_nobody)
        try:
            return await group.done
        finally:  # also where the coordinator withdraws it
            timer.cancel()
            self._waiting = deque(each for each in self._waiting if each[0] is not group)
            self._leave_all(group)

    async def _have_played(self, group: EpisodeRun) -> GeneratedGroup:
        """By the environment that its task names. Raises what `players` does."""
        assert self.players is not None
        try:
            async with asyncio.TaskGroup() as together:
                for index in range(group.request.n):
                    together.create_task(self.players(group, index))  # type: ignore[arg-type]  # a coroutine
            return await group.done
        except Exception as error:  # noqa: BLE001 - it comes in a group
            raise first_error(error) from None
        finally:
            self._leave_all(group)

    def _leave_all(self, group: EpisodeRun) -> None:
        for episode in group.episodes.values():
            self.close_one(episode, "cancelled")
        group.episodes.clear()  # which know the group: what knows itself is not freed at once

    def _tell_of_nobody(self) -> None:
        if not self._asked and self._waiting:
            log.warning("%d episodes wait, and no program has asked for one (POST /v1/episodes)", len(self._waiting))

    def _expire(self, group: EpisodeRun) -> None:
        unasked = group.request.n - len(group.episodes)
        if unasked and not group.done.done():
            why = f"no program has asked for {unasked} of {group.request.n} episodes of group {group.request.group_id}"
            group.done.set_exception(DeadlineExceeded(self._name, "Play", why, self._seconds))
        for episode in list(group.episodes.values()):
            self.close_one(episode, "timeout")

    def _finish(self, group: EpisodeRun) -> None:
        """All its episodes are over."""
        episodes = [group.episodes[index] for index in range(group.request.n)]
        # Where the run has rewards of its own those who play may give none at all; what is left out is left out all the same.
        given = not self._rewarded or any(episode.left_out or episode.reward is not None for episode in episodes)
        try:
            found = finished(group.request, episodes, self._renderer, group.repeated, given)
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
            episode, task = self._opened(GatewayEpisode(self._renderer)), None
            episode.timer = asyncio.get_running_loop().call_later(self._seconds, self.close_one, episode, "timeout")
        else:
            until = now() + min(wait, timeouts.TASK_WAIT)
            while not self._waiting:
                self._came.clear()
                if not await done_within(self._came.wait(), until - now()):
                    raise Refused(429, "no task waits", retry_after=timeouts.GATEWAY_RETRY)
            group, index = self._waiting.popleft()
            episode, task = self.open_one(group, index), group.request.task
            episode.begin()
        return Begun(id=episode.id, key=episode.key, base=f"/episodes/{episode.id}", task=task)

    def episode(self, id: str, key: str) -> GatewayEpisode:
        """By its key, and by its id where there is one; the key may stand in the place of the id, for who sends another. A new
        one that is not open for a call that belongs to none, where that may be. Refused: 404 where it is not there, 401 for a
        wrong key, or none."""
        if (named := self._by_key.get(id)) is not None:
            return named
        found = self._open.get(id) if id else self._by_key.get(key)
        if id and found is None:
            raise Refused(404, f"there is no episode {id!r}, or it is over")
        if found is not None and _same(found.key, key):
            return found
        if not id and self._serves and self._is_own(key):
            return GatewayEpisode(self._renderer)
        whose = "the gateway's, or that of an episode" if self._serves else "that of an episode"
        raise Refused(401, f"the key is not {whose} which is open" if key else f"needs a key: {whose}")

    def _is_own(self, key: str) -> bool:
        return not self.key or _same(self.key, key)

    def check(self, key: str) -> None:
        """Refused, 401, unless it is the gateway's own."""
        if not self._is_own(key):
            raise Refused(401, "needs the gateway's key")

    def open_one(self, group: EpisodeRun, index: int) -> GatewayEpisode:
        """One of a group's episodes."""
        group.episodes[index] = GatewayEpisode(self._renderer, group, index)
        return self._opened(group.episodes[index])

    def _opened(self, episode: GatewayEpisode) -> GatewayEpisode:
        self._open[episode.id] = self._by_key[episode.key] = episode
        self.counts["episodes"] += 1
        return episode

    def play_again(self, episode: GatewayEpisode, why: str) -> None:
        """It is as if it had not been: another is opened in its place."""
        group = episode.group
        assert group is not None
        del group.episodes[episode.index]
        group.repeated[why] += 1
        self._leave(episode, "cancelled")
        self.counts["played_again"] += 1

    async def call(self, episode: GatewayEpisode, call: PolicyCall, told: Told | None = None) -> Completion:
        """The policy's answer. A request that is made again gets that of the first. Cancelled when the client hangs up, which
        withdraws the call and leaves the episode."""
        if episode.over:
            raise Refused(404, f"episode {episode.id} is over ({episode.stop_reason})")
        name, kept = call.repeats or secrets.token_hex(), episode
        if episode.id not in self._open and name.startswith(KEYED):  # the keys of all who call outside of an episode
            name, kept = f"{name} {xxhash.xxh3_128_hexdigest(msgspec.json.encode(call))}", self._outside
        if (known := kept.answered.get(name)) is not None:
            return known
        shared = kept.under_way.get(name)
        if shared is None:
            work = asyncio.get_running_loop().create_task(self._counted(episode, call, told))
            shared = kept.under_way[name] = SharedCall(work)
            work.add_done_callback(partial(_keep, kept, name))
        try:
            return await shared.answer()
        except asyncio.CancelledError:
            if episode.over:  # its end has withdrawn the call
                raise Refused(404, f"episode {episode.id} is over ({episode.stop_reason})") from None
            raise

    async def _counted(self, episode: GatewayEpisode, call: PolicyCall, told: Told | None) -> Completion:
        self.counts["calls"] += 1
        self.counts["under_way"] += 1
        began = time.monotonic()
        episode.begin()
        episode.calls_tools()
        try:
            completion = await asyncio.wait_for(self._answer(episode, call, told), episode.call_seconds)
        except TimeoutError:
            self.counts["refused_408"] += 1
            raise Refused(408, f"no answer within {episode.call_seconds:g} s (budgets.call)") from None
        except Refused as error:
            self.counts[f"refused_{error.status}"] += 1
            episode.overflowed |= error.code == TOO_LONG
            raise
        finally:
            self.counts["under_way"] -= 1
            episode.trace(POLICY, began, time.monotonic(), episode.rollout)
        known = {tool.name for tool in call.tools}
        called = (tool.name for reply in completion.replies for tool in reply.message.tool_calls)
        episode.calls_tools(name if name in known else "unknown" for name in called)
        if call.branch:
            episode.branches[call.branch] = completion.id
        return completion

    def history(self, episode: GatewayEpisode, completion_id: str) -> tuple[Message, ...]:
        """The conversation up to and with the reply of a completion. Refused: 404."""
        return episode.graph.history(completion_id)

    def reward(self, episode: GatewayEpisode, value: float, completion: str = "") -> None:
        """Of a completion; empty: of the whole episode. Refused: 404 for an unknown completion, 400 if not finite."""
        if not math.isfinite(value):
            raise Refused(400, f"reward: {value} is not a finite number", "reward")
        if completion:
            episode.graph.reward(completion, value)
            episode.reward = episode.reward or 0.0
        else:
            episode.reward = value

    async def end(self, episode: GatewayEpisode, stop_reason: str = "") -> None:
        """No more calls of the episode. Refused: 400 for a reason that is none of `STOP_REASONS`."""
        if stop_reason and stop_reason not in STOP_REASONS:
            raise Refused(400, f"stop_reason: '{stop_reason}' is not one of {', '.join(STOP_REASONS)}", "stop_reason")
        self.close_one(episode, stop_reason or "completed")

    def close_one(self, episode: GatewayEpisode, stop_reason: str) -> None:
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

    def _leave(self, episode: GatewayEpisode, stop_reason: str) -> None:
        """It is open no more, its key of no use, and what it asked for is withdrawn."""
        episode.stop_reason = stop_reason
        episode.enter("")
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
            self.close_one(episode, "cancelled")
        for group in {group for group, _ in self._waiting}:
            if not group.done.done():
                group.done.set_exception(Cancelled("the gateway was stopped"))


def _keep(episode: GatewayEpisode, name: str, work: asyncio.Task[Completion]) -> None:
    """The answer is here: for repeats of a request with a key."""
    episode.under_way.pop(name, None)
    if name.startswith(KEYED) and not work.cancelled() and work.exception() is None:
        episode.answered[name] = work.result()
        if len(episode.answered) > ANSWERED:
            del episode.answered[next(iter(episode.answered))]


def _same(one: str, other: str) -> bool:
    """In the same time wherever they differ. What came in a header need not be UTF-8."""
    return hmac.compare_digest(one.encode(), other.encode(errors="surrogateescape"))
