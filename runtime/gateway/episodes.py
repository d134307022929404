"""The episodes of a gateway: which program plays which task, the graph of each episode, and the resulting group.

    coordinator ── play(group) ──► waiting tasks ◄── begin ── a program     which plays an episode: calls, rewards, end
                                        │
                     a group's n episodes, each with its graph ── all ended ──► GeneratedGroup

Used on one event loop. `PolicyCalls` moves work of more than a millisecond to threads.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import secrets
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from itertools import chain
from pathlib import Path

import msgspec
import numpy as np
import xxhash
from msgspec import Struct

from runtime import timeouts, types
from runtime.config import Config
from runtime.environments.messages import STOP_REASONS
from runtime.errors import Cancelled, DeadlineExceeded, SluiceError
from runtime.gateway.conversation import TOO_LONG, Completion, Message, OnText, PolicyCall, Refused
from runtime.gateway.graph import EpisodeGraph, payload_of
from runtime.gateway.rendering import TemplateRenderer
from runtime.process import spans
from runtime.process.waiting import done_within, first_error, now
from runtime.telemetry.metrics import LEFT_OUT
from runtime.types import EpisodeTask, GeneratedGroup, Outcomes, RunEpisodesRequest

log = logging.getLogger("sluice")

# ---- One episode, its group, and the result that leaves the gateway

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
        # In [0, 2^63); in a group the same when the episode is played again.
        self.seed = secrets.randbits(63) if group is None else mixed(group.request.seed, group.request.first + index)
        self.reward: float | None = None
        self.left_out = ""  # why training leaves the episode out; "": training uses it
        self.log: dict[str, float] = {}  # figures that the agent reported
        self.branches: dict[str, str] = {}  # the newest completion of each named branch
        self.ended_early = ""  # a stop reason: a call was too long (context_overflow), or a reply was malformed (parse_error)
        self.malformed = 0  # replies with malformed tool calls
        self.stop_reason = ""  # set once the episode is over
        self.rollout = ""  # the rollout that answered last; the next call prefers it
        self.calls = 0  # so far
        self.call_seconds: float | None = None  # limit of one call; None: `deadlines.generate`
        self.under_way: dict[str, SharedCall] = {}  # by `PolicyCall.repeats`
        self.answered: dict[str, Completion] = {}  # the newest answers to requests with an idempotency key
        self.timer: asyncio.TimerHandle | None = None
        name = "" if group is None else group.request.task.environment
        self._player = f"environment {name}" if name else "a program"
        self._phase, self._since = "", 0.0
        self._tools, self._tools_since = "", 0.0

    def enter(self, phase: str) -> None:
        """Enter `phase` ("": none). Record a span of this process for the phase before."""
        now = time.monotonic()
        self.calls_tools()
        if self._phase:
            self.trace(self._phase, self._since, now, self._player)
        self._phase, self._since = phase, now

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
        self.work, self._waiting = work, 0

    async def answer(self) -> Completion:
        self._waiting += 1
        try:
            return await asyncio.shield(self.work)
        finally:
            self._waiting -= 1
            if not self._waiting:
                self.work.cancel()


def mixed(seed: int, *parts: int) -> int:
    """Return a seed in [0, 2^63), derived from `seed` and `parts`."""
    return xxhash.xxh3_64_intdigest(types.encode([seed, *parts])) >> 1


# ---- All episodes

KEYED = "key:"  # prefix of `PolicyCall.repeats` if the request has an idempotency key
ANSWERED = 256  # answers kept for repeats of their requests

Answer = Callable[[GatewayEpisode, PolicyCall, OnText | None], Awaitable[Completion]]


class Episodes:
    """Serves programs and the coordinator. Methods that programs use raise Refused to refuse a request."""

    def __init__(self, config: Config, name: str, renderer: TemplateRenderer, answer: Answer):
        """Create without episodes. `name`: of the gateway. `answer`: answers a call."""
        assert config.gateway is not None
        self.model, self.key = Path(config.model.path).name, ""
        self._name, self._renderer, self._answer = name, renderer, answer
        self._most, self._seconds = config.gateway.episodes, config.deadlines.episode
        self._malformed_reward = config.gateway.malformed_reward
        self._serves = config.gateway.serve  # there is no run, and calls need no episode
        rewards = config.rewards
        self._rewarded = bool(rewards.rules or rewards.remote or rewards.model)  # besides the rewards of the players
        self._waiting: deque[tuple[EpisodeRun, int]] = deque()  # tasks without a player
        self._task_came = asyncio.Event()  # set when such a task comes
        self._asked = False  # a program has asked for a task
        self._warning: asyncio.TimerHandle | None = None  # that none did
        self.players: Callable[[EpisodeRun, int], Awaitable[None]] | None = None
        """Plays one of a group's episodes if its task names an environment."""
        self._open: dict[str, GatewayEpisode] = {}
        self._by_key: dict[str, GatewayEpisode] = {}
        self._outside = GatewayEpisode(renderer)  # keeps calls outside episodes, by their idempotency keys
        self.counts: Counter[str] = Counter()
        self.forks: Counter[str] = Counter()

    # ------------------------------------------------------------------------------------------ groups, from the coordinator

    async def play(self, request: RunEpisodesRequest) -> GeneratedGroup:
        """Return the group once all its episodes are over. Raises DeadlineExceeded if a task finds no program in time."""
        loop = asyncio.get_running_loop()
        group = EpisodeRun(request, loop.create_future())
        if request.task.environment:
            return await self._play_in_environment(group)
        timer = loop.call_later(self._seconds, self._expire, group)
        self._waiting.extend((group, index) for index in range(request.n))
        self._task_came.set()
        self._warning = self._warning or loop.call_later(timeouts.NO_PROGRAM_ASKS, self._warn_unasked)
        try:
            return await group.done
        finally:  # also if the coordinator withdraws the group
            timer.cancel()
            self._waiting = deque(each for each in self._waiting if each[0] is not group)
            self._leave_all(group)

    async def _play_in_environment(self, group: EpisodeRun) -> GeneratedGroup:
        """Play the group in the environment that its task names. Raises the errors of `players`."""
        assert self.players is not None
        try:
            async with asyncio.TaskGroup() as together:
                for index in range(group.request.n):
                    together.create_task(self.players(group, index))  # type: ignore[arg-type]  # a coroutine
            return await group.done
        except Exception as error:  # noqa: BLE001 - an ExceptionGroup
            raise first_error(error) from None
        finally:
            self._leave_all(group)

    def _leave_all(self, group: EpisodeRun) -> None:
        for episode in group.episodes.values():
            self.close_one(episode, "cancelled")
        group.episodes.clear()  # breaks the reference cycle with the group, so that both are freed at once

    def _warn_unasked(self) -> None:
        if not self._asked and self._waiting:
            log.warning("%d episodes wait, and no program has asked for one (POST /v1/episodes)", len(self._waiting))

    def _expire(self, group: EpisodeRun) -> None:
        unasked = group.request.n - len(group.episodes)
        if unasked and not group.done.done():
            why = f"no program has asked for {unasked} of {group.request.n} episodes of group {group.request.group_id}"
            group.done.set_exception(DeadlineExceeded(self._name, "RunEpisodes", why, self._seconds))
        for episode in list(group.episodes.values()):
            self.close_one(episode, "timeout")

    def _result(self, group: EpisodeRun) -> GeneratedGroup:
        """Return header and encoded payload. A group without trained tokens gets the request's version."""
        request, episodes = group.request, [group.episodes[index] for index in range(group.request.n)]
        # If the run has rewards, players may give none. An episode that is left out stays left out in any case.
        given = not self._rewarded or any(each.left_out or each.reward is not None for each in episodes)
        messages = tuple(Message(each["role"], each["content"]) for each in request.task.messages)
        task = np.array(self._renderer.render(messages, ()) if messages else [], np.int32)
        payload, versions = payload_of(request.group_id, [episode.graph for episode in episodes], task)
        log: dict[str, tuple[int, float]] = {}
        for name, value in chain.from_iterable(episode.log.items() for episode in episodes):
            count, total = log.get(name, (0, 0.0))
            log[name] = (count + 1, total + value)
        oldest, newest = versions or (request.version, request.version)
        earned = [math.nan if each.left_out or each.reward is None else each.reward for each in episodes]
        return GeneratedGroup(
            group_id=request.group_id,
            prompt_tokens=len(payload.prompt),
            response_tokens=payload.lengths.tolist(),
            truncated=payload.finish_reasons.count("length"),
            oldest=oldest,
            newest=newest,
            rewards=earned if given else [],
            outcomes=Outcomes(
                environment=request.task.environment,
                reasons=[LEFT_OUT + each.left_out if each.left_out else each.stop_reason for each in episodes],
                turns=[episode.graph.calls for episode in episodes],
                malformed=[episode.malformed for episode in episodes],
                log=log,
                repeated=dict(group.repeated),
            ),
            payload=types.encode(payload),
        )

    # ------------------------------------------------------------------------------------------ requests of programs

    async def begin(self, key: str, wait: float = 0.0) -> Begun:
        """Begin the next task's episode, for a caller with the gateway's own key. Raises Refused: 401; 429 if no task comes
        within `wait` seconds, or if too many episodes are open."""
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
                self._task_came.clear()
                if not await done_within(self._task_came.wait(), until - now()):
                    raise Refused(429, "no task waits", retry_after=timeouts.GATEWAY_RETRY)
            group, index = self._waiting.popleft()
            episode, task = self.open_one(group, index), group.request.task
            episode.begin()
        return Begun(id=episode.id, key=episode.key, base=f"/episodes/{episode.id}", task=task)

    def episode(self, id: str, key: str) -> GatewayEpisode:
        """Return the open episode with this id and key. A client that sends another key may give the key as the id. Without a
        run and an id, return a new episode for a single call under the gateway's key. Raises Refused: 404 if the episode is not
        open, 401 for a wrong or missing key."""
        if (named := self._by_key.get(id)) is not None:
            return named
        found = self._open.get(id) if id else self._by_key.get(key)
        if id and found is None:
            raise Refused(404, f"there is no episode {id!r}, or it is over")
        if found is not None and _equal_keys(found.key, key):
            return found
        if not id and self._serves and self._is_own(key):
            return GatewayEpisode(self._renderer)
        whose = "the key of the gateway or of an open episode" if self._serves else "the key of an open episode"
        raise Refused(401, f"this key is not {whose}" if key else f"the request needs {whose}")

    def _is_own(self, key: str) -> bool:
        return not self.key or _equal_keys(self.key, key)

    def check(self, key: str) -> None:
        """Check that the key is the gateway's own. Raises Refused, 401, if not."""
        if not self._is_own(key):
            raise Refused(401, "needs the gateway's key")

    def open_one(self, group: EpisodeRun, index: int) -> GatewayEpisode:
        group.episodes[index] = GatewayEpisode(self._renderer, group, index)
        return self._opened(group.episodes[index])

    def _opened(self, episode: GatewayEpisode) -> GatewayEpisode:
        self._open[episode.id] = self._by_key[episode.key] = episode
        self.counts["episodes"] += 1
        return episode

    def play_again(self, episode: GatewayEpisode, why: str) -> None:
        """Discard the episode, so that another can be opened in its place."""
        group = episode.group
        assert group is not None
        del group.episodes[episode.index]
        group.repeated[why] += 1
        self._leave(episode, "cancelled")
        self.counts["played_again"] += 1

    async def call(self, episode: GatewayEpisode, call: PolicyCall, on_text: OnText | None = None) -> Completion:
        """Return the policy's answer. A repeated request gets the first request's answer. The task is cancelled when the client
        hangs up; this withdraws the call and keeps the episode."""
        if episode.over:
            raise Refused(404, f"episode {episode.id} is over ({episode.stop_reason})")
        if episode.ended_early == "parse_error":
            raise Refused(404, f"episode {episode.id} is over: a tool call was malformed (gateway.malformed_reward)")
        name, kept = call.repeats or secrets.token_hex(), episode
        if episode.id not in self._open and name.startswith(KEYED):  # clients outside episodes may use equal keys
            name, kept = f"{name} {xxhash.xxh3_128_hexdigest(msgspec.json.encode(call))}", self._outside
        if (known := kept.answered.get(name)) is not None:
            return known
        shared = kept.under_way.get(name)
        if shared is None:
            work = asyncio.get_running_loop().create_task(self._counted(episode, call, on_text))
            shared = kept.under_way[name] = SharedCall(work)
            work.add_done_callback(partial(_keep, kept, name))
        try:
            return await shared.answer()
        except asyncio.CancelledError:
            if episode.over:  # the end of the episode withdrew the call
                raise Refused(404, f"episode {episode.id} is over ({episode.stop_reason})") from None
            raise

    async def _counted(self, episode: GatewayEpisode, call: PolicyCall, on_text: OnText | None) -> Completion:
        self.counts["calls"] += 1
        self.counts["under_way"] += 1
        began = time.monotonic()
        episode.begin()
        episode.calls_tools()
        try:
            completion = await asyncio.wait_for(self._answer(episode, call, on_text), episode.call_seconds)
        except TimeoutError:
            self.counts["refused_408"] += 1
            raise Refused(408, f"no answer within {episode.call_seconds:g} s (budgets.call)") from None
        except Refused as error:
            self.counts[f"refused_{error.status}"] += 1
            if error.code == TOO_LONG:
                episode.ended_early = "context_overflow"
            raise
        finally:
            self.counts["under_way"] -= 1
            episode.trace(spans.POLICY, began, time.monotonic(), episode.rollout)
        episode.malformed += sum(reply.malformed for reply in completion.replies)
        if episode.malformed and self._malformed_reward is not None:
            episode.ended_early = "parse_error"
        known = {tool.name for tool in call.tools}
        called = (tool.name for reply in completion.replies for tool in reply.message.tool_calls)
        episode.calls_tools(name if name in known else "unknown" for name in called)
        if call.branch:
            episode.branches[call.branch] = completion.id
        return completion

    def reward(self, episode: GatewayEpisode, value: float, completion: str = "") -> None:
        """Set the reward of a completion; empty: of the episode. Raises Refused: 404 if unknown, 400 if not finite."""
        if not math.isfinite(value):
            raise Refused(400, f"reward: {value} is not a finite number", "reward")
        if completion:
            episode.graph.reward(completion, value)
            episode.reward = episode.reward or 0.0
        else:
            episode.reward = value

    async def end(self, episode: GatewayEpisode, stop_reason: str = "") -> None:
        """End the episode: it takes no more calls. Raises Refused, 400, if the reason is not one of `STOP_REASONS`."""
        if stop_reason and stop_reason not in STOP_REASONS:
            raise Refused(400, f"stop_reason: '{stop_reason}' is not one of {', '.join(STOP_REASONS)}", "stop_reason")
        self.close_one(episode, stop_reason or "completed")

    def close_one(self, episode: GatewayEpisode, stop_reason: str) -> None:
        """Close the episode, and finish its group if it was the last. Idempotent."""
        if episode.over:
            return
        if episode.ended_early == "parse_error" and not episode.left_out:
            stop_reason, episode.reward = episode.ended_early, self._malformed_reward
        self._leave(episode, stop_reason)
        self.counts[f"ended_{stop_reason}"] += 1
        self.forks.update(episode.graph.forks)
        if (group := episode.group) is not None:
            group.left -= 1
            if not group.left and not group.done.done():
                try:
                    group.done.set_result(self._result(group))
                except SluiceError as error:
                    group.done.set_exception(error)

    def _leave(self, episode: GatewayEpisode, stop_reason: str) -> None:
        """Close the episode, invalidate its key and withdraw its calls."""
        episode.stop_reason = stop_reason
        episode.enter("")
        self._open.pop(episode.id, None)
        self._by_key.pop(episode.key, None)
        if episode.timer is not None:
            episode.timer.cancel()
        for shared in list(episode.under_way.values()):
            shared.work.cancel()

    # ------------------------------------------------------------------------------------------ status

    @property
    def waiting(self) -> int:
        """Number of tasks that no program has asked for."""
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
    """Remove the finished call. Keep its answer for repeats if the request had an idempotency key."""
    episode.under_way.pop(name, None)
    if name.startswith(KEYED) and not work.cancelled() and work.exception() is None:
        episode.answered[name] = work.result()
        if len(episode.answered) > ANSWERED:
            del episode.answered[next(iter(episode.answered))]


def _equal_keys(one: str, other: str) -> bool:
    """Compare in constant time. A key from a header need not be UTF-8."""
    return hmac.compare_digest(one.encode(), other.encode(errors="surrogateescape"))
