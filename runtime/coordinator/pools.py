"""The processes that a run calls: living rollouts, what happens to the work of a lost one, and the roles that score."""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
from msgspec.structs import replace

from runtime import types
from runtime.cluster.topology import UPDATED
from runtime.commands import RolePort
from runtime.config import Config
from runtime.coordinator.register import ROLLOUT, Member, Register, Unit, UnitChange, UnitState, member_of
from runtime.coordinator.weight_sync_protocol import Epoch, Membership
from runtime.data.handlers import Problem
from runtime.errors import InvariantViolated, ServiceFault, Unanswered, Unreachable
from runtime.process.keys import GATEWAY
from runtime.process.waiting import done_within, now, still_missing
from runtime.rewards.scorer import combine, played
from runtime.telemetry.metrics import SpanClock
from runtime.types import Command, GeneratedGroup, GroupRequest, PolicyVersion, RunEpisodesRequest, ScoreRequest, Scores

R = TypeVar("R")


def models(register: Register) -> list[Unit]:
    return [unit for role in UPDATED for unit in register.units(role)]


async def wait_for(register: Register, missing: Callable[[], Sequence[str]], deadline: float) -> Sequence[str]:
    """Wait until nothing is missing in the register, or until `deadline` on the loop's clock. Return what is still missing."""
    changed = asyncio.Event()

    def look(_: UnitChange) -> None:
        changed.set()

    register.subscribe(look)
    try:
        return await still_missing(missing, changed, deadline)
    finally:
        register.unsubscribe(look)


class Replicas:
    """Interchangeable replicas of a role, called in turn. A replica that does not answer in time is lost. Its request goes to
    another replica, or waits for the replacement if there is none. No request is skipped."""

    def __init__(self, register: Register, role: str, patience: float):
        """Create the view. `patience`: seconds that a request waits if there is no replica."""
        self._register, self._role, self._patience = register, role, patience

    def __bool__(self) -> bool:
        return bool(self._register.units(self._role))

    @property
    def _serving(self) -> Sequence[Unit]:
        return self._register.units(self._role, UnitState.SERVING)

    async def ask(
        self, turn: int, request: Command[R], asked: set[str] | None = None, answered: list[Callable[[], None]] | None = None
    ) -> R:
        """Return the answer of a replica. `asked` has the replica's name until then; `answered` gets the callback that
        acknowledges the answer. Raises the replica's error, or ServiceFault if there is no replica for `patience` seconds."""
        names: set[str] = set() if asked is None else asked
        while True:
            replica = await self._choose(turn)
            names.add(replica.name)
            try:
                answer = await replica.call(request)
                if answered is not None:
                    answered.append(partial(replica.acknowledge, request))
                return answer
            except (Unreachable, Unanswered) as error:
                self._lose(replica, error)
            finally:
                names.discard(replica.name)

    async def broadcast(self, command: Command[None]) -> None:
        """Send `command` to all serving replicas and wait for the answers. Ignore replicas that are lost meanwhile."""

        async def send(replica: RolePort) -> None:
            try:
                await replica.call(command)
            except (Unreachable, Unanswered) as error:
                self._lose(replica, error)

        await asyncio.gather(*(send(unit.port) for unit in self._serving))

    def _lose(self, replica: RolePort, error: ServiceFault) -> None:
        self._register.lose(replica, error.reason if isinstance(error, Unreachable) else str(error))

    async def _choose(self, turn: int) -> RolePort:
        while not (serving := self._serving):  # check again: the replica may be lost before this task runs
            if await wait_for(self._register, lambda: () if self._serving else (self._role,), now() + self._patience):
                why = "; ".join(f"{unit.name}: {unit.reason}" for unit in self._register.units(self._role) if unit.reason)
                raise ServiceFault(self._role, "run", f"{why}; no replacement has come", self._patience)
        return cast(RolePort, serving[turn % len(serving)].port)


def scorers(register: Register, patience: float) -> dict[str, Replicas]:
    """Return the scorers of replies by phase. `patience`: see `Replicas`."""
    return {phase: Replicas(register, role, patience) for role, phase in types.SCORERS.items()}


