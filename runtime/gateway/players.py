"""Whom a gateway has its tasks played by: the agents of `services.environment`, and what becomes of an episode that fails.

    Episodes.play ── task ──► Players.play ── Run ──► a process of the environment, whose agent calls the gateway
                                  ▲                                     │
                                  └── rewards, figures, the end ◄───────┘

A failure is of one of three kinds. *Infrastructure*: the episode is played again, from the same seed, elsewhere where there is
another; then it is left out. *Data*: the task is at fault; it is left out, and named. *Agent*: it earns its reward, 0 if none.

A process that is lost is one failure, however many episodes it played. It is asked no more until it answers again, or the
coordinator names another in its place.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any, Literal, Protocol

from runtime import timeouts
from runtime.config import Environment
from runtime.config.services import Slow
from runtime.environments.messages import (
    PHASES,
    STOP_REASONS,
    EnvironmentDescription,
    EpisodeEnd,
    EpisodeEvent,
    EpisodeRequest,
)
from runtime.errors import ServiceFault, Unreachable
from runtime.gateway.conversation import Refused
from runtime.gateway.episode import EpisodeRun, GatewayEpisode
from runtime.gateway.episodes import Episodes
from runtime.process.aio import done_within, now
from runtime.types import EpisodeTask

log = logging.getLogger("sluice")

FIGURES = 64  # that an episode may tell
SHOWN = 60  # characters of a reason that is counted
_FIGURE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]{0,63}")


class EnvironmentPort(Protocol):
    """One process that plays episodes of an environment."""

    name: str

    def run(self, request: EpisodeRequest) -> AsyncGenerator[EpisodeEvent, None]:
        """Raises Unreachable."""

    async def cancel(self, episode: str) -> None:
        """Its agent is to end now, and to tell what it earned. Raises Unreachable."""

    async def describe(self, seconds: float) -> EnvironmentDescription:
        """Once it can be reached. Raises Unreachable when that is not within so many seconds."""


Late = Literal["wait", "truncate", "leave out", "repeat"]


def late(slow: Slow, others: int, repeats_left: int) -> Late:
    """What becomes of an episode that is late. `others`: of its group, those that are over and are trained on; `repeats_left`:
    how often it may be played again."""
    if slow == "shrink":
        return "leave out" if others >= 2 else "truncate"
    if slow == "retry":
        return "repeat" if repeats_left > 0 else "leave out"
    return slow


class _Attempt:
    """An episode at one process. `verdict`: how it ended, by whoever knows it first."""

    def __init__(self, port: EnvironmentPort, episode: GatewayEpisode, settings: Environment, repeats_left: int):
        loop = asyncio.get_running_loop()
        self.port, self.episode, self.settings, self.repeats_left = port, episode, settings, repeats_left
        self.verdict: asyncio.Future[EpisodeEnd] = loop.create_future()
        self.known = False  # why it failed: its process had been lost already
        self.repeat = False  # as it was late
        self.runs = False  # its agent does
        self._timers: list[asyncio.TimerHandle] = []
        self._cancelling: asyncio.Task[None] | None = None

    def decide(self, end: EpisodeEnd) -> None:
        if not self.verdict.done():
            self.verdict.set_result(end)

    def result(self) -> EpisodeEnd:
        """Of one that is decided. Where the agent was told to end, it is the agent's own affair that it did not."""
        end = self.verdict.result()
        return EpisodeEnd(stop_reason="timeout") if self._cancelling is not None and end.failure == "infrastructure" else end

    def begin(self) -> None:
        """The agent runs now."""
        self.runs = True
        if self.settings.slow != "wait":
            self._later(self.settings.budgets.episode, self.be_late)

    def be_late(self) -> None:
        """At its deadline, or when the trainer waits for it alone."""
        group, budgets = self.episode.group, self.settings.budgets
        assert group is not None
        ended = sum(each.over and not each.left_out for each in group.episodes.values())
        what = late(self.settings.slow, ended, self.repeats_left)
        if what == "truncate" and self.runs and self._cancelling is None:
            self._cancelling = asyncio.get_running_loop().create_task(self._cancel())
            patience = budgets.scoring + 2 * budgets.cleanup + timeouts.EPISODE_END
            self._later(patience, lambda: self.decide(EpisodeEnd(stop_reason="timeout")))
        elif what in ("repeat", "leave out") or (what == "truncate" and not self.runs):
            self.repeat = what == "repeat"
            self.decide(EpisodeEnd(left_out=True, reason="slow"))

    async def _cancel(self) -> None:
        with suppress(Unreachable):  # whoever reads its events hears of it
            await self.port.cancel(self.episode.id)

    def _later(self, seconds: float, what: Any) -> None:
        self._timers.append(asyncio.get_running_loop().call_later(seconds, what))

    async def close(self) -> None:
        for timer in self._timers:
            timer.cancel()
        if self._cancelling is not None:
            self._cancelling.cancel()
            await asyncio.gather(self._cancelling, return_exceptions=True)


