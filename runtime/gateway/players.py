"""Play a gateway's tasks by the agents of `services.environment`, and handle episodes that fail.

    Episodes.play ── task ──► EpisodeRunner.play ── Run ──► a process of the environment, whose agent calls the gateway
                                  ▲                                     │
                                  └── rewards, figures, the end ◄───────┘

There are three kinds of failure. *Infrastructure*: the episode is played again from the same seed, on another process if there
is one; then it is left out. *Data*: the task is wrong; it is left out and logged. *Agent*: it earns its reward, 0 if none.

A lost process counts as one failure, for any number of episodes. It gets no tasks until it answers again, or until the
coordinator names another process in its place.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any, Protocol

from runtime import timeouts
from runtime.config import Config, Environment
from runtime.environments.messages import STOP_REASONS, EnvironmentDescription, EpisodeEnd, EpisodeEvent, EpisodeRequest
from runtime.errors import ServiceFault, Unreachable
from runtime.gateway.conversation import Refused
from runtime.gateway.episodes import EpisodeRun, Episodes, GatewayEpisode
from runtime.process.waiting import done_within, now
from runtime.types import EpisodeTask, RunEpisodesRequest

log = logging.getLogger("sluice")

PHASES = ("setup", "run", "score", "cleanup")
TIMED_OUT = EpisodeEnd(stop_reason="timeout")
FIGURES = 64  # figures that an episode may report
SHOWN = 60  # characters of a reason that are counted
_FIGURE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]{0,63}")


class EnvironmentPort(Protocol):
    """A process that plays episodes of an environment."""

    name: str

    def run(self, request: EpisodeRequest) -> AsyncGenerator[EpisodeEvent, None]:
        """Play the episode and yield its events. Raises Unreachable."""

    async def cancel(self, episode: str) -> None:
        """Ask the agent to end now and to report its reward. Raises Unreachable."""

    async def describe(self, seconds: float) -> EnvironmentDescription:
        """Return the description once the process answers. Raises Unreachable if it does not within `seconds`."""


class _Attempt:
    """An episode at one process. `verdict`: the first known end of the episode."""

    def __init__(self, port: EnvironmentPort, group: EpisodeRun, episode: GatewayEpisode, settings: Environment, left: int):
        self.port, self.group, self.episode, self.settings = port, group, episode, settings
        self.repeats_left = left
        self.verdict: asyncio.Future[EpisodeEnd] = asyncio.get_running_loop().create_future()
        self.known = False  # the episode failed because its process had been lost already
        self.repeat = False  # play the episode again because it was late
        self.runs = False  # the agent runs
        self._timers: list[asyncio.TimerHandle] = []
        self._cancelling: asyncio.Task[None] | None = None

    def decide(self, end: EpisodeEnd) -> None:
        if not self.verdict.done():
            self.verdict.set_result(end)

    def result(self) -> EpisodeEnd:
        """Return the end of a decided attempt. An agent that was asked to end and did not has timed out."""
        end = self.verdict.result()
        return TIMED_OUT if self._cancelling is not None and end.failure == "infrastructure" else end

    def begin(self) -> None:
        """Note that the agent runs now, and start the episode's deadline."""
        self.runs = True
        if self.settings.slow != "wait":
            self._later(self.settings.budgets.episode, self.be_late)

    def be_late(self) -> None:
        """Handle a late episode: its deadline has passed, or the trainer waits only for its group."""
        slow = self.settings.slow
        ended = sum(each.over and not each.left_out for each in self.group.episodes.values())
        if slow == "truncate" or (slow == "shrink" and ended < 2):
            if not self.runs:
                self.decide(EpisodeEnd(left_out=True, reason="slow"))
            elif self._cancelling is None:
                self._cancelling = asyncio.get_running_loop().create_task(self._cancel())
                patience = self.settings.budgets.scoring + 2 * timeouts.AGENT_CLEANUP + timeouts.EPISODE_END
                self._later(patience, lambda: self.decide(TIMED_OUT))
        elif slow != "wait":
            self.repeat = slow == "retry" and self.repeats_left > 0
            self.decide(EpisodeEnd(left_out=True, reason="slow"))

    async def _cancel(self) -> None:
        with suppress(Unreachable):  # `_read` handles a lost process
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
    """Plays episodes by the environments. All methods belong to one event loop."""

    def __init__(self, config: Config, url: str, episodes: Episodes):
        """Create without processes. `url`, `episodes`: of the gateway."""
        self._settings, self._url, self._episodes = config.services.environment, url, episodes
        self._silence, self._seconds = config.deadlines.start, config.deadlines.episode
        self._ports: dict[str, Sequence[EnvironmentPort]] = {}
        self._lost: dict[EnvironmentPort, asyncio.Task[None]] = {}  # with the task that waits until the process answers again
        self._changed = asyncio.Event()
        self._busy: Counter[str] = Counter()  # running episodes, by process
        self._attempts: dict[str, _Attempt] = {}  # by episode
        self._in_a_row: Counter[str] = Counter()  # consecutive failures, by environment
        self.counts: Counter[str] = Counter()

    def use(self, ports: Mapping[str, Sequence[EnvironmentPort]]) -> None:
        """Use these processes from now on, by environment."""
        self._ports = dict(ports)
        known = {port for each in ports.values() for port in each}
        for port in [port for port in self._lost if port not in known]:
            self._lost.pop(port).cancel()
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def finish_group(self, group_id: int) -> None:
        """Treat this group's episodes as late: the trainer waits only for them."""
        for attempt in list(self._attempts.values()):
            if attempt.group.request.group_id == group_id:
                attempt.be_late()

    async def play(self, group: EpisodeRun, index: int) -> None:
        """Play one episode to its end. Raises ServiceFault after too many failures in a row, or if no process serves."""
        name, until = group.request.task.environment, now() + self._seconds
        settings, tried = self._settings[name], list[str]()
        while True:
            port = await self._choose(name, tried, until)
            tried.append(port.name)
            episode = self._episodes.open_one(group, index)
            episode.call_seconds = settings.budgets.call
            attempt = _Attempt(port, group, episode, settings, settings.retries + 1 - len(tried))
            end = await self._attempt(attempt, until)
            failed = end.failure == "infrastructure" and not episode.ended_early
            if failed and not attempt.known:
                self._count(name, settings, group.request.group_id, end.reason)
            if attempt.repeat or (failed and attempt.repeats_left > 0 and now() < until):
                self._episodes.play_again(episode, _counted_as(end.reason))
                continue
            self._end(group.request, episode, end)
            return

    async def _attempt(self, attempt: _Attempt, until: float) -> EpisodeEnd:
        """Return the end of the attempt, at `until` at the latest."""
        episode = attempt.episode
        self._attempts[episode.id] = attempt
        self._busy[attempt.port.name] += 1
        reading = asyncio.get_running_loop().create_task(self._read(attempt))
        try:
            if await done_within(asyncio.wait({attempt.verdict}), until - now()):
                return attempt.result()
            return TIMED_OUT if attempt.runs else EpisodeEnd(left_out=True, reason="never begun")
        finally:
            reading.cancel()
            await asyncio.gather(reading, attempt.close(), return_exceptions=True)
            self._busy[attempt.port.name] -= 1
            del self._attempts[episode.id]

    async def _read(self, attempt: _Attempt) -> None:
        """Read the events of the episode until its end is known."""
        port, episode = attempt.port, attempt.episode
        reason = f"{port.name}: the episode ended without a result"
        try:
            async with aclosing(port.run(self._request_of(attempt))) as events:
                async for event in events:
                    if event.phase == "run":
                        attempt.begin()
                    self._apply(episode, event)
                    if event.end is not None:
                        self._reward(episode, event.end)
                        attempt.decide(event.end)
        except Unreachable as error:
            reason = f"{port.name}: {error.reason}"
            attempt.known = self._mark_lost(port)
        except Refused as error:  # the reward names an unknown completion, or the report is invalid
            reason = str(error)
        except Exception as error:  # a fault of this code; raise it in `play`, which waits for the verdict
            if not attempt.verdict.done():
                attempt.verdict.set_exception(error)
            raise
        attempt.decide(EpisodeEnd(failure="infrastructure", reason=reason))

    def _request_of(self, attempt: _Attempt) -> EpisodeRequest:
        episode, request, budgets = attempt.episode, attempt.group.request, attempt.settings.budgets
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
            cleanup_seconds=timeouts.AGENT_CLEANUP,
        )

    async def _choose(self, name: str, tried: Sequence[str], until: float) -> EnvironmentPort:
        """Return the process with the fewest episodes. Prefer processes that have not failed with this episode."""
        until = min(until, now() + self._silence)
        while not (ports := [port for port in self._ports.get(name, ()) if port not in self._lost]):
            if not await done_within(self._changed.wait(), until - now()):
                why = "no process of the environment serves"
                raise ServiceFault(f"services.environment.{name}", "play", why, self._silence)
        fresh = [port for port in ports if port.name not in tried]
        return min(fresh or ports, key=lambda port: (self._busy[port.name], port.name))

    def _mark_lost(self, port: EnvironmentPort) -> bool:
        """Mark the process as lost. Return True if it is known to be lost, or no longer used."""
        if port in self._lost or not any(port in each for each in self._ports.values()):
            return True
        self._lost[port] = asyncio.get_running_loop().create_task(self._await_return(port))
        return False

    async def _await_return(self, port: EnvironmentPort) -> None:
        with suppress(Unreachable):  # the process stays lost
            await port.describe(self._silence)
            del self._lost[port]
            self._wake()

    def _apply(self, episode: GatewayEpisode, event: EpisodeEvent) -> None:
        """Apply an event: phase, figures, reward. Raises Refused if it is invalid."""
        if event.phase in PHASES:
            episode.enter(event.phase)
        for name, value in event.log.items():
            if not _FIGURE.fullmatch(name) or len(episode.log) >= FIGURES:
                raise Refused(400, f"log: {name!r} is not a valid name of a figure, or exceeds {FIGURES} figures")
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
        """Set the rewards at the end of an episode. Raises Refused if the end is invalid."""
        if end.stop_reason and end.stop_reason not in STOP_REASONS:
            raise Refused(400, f"stop_reason: {end.stop_reason!r} is not one of {', '.join(STOP_REASONS)}")
        for completion, value in end.rewards.items():
            self._episodes.reward(episode, value, completion)
        if end.reward is not None:
            self._episodes.reward(episode, end.reward)

    def _end(self, request: RunEpisodesRequest, episode: GatewayEpisode, end: EpisodeEnd) -> None:
        name, stop_reason = request.task.environment, end.stop_reason or "completed"
        if episode.ended_early and (end.failure or stop_reason == "completed"):
            stop_reason = episode.ended_early
        elif end.failure or end.left_out:
            episode.left_out = _counted_as(f"{end.failure}: {end.reason}" if end.failure else end.reason or "its agent's wish")
            stop_reason = "cancelled"
        if end.failure == "data":
            of = request.task.source
            log.warning("environment %s: a bad task of %s (group %d): %s", name, of, request.group_id, end.reason)
        if end.failure != "infrastructure":
            self._in_a_row[name] = 0
        if not episode.left_out and episode.reward is None and stop_reason != "completed":
            episode.reward = 0.0  # the agent did not complete the episode
        self.counts["left_out"] += bool(episode.left_out)
        self._episodes.close_one(episode, stop_reason)

    def _count(self, name: str, settings: Environment, group: int, reason: str) -> None:
        """Count an infrastructure failure. Raises ServiceFault if there are too many in a row."""
        self._in_a_row[name] += 1
        self.counts["failures"] += 1
        log.warning("environment %s: an episode of group %d failed: %s", name, group, reason)
        if self._in_a_row[name] >= settings.failures_in_a_row:
            what = f"{self._in_a_row[name]} failures in a row (failures_in_a_row), the last: {reason}"
            raise ServiceFault(f"services.environment.{name}", "play", what)


def row_of(task: EpisodeTask) -> dict[str, Any]:
    """Return the task as the agent receives it: the columns of its row, and the fields made from them."""
    made = {"messages": task.messages, "label": task.label, "source": task.source}
    return {name: value for name, value in made.items() if value} | task.extra


def _counted_as(reason: str) -> str:
    """Return the beginning of a reason, so that reasons which differ only in details are counted together."""
    return " ".join(reason.split())[:SHOWN]