class Roles:
    """The roles that a run needs besides rollouts. An attempt keeps the trainer and the critic that it began with."""

    def __init__(self, register: Register, patience: float, taken_up: Sequence[Any] = ()):
        """Look up the roles. `patience`: see `Replicas`. `taken_up`: the trainer and the critic to go on with, which may be
        lost. Raises Unreachable if trainer or critic is lost otherwise."""
        self.scorers = scorers(register, patience)
        self.references = Replicas(register, "reference", patience)
        trained = models(register)
        if (lost := next((unit for unit in trained if unit.port is None), None)) and not taken_up:
            raise Unreachable(lost.name, "start", lost.reason)
        self.models: list[RolePort] = [*(taken_up or (unit.port for unit in trained))]
        self.trainer = self.models[0]
        self.critic: RolePort | None = self.models[1] if len(trained) > 1 else None


class RewardScoring:
    """Asks one replica of each role that gives rewards. Adds up these rewards and the environment's."""

    def __init__(
        self, scorers: Mapping[str, Replicas], environment: float, spans: SpanClock | None = None, unrewarded: int = 0
    ):
        """Create the scoring. `environment`: the factor of the environment's rewards. `spans`: gets the time by phase.
        `unrewarded`: the size of groups without any reward, which get reward 0; 0 forbids such groups."""
        self._scorers = {phase: replicas for phase, replicas in scorers.items() if replicas}
        self._spans, self._environment, self._unrewarded = spans, environment, unrewarded

    async def score(
        self,
        request: ScoreRequest,
        given: Sequence[float],
        turn: int,
        asked: set[str] | None = None,
        answered: list[Callable[[], None]] | None = None,
    ) -> Scores:
        """Score one group. `given`: `GeneratedGroup.rewards`. `turn`, `asked` and `answered` as in `Replicas.ask`."""

        async def ask(phase: str, replicas: Replicas) -> Scores:
            with self._spans.span(phase) if self._spans else nullcontext():
                return await replicas.ask(turn, request, asked, answered)

        parts = await asyncio.gather(*(ask(phase, replicas) for phase, replicas in self._scorers.items()))
        if given and self._environment:
            parts.append(played(request.group_id, self._environment, given))
        if parts:
            return combine(parts)
        if not self._unrewarded:
            raise InvariantViolated(f"group {request.group_id} has no reward: no rule, reward model or environment gives one")
        rewards, valid = np.zeros(self._unrewarded, np.float32), np.ones(self._unrewarded, np.uint8)
        return Scores(group_id=request.group_id, rewards=rewards, valid=valid)


class RolloutLoads:
    """Samples under way by rollout, and the rollout with the fewest for its slots: the top of a heap, O(log n) for a group.
    Outdated entries are dropped when they reach the top."""

    def __init__(self, slots: Mapping[str, int]):
        self.samples = Counter[Member]()
        self.slots = slots
        self._among: tuple[Member, ...] = ()
        self._index: dict[Member, int] = {}  # in `_among`
        self._heap: list[tuple[float, int]] = []  # a load, and the index of its member; the load may be outdated

    def add(self, member: Member, samples: int) -> None:
        self.samples[member] += samples
        if member in self._index:
            heapq.heappush(self._heap, (self._load(member), self._index[member]))

    def least(self, among: tuple[Member, ...]) -> Member:
        """Return the first member of `among` with the lowest load. Requires a nonempty `among`."""
        if among is not self._among or len(self._heap) > 4 * len(among) + 64:
            self._among, self._index = among, {member: index for index, member in enumerate(among)}
            self._heap = sorted((self._load(member), index) for index, member in enumerate(among))
        while True:
            load, index = self._heap[0]
            if load == self._load(self._among[index]):
                return self._among[index]
            heapq.heappop(self._heap)

    def _load(self, member: Member) -> float:
        return self.samples[member] / self.slots[member.name]