class EpisodeRunner:
    """All methods belong to one event loop."""

    def __init__(self, settings: Mapping[str, Environment], url: str, episodes: Episodes, silence: float, seconds: float):
        """`url`, `episodes`: of the gateway. `silence`: how long a task waits for a process of its environment to be there;
        `seconds`: how long a group may take."""
        self._settings, self._url, self._episodes = settings, url, episodes
        self._silence, self._seconds = silence, seconds
        self._ports: dict[str, Sequence[EnvironmentPort]] = {}
        self._lost: dict[EnvironmentPort, asyncio.Task[None]] = {}  # and who waits for it to answer again
        self._changed = asyncio.Event()
        self._busy: Counter[str] = Counter()  # episodes under way, by process
        self._attempts: dict[str, _Attempt] = {}  # by episode
        self._in_a_row: Counter[str] = Counter()  # failures, by environment
        self.counts: Counter[str] = Counter()

    def use(self, ports: Mapping[str, Sequence[EnvironmentPort]]) -> None:
        """From now on, by environment."""
        self._ports = dict(ports)
        known = {port for each in ports.values() for port in each}
        for port in [port for port in self._lost if port not in known]:
            self._lost.pop(port).cancel()
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def hurry(self, group_id: int) -> None:
        """The trainer waits for this group alone."""
        for attempt in list(self._attempts.values()):
            if attempt.episode.request is not None and attempt.episode.request.group_id == group_id:
                attempt.be_late()

    async def play(self, group: EpisodeRun, index: int) -> None:
        """One episode, until it is over. Raises ServiceFault when too many have failed in a row, or nobody is there to ask."""
        name, until = group.request.task.environment, now() + self._seconds
        settings, tried = self._settings[name], list[str]()
        while True:
            port = await self._choose(name, tried, until)
            tried.append(port.name)
            episode = self._episodes.open_one(group, index)
            episode.call_seconds = settings.budgets.call
            attempt = _Attempt(port, episode, settings, settings.retries + 1 - len(tried))
            end = await self._attempt(attempt, until)
            failed = end.failure == "infrastructure" and not episode.overflowed
            if failed and not attempt.known:
                self._count(name, settings, group.request.group_id, end.reason)
            if attempt.repeat or (failed and attempt.repeats_left > 0 and now() < until):
                self._episodes.play_again(episode, _short(end.reason))
                continue
            self._end(name, episode, end)
            return

    async def _attempt(self, attempt: _Attempt, until: float) -> EpisodeEnd:
        """How it ended; at `until` at the latest."""
        episode = attempt.episode
        self._attempts[episode.id] = attempt
        self._busy[attempt.port.name] += 1
        reading = asyncio.get_running_loop().create_task(self._read(attempt))
        try:
            if await done_within(asyncio.wait({attempt.verdict}), until - now()):
                return attempt.result()
            return EpisodeEnd(stop_reason="timeout") if attempt.runs else EpisodeEnd(left_out=True, reason="never begun")
        finally:
            reading.cancel()
            await asyncio.gather(reading, attempt.close(), return_exceptions=True)
            self._busy[attempt.port.name] -= 1
            del self._attempts[episode.id]

    async def _read(self, attempt: _Attempt) -> None:
        """Its events, until its end is known."""
        port, episode = attempt.port, attempt.episode
        reason = f"{port.name}: it ended without a word"
        try:
            async with aclosing(port.run(self._asked(attempt))) as events:
                async for event in events:
                    if event.phase == "run":
                        attempt.begin()
                    self._heard(episode, event)
                    if event.end is not None:
                        self._reward(episode, event.end)
                        attempt.decide(event.end)
        except Unreachable as error:
            reason = f"{port.name}: {error.reason}"
            attempt.known = self._lose(port)
        except Refused as error:  # a reward of nothing that there is
            reason = str(error)
        except Exception as error:  # a fault of ours, which is not to leave anybody waiting
            if not attempt.verdict.done():
                attempt.verdict.set_exception(error)
            raise
        attempt.decide(EpisodeEnd(failure="infrastructure", reason=reason))

    def _asked(self, attempt: _Attempt) -> EpisodeRequest:
        episode, budgets = attempt.episode, attempt.settings.budgets
        request = episode.request
        assert request is not None
        return EpisodeRequest(
            id=episode.id,
            base_url=f"{self._url}/episodes/{episode.id}",
            api_key=episode.key,
            task=json.dumps(row_of(request.task)),
            seed=episode.seed,
            purpose="train" if request.purpose == "train" else "evaluate",
            call_seconds=budgets.call,
            tool_seconds=budgets.tool,
            setup_seconds=budgets.setup,
            score_seconds=budgets.scoring,
            cleanup_seconds=budgets.cleanup,
        )

    async def _choose(self, name: str, tried: Sequence[str], until: float) -> EnvironmentPort:
        """The one with the fewest episodes, of those that have not failed with this one where there are such."""
        until = min(until, now() + self._silence)
        while not (ports := [port for port in self._ports.get(name, ()) if port not in self._lost]):
            if not await done_within(self._changed.wait(), until - now()):
                raise ServiceFault(f"services.environment.{name}", "play", "no process of it serves", self._silence)
        fresh = [port for port in ports if port.name not in tried]
        return min(fresh or ports, key=lambda port: (self._busy[port.name], port.name))

    def _lose(self, port: EnvironmentPort) -> bool:
        """It cannot be reached. Returns whether that is known."""
        if port in self._lost or not any(port in each for each in self._ports.values()):
            return True
        self._lost[port] = asyncio.get_running_loop().create_task(self._returns(port))
        return False

    async def _returns(self, port: EnvironmentPort) -> None:
        with suppress(Unreachable):  # then it stays lost
            await port.describe(self._silence)
            del self._lost[port]
            self._wake()

    def _heard(self, episode: GatewayEpisode, event: EpisodeEvent) -> None:
        """Raises Refused."""
        if event.phase in PHASES:
            episode.enter(event.phase)
        for name, value in event.log.items():
            if not _FIGURE.fullmatch(name) or len(episode.log) >= FIGURES:
                raise Refused(400, f"log: {name!r} is no name of a figure, or one of more than {FIGURES}")
            episode.log[name] = value
        if event.reward is None:
            return
        of = event.completion_id
        if event.turn is not None:
            of = episode.graph.turn(event.turn)
        elif event.branch:
            of = episode.branches.get(event.branch, f"of branch {event.branch}")
        self._episodes.reward(episode, event.reward, of)

    def _reward(self, episode: GatewayEpisode, end: EpisodeEnd) -> None:
        """Raises Refused."""
        if end.stop_reason and end.stop_reason not in STOP_REASONS:
            raise Refused(400, f"stop_reason: {end.stop_reason!r} is not one of {', '.join(STOP_REASONS)}")
        for completion, value in end.rewards.items():
            self._episodes.reward(episode, value, completion)
        if end.reward is not None:
            self._episodes.reward(episode, end.reward)

    def _end(self, name: str, episode: GatewayEpisode, end: EpisodeEnd) -> None:
        stop_reason = end.stop_reason or "completed"
        if episode.overflowed and (end.failure or stop_reason == "completed"):
            stop_reason = "context_overflow"
        elif end.failure or end.left_out:
            episode.left_out = _short(f"{end.failure}: {end.reason}" if end.failure else end.reason or "its agent's wish")
            stop_reason = "cancelled"
        if end.failure == "data":
            assert episode.request is not None
            of = episode.request.task.source
            log.warning("environment %s: a bad task of %s (group %d): %s", name, of, episode.request.group_id, end.reason)
        if end.failure != "infrastructure":
            self._in_a_row[name] = 0
        if not episode.left_out and episode.reward is None and stop_reason != "completed":
            episode.reward = 0.0  # of an agent that did not come to its end
        self.counts["left_out"] += bool(episode.left_out)
        self._episodes.close_one(episode, stop_reason)

    def _count(self, name: str, settings: Environment, group: int, reason: str) -> None:
        """A failure of infrastructure. Raises ServiceFault where it is one too many."""
        self._in_a_row[name] += 1
        self.counts["failures"] += 1
        log.warning("environment %s: an episode of group %d failed: %s", name, group, reason)
        if self._in_a_row[name] >= settings.failures_in_a_row:
            what = f"{self._in_a_row[name]} failures in a row (failures_in_a_row), the last: {reason}"
            raise ServiceFault(f"services.environment.{name}", "play", what)


def row_of(task: EpisodeTask) -> dict[str, Any]:
    """What an agent is told of its task: the columns of its row, and what was made of them."""
    made = {"messages": task.messages, "label": task.label, "source": task.source}
    return {name: value for name, value in made.items() if value} | task.extra


def _short(reason: str) -> str:
    """As it is counted: of reasons that differ in what stands behind the first colons the beginning."""
    return " ".join(reason.split())[:SHOWN]