class RolloutPool:
    """The rollouts, and the gateways before them if the run has any. A rollout serves once it has the committed version.

    Groups are spread over the *players*, the gateways, else the rollouts, by samples under way for each slot. A lost unit fails
    all its calls with Unreachable, and another one generates its groups."""

    def __init__(self, register: Register, slots: Mapping[str, int], patience: float, term: int = 1, gateways: int = 0):
        """Create the pool. `slots`: how many sequences each rollout runs at once, by name. `patience`: seconds that a run goes
        on without any rollout. `term`: see `Membership`. `gateways`: how many play the groups; 0: the rollouts get them."""
        self.register = register
        self.membership = Membership(register, term)
        self.slots = dict(slots)
        """The slots of each possible or former unit: a unit that is being removed may serve for a moment yet."""
        for index in range(gateways):
            self.slots[f"{GATEWAY}-{index}"] = max(1, sum(slots.values()) // gateways)
        self._player = GATEWAY if gateways else ROLLOUT
        self._loads = RolloutLoads(self.slots)
        self._changed = asyncio.Event()
        self._watchers: list[Callable[[], None]] = [self._changed.set]
        self._patience = patience
        self._lost = self._repeated = 0  # since `close_step`
        self._closed = False
        register.subscribe(self._look)

    # ------------------------------------------------------------------------------------------ membership

    def _look(self, change: UnitChange) -> None:
        self._lost += change.lost and change.unit.role == ROLLOUT
        if change.unit.role in (ROLLOUT, self._player):
            self._notify()

    def subscribe(self, watcher: Callable[[], None]) -> None:
        """Call `watcher` whenever a unit arrives, is lost, or begins to serve."""
        self._watchers.append(watcher)

    def unsubscribe(self, watcher: Callable[[], None]) -> None:
        """Remove `watcher`. Idempotent."""
        self._watchers = [other for other in self._watchers if other != watcher]

    def _notify(self) -> None:
        for watcher in self._watchers:
            watcher()

    def commit(self, epoch: Epoch, version: PolicyVersion, swapped: Collection[str]) -> None:
        """Commit `version` in `epoch`. The members named in `swapped` have it; the other members were lost."""
        self.membership.commit(epoch.number, version, [member for member in epoch.members if member.name in swapped])
        self._notify()

    def take_up(self, version: PolicyVersion, having: Collection[Member]) -> None:
        """Take over the version that an earlier coordinator committed. The members `having` it serve."""
        self.membership.take_up(version, having)
        self._notify()

    def serve_as_loaded(self) -> None:
        """Let all living rollouts serve with the weights that they loaded, in a run without weight sync."""
        epoch = self.membership.open()
        self.commit(epoch, PolicyVersion(), {member.name for member in epoch.members})

    def close(self) -> None:
        """Admit no groups until `open`: other roles use the rollouts' devices."""
        self._closed = True

    def open(self) -> None:
        self._closed = False
        self._notify()

    async def wait_for_living(self) -> None:
        """Wait until a rollout lives. Raises ServiceFault if none comes in time."""
        await self._until(lambda: bool(self.membership.living))

    async def guard(self) -> None:
        """Watch until cancelled. Raises ServiceFault with the lost rollouts once none has served for `patience` seconds. While
        the pool is closed, where a newcomer cannot begin to serve, a living rollout is enough."""

        while True:
            await self._until(lambda: bool(self.membership.serving or (self._closed and self.membership.living)))
            self._changed.clear()
            await self._changed.wait()

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():  # check again: it may have changed before this task runs
            if not await done_within(self._wait(holds), self._patience):
                who, why = ", ".join(unit.name for unit in self._losses), "; ".join(unit.reason for unit in self._losses)
                message = f"{why or 'lost'}; no rollout has served since"
                raise ServiceFault(who or "rollout", "run", message, self._patience)

    async def _wait(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._changed.clear()
            await self._changed.wait()

    # ------------------------------------------------------------------------------------------ groups

    def units(self, role: str = ROLLOUT) -> list[RolePort]:
        return [unit.port for unit in self.register.units(role, UnitState.SERVING)]

    @property
    def admitting(self) -> list[RolePort]:
        """The rollouts that work on groups now."""
        return [] if self._closed else self.units()

    @property
    def admits(self) -> bool:
        """Whether any player is given groups now."""
        return not self._closed and bool(self.membership.serving and self.register.members(self._player, UnitState.SERVING))

    def least_loaded(self) -> RolePort:
        """Return the serving player with the lowest load. Requires one."""
        return cast(RolePort, self.register.port(self._loads.least(self.register.members(self._player, UnitState.SERVING))))

    def find(self, name: str) -> RolePort | None:
        """Return the unit called `name`, if it is connected."""
        unit = self.register.find(name)
        return None if unit is None else unit.port

    def load(self, who: RolePort) -> int:
        """Return the unit's samples under way."""
        return self._loads.samples[member_of(who)]

    async def generate(
        self, who: RolePort, request: GroupRequest | RunEpisodesRequest, first: Awaitable[None] | None = None
    ) -> GeneratedGroup:
        """Send the request to `who` once `first` is done. Raises Unreachable if the unit is lost or does not answer in time."""
        member = member_of(who)
        if isinstance(request, RunEpisodesRequest):
            request = replace(request, version=self.membership.committed or PolicyVersion())
        self._loads.add(member, request.n)
        try:
            if first is not None:
                await first
            return await who.call(request)
        except Unanswered as error:
            self.register.lose(member, str(error))
            raise Unreachable(who.name, error.phase, error.reason) from error
        except Unreachable as error:
            self.register.lose(member, error.reason)
            raise
        finally:
            self._loads.add(member, -request.n)

    async def generate_anywhere(self, request: GroupRequest | RunEpisodesRequest) -> GeneratedGroup:
        """Send the request to the least loaded player, again after a loss. `guard` limits how long this may go on."""
        while True:
            await self._wait(lambda: self.admits)
            try:
                return await self.generate(self.least_loaded(), request)
            except Unreachable:
                self.repeat()

    def repeat(self) -> None:
        """Count a group that is requested again after the loss of its unit."""
        self._repeated += 1

    # ------------------------------------------------------------------------------------------ figures

    def close_step(self) -> dict[str, float]:
        """Return the metrics: the rollouts that serve now, and the losses since the last call."""
        figures = {
            "rollout/serving": float(len(self.membership.serving)),
            "rollout/lost": float(self._lost),
            "rollout/repeated_groups": float(self._repeated),
        }
        self._lost = self._repeated = 0
        return figures

    def __str__(self) -> str:
        """Return one line: the epoch, its serving rollouts, the newcomers, and the lost rollouts with reasons."""
        parts = [f"epoch {self.membership.epoch.number}: {_names(self.membership.serving) or 'no rollout'}"]
        if newcomers := _names(self.membership.newcomers):
            parts.append(f"catching up: {newcomers}")
        return ", ".join([*parts, *(f"lost: {unit.name} ({unit.reason})" for unit in self._losses)])

    @property
    def _losses(self) -> list[Unit]:
        """The lost rollouts without a replacement."""
        return [unit for unit in self.register.units(ROLLOUT) if unit.reason]


def _names(members: Sequence[Member]) -> str:
    return ", ".join(member.name for member in members)


def _of_scoring(problem: Problem) -> dict[str, Any]:
    return {"label": problem.label, "source": problem.source, "messages": problem.messages, "extra": problem.extra}


def score_request(problem: Problem, **rest: Any) -> ScoreRequest:
    """Build the request for the scores of replies to `problem`. `rest`: the other fields."""
    return ScoreRequest(**_of_scoring(problem), **rest)


def request_for(config: Config, problem: Problem, prompt: np.ndarray, **rest: Any) -> GroupRequest | RunEpisodesRequest:
    """Build the request for replies to `prompt`, or for episodes of the task with gateways. `rest`: the other fields."""
    if config.gateway is None:
        return GroupRequest(prompt=prompt, **rest)
    task = types.EpisodeTask(environment=problem.environment, **_of_scoring(problem))
    return RunEpisodesRequest(task=task, **rest)
