"""The living rollouts: whom a group goes to, and what happens to the work of one that is lost."""

from __future__ import annotations

import asyncio
import heapq
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TypeVar

import numpy as np

from runtime.commands import RolePort, TrainerPort
from runtime.coordinator.register import ROLLOUT, Member, Register, Unit, UnitChange, UnitState, member_of
from runtime.coordinator.weight_sync_protocol import Epoch, Membership
from runtime.errors import InvariantViolated, ServiceFault, Unanswered, Unreachable
from runtime.process.aio import done_within, now, still_missing
from runtime.process.keys import GATEWAY
from runtime.rewards.scorer import combine, played
from runtime.telemetry.metrics import SpanClock
from runtime.types import SCORERS, Command, GeneratedGroup, GroupRequest, PlayRequest, PolicyVersion, ScoreRequest, Scores

# ---- Roles
#
# Whom the run asks, by role; what becomes of a request whose replica is lost, and who is asked for scores.

UPDATED = ("trainer", "critic")  # the roles whose groups hold what no other process can get, but from a checkpoint

R = TypeVar("R")


def models(register: Register) -> list[Unit]:
    """The units of trainer and critic."""
    return [unit for role in UPDATED for unit in register.units(role)]


async def wait_for(register: Register, missing: Callable[[], Sequence[str]], deadline: float) -> Sequence[str]:
    """What is missing in the register at `deadline`, on the loop's clock; nothing as soon as nothing is."""
    changed = asyncio.Event()

    def look(_: UnitChange) -> None:
        changed.set()

    register.subscribe(look)
    try:
        return await still_missing(missing, changed, deadline)
    finally:
        register.unsubscribe(look)


class Replicas:
    """Interchangeable replicas of a role, which take turns. One that does not answer in time is lost. A request whose replica
    is lost goes to another; when there is none, it waits for the process that comes in its place. No request is left out.
    """

    def __init__(self, register: Register, role: str, patience: float):
        """`patience`: seconds that a request waits when there is no replica."""
        self._register, self._role = register, role
        self._patience = patience

    def __bool__(self) -> bool:
        """Whether the run has such a role."""
        return bool(self._register.units(self._role))

    @property
    def _serving(self) -> Sequence[Unit]:
        return self._register.units(self._role, UnitState.SERVING)

    async def ask(
        self,
        turn: int,
        request: Command[R],
        asked: set[str] | None = None,
        answered: list[Callable[[], None]] | None = None,
    ) -> R:
        """The answer of a replica, whose name is in `asked` until then; `answered` gets what tells it that the answer is safe.
        Raises what it raised, or ServiceFault when there is none for `patience` seconds."""
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

    async def tell(self, command: Command[None]) -> None:
        """All that serve carry out `command`, but for those that are lost meanwhile."""

        async def told(replica: RolePort) -> None:
            try:
                await replica.call(command)
            except (Unreachable, Unanswered) as error:
                self._lose(replica, error)

        await asyncio.gather(*(told(unit.port) for unit in self._serving))

    def _lose(self, replica: RolePort, error: ServiceFault) -> None:
        self._register.lose(replica, error.reason if isinstance(error, Unreachable) else str(error))

    async def _choose(self, turn: int) -> RolePort:
        def missing() -> list[str]:
            return [] if self._serving else [self._role]

        while not (serving := self._serving):  # again, as it may be lost before the waiter's turn
            if await wait_for(self._register, missing, now() + self._patience):
                why = "; ".join(f"{unit.name}: {unit.reason}" for unit in self._register.units(self._role) if unit.reason)
                raise ServiceFault(self._role, "run", f"{why}; no other has come", self._patience)
        replica: RolePort = serving[turn % len(serving)].port
        return replica


class EvaluationRoles:
    """Who scores replies: all that an evaluation needs besides rollouts."""

    def __init__(self, register: Register, patience: float):
        """`patience`: as of `Replicas`."""
        self.scorers = {phase: Replicas(register, role, patience) for role, phase in SCORERS.items()}


class Roles(EvaluationRoles):
    """With the groups under training that serve now: an attempt has those that it began with."""

    def __init__(self, register: Register, patience: float):
        """Raises Unreachable when trainer or critic is lost."""
        super().__init__(register, patience)
        self.references: Replicas = Replicas(register, "reference", patience)
        trained = models(register)
        if lost := next((unit for unit in trained if unit.port is None), None):
            raise Unreachable(lost.name, "start", lost.reason)
        self.trainer: TrainerPort = trained[0].port
        self.critic: RolePort | None = trained[1].port if len(trained) > 1 else None


class RewardScoring:
    """Asks one replica of each role that gives rewards, and adds up what they answer and what who played gave."""

    def __init__(self, roles: EvaluationRoles, environment: float, spans: SpanClock | None = None, unrewarded: int = 0):
        """`environment`: the factor of what who played gave; 0: it is not looked at. `spans`: accounts the time as that of the
        phases of `SCORERS`. `unrewarded`: of how many samples is a group that nobody gives a reward, which is 0 then; 0: there
        is no such group."""
        self._replicas = {phase: replicas for phase, replicas in roles.scorers.items() if replicas}
        self._spans = spans
        self._environment, self._unrewarded = environment, unrewarded

    async def score(
        self,
        request: ScoreRequest,
        given: Sequence[float],
        turn: int,
        asked: set[str] | None = None,
        answered: list[Callable[[], None]] | None = None,
    ) -> Scores:
        """`given`: `GeneratedGroup.rewards`. Replicas take turns. `asked` holds, until this returns, the names of those that
        have not answered; `answered` as in `Replicas.ask`."""

        async def ask(phase: str, replicas: Replicas) -> Scores:
            with self._spans.span(phase) if self._spans else nullcontext():
                return await replicas.ask(turn, request, asked, answered)

        parts = await asyncio.gather(*(ask(phase, replicas) for phase, replicas in self._replicas.items()))
        if given and self._environment:
            parts.append(played(request.group_id, self._environment, given))
        if not parts and self._unrewarded:
            rewards, valid = np.zeros(self._unrewarded, np.float32), np.ones(self._unrewarded, np.uint8)
            return Scores(group_id=request.group_id, rewards=rewards, valid=valid)
        if not parts:
            raise InvariantViolated(f"group {request.group_id}: nobody gives it a reward")
        return combine(parts)


class RolloutLoads:
    """Samples under way by rollout, and who has the fewest for its slots. That one is at the top of a heap, whose outdated
    entries are dropped as they get there: so a group costs O(log n) of n rollouts."""

    def __init__(self, slots: Mapping[str, int]):
        self.samples = Counter[Member]()
        self.slots = slots
        self._among: tuple[Member, ...] = ()
        self._places: dict[Member, int] = {}  # in `_among`
        self._heap: list[tuple[float, int]] = []  # a load, and the place of who has or had it

    def add(self, member: Member, samples: int) -> None:
        self.samples[member] += samples
        if member in self._places:
            heapq.heappush(self._heap, (self._load(member), self._places[member]))

    def least(self, among: tuple[Member, ...]) -> Member:
        """Of `among`, which is not empty; the first of several."""
        if among is not self._among or len(self._heap) > 4 * len(among) + 64:
            self._among, self._places = among, {member: place for place, member in enumerate(among)}
            self._heap = sorted((self._load(member), place) for place, member in enumerate(among))
        while True:
            load, place = self._heap[0]
            if load == self._load(self._among[place]):
                return self._among[place]
            heapq.heappop(self._heap)

    def _load(self, member: Member) -> float:
        return self.samples[member] / self.slots[member.name]


class WorkPool(ABC):
    """Spreads groups over the units of a role that serve: each goes to whoever has the fewest samples under way for its slots.
    One that is lost fails every call under way with Unreachable: its groups are another's to make.
    """

    def __init__(self, register: Register, role: str, slots: Mapping[str, int]):
        """`slots`: how many sequences each has at once, by name."""
        self.register = register
        self._role = role
        self._loads = RolloutLoads(slots)
        self._changed = asyncio.Event()
        self._watchers: list[Callable[[], None]] = [self._changed.set]
        register.subscribe(self._look)

    def _look(self, change: UnitChange) -> None:
        if change.unit.role == self._role:
            self._notify()

    @property
    def slots(self) -> Mapping[str, int]:
        """Of each unit that there may be, or has been: one that is to go may serve for a moment yet."""
        return self._loads.slots

    @slots.setter
    def slots(self, slots: Mapping[str, int]) -> None:
        self._loads.slots = {**self._loads.slots, **slots}

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """Whether those that serve are given groups now."""

    @property
    def serving(self) -> list[RolePort]:
        return [unit.port for unit in self.register.units(self._role, UnitState.SERVING)]

    @property
    def admitting(self) -> list[RolePort]:
        """Those that are given groups now."""
        return self.serving if self.is_open else []

    @property
    def admits(self) -> bool:
        """Whether there is one of them."""
        return self.is_open and bool(self.register.units(self._role, UnitState.SERVING))

    def least_loaded(self) -> RolePort:
        """Of those that admit, of whom there is at least one."""
        least: RolePort = self.register.port(self._loads.least(self.register.members(self._role, UnitState.SERVING)))
        return least

    @abstractmethod
    def repeat(self) -> None:
        """Count a group that is asked for again because who had it was lost."""

    def subscribe(self, watcher: Callable[[], None]) -> None:
        """`watcher` is called whenever somebody arrived, was lost, or began to serve."""
        self._watchers.append(watcher)

    def unsubscribe(self, watcher: Callable[[], None]) -> None:
        """Idempotent."""
        self._watchers = [other for other in self._watchers if other != watcher]

    def find(self, name: str) -> RolePort | None:
        """The unit called `name`, if it is connected."""
        unit = self.register.find(name)
        return None if unit is None else unit.port

    def load(self, who: RolePort) -> int:
        """Its samples under way."""
        return self._loads.samples[member_of(who)]

    async def generate(
        self, who: RolePort, request: GroupRequest | PlayRequest, first: Awaitable[None] | None = None
    ) -> GeneratedGroup:
        """It is asked once `first` is done. Raises Unreachable when it is lost meanwhile, as it is when it does not answer in
        time."""
        member = member_of(who)
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

    async def generate_anywhere(self, request: GroupRequest | PlayRequest) -> GeneratedGroup:
        """By the least loaded, and again by another when it is lost meanwhile. `RolloutPool.guard` says how long that may go
        on."""
        while True:
            await self._wait(lambda: self.admits)
            try:
                return await self.generate(self.least_loaded(), request)
            except Unreachable:
                self.repeat()

    async def _wait(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._changed.clear()
            await self._changed.wait()

    def _notify(self) -> None:
        for watcher in self._watchers:
            watcher()


class RolloutPool(WorkPool):
    """The rollouts, which serve once they have the committed version."""

    def __init__(self, register: Register, slots: Mapping[str, int], patience: float, term: int = 1):
        """`patience`: seconds that a run goes on without any rollout. `term`: as of `Membership`."""
        super().__init__(register, ROLLOUT, slots)
        self.membership = Membership(register, term)
        self.players: WorkPool = self
        """Who is given the groups under training and evaluation: the rollouts themselves, or the gateways before them."""
        self._patience = patience
        self._lost = self._repeated = 0  # since `close_step`
        self._closed = False

    # ------------------------------------------------------------------------------------------ who is there

    def _look(self, change: UnitChange) -> None:
        self._lost += change.lost and change.unit.role == ROLLOUT
        super()._look(change)

    def commit(self, epoch: Epoch, version: PolicyVersion, swapped: Collection[str]) -> None:
        """The members called `swapped` of `epoch` have `version`, which counts; the others were lost."""
        self.membership.commit(epoch.number, version, [member for member in epoch.members if member.name in swapped])
        self._notify()

    def take_up(self, version: PolicyVersion, having: Collection[Member]) -> None:
        """`version` counts, and those `having` it serve: an earlier coordinator has seen to that."""
        self.membership.take_up(version, having)
        self._notify()

    def serve_as_loaded(self) -> None:
        """Where nothing is published: everybody who lives serves with the weights that it loaded."""
        epoch = self.membership.open()
        self.commit(epoch, PolicyVersion(), {member.name for member in epoch.members})

    @property
    def gateways(self) -> list[RolePort]:
        """Those that have the rollouts' episodes played, where there are any."""
        return [unit.port for unit in self.register.units(GATEWAY, UnitState.SERVING)]

    @property
    def is_open(self) -> bool:
        return not self._closed

    def close(self) -> None:
        """Nothing is asked to be generated until `open`: the rollouts' devices are another's."""
        self._closed = True

    def open(self) -> None:
        self._closed = False
        self._notify()

    async def somebody(self) -> None:
        """Return once a rollout lives. Raises ServiceFault when none comes in time."""
        await self._until(lambda: bool(self.membership.living))

    async def guard(self) -> None:
        """Until cancelled. Raises ServiceFault, naming who was lost, once no rollout has served for `patience` seconds, or,
        while the pool is closed, and a newcomer cannot begin to, none has lived."""

        def served() -> bool:
            return bool(self.membership.serving or (self._closed and self.membership.living))

        while True:
            if served():
                self._changed.clear()
                await self._changed.wait()
            else:
                await self._until(served)

    def repeat(self) -> None:
        self._repeated += 1

    def close_step(self) -> dict[str, float]:
        """The metrics: who serves now, and what was lost since the last call."""
        figures = {
            "rollout/serving": float(len(self.membership.serving)),
            "rollout/lost": float(self._lost),
            "rollout/repeated_groups": float(self._repeated),
        }
        self._lost = self._repeated = 0
        return figures

    def __str__(self) -> str:
        """One line: the epoch, who serves in it, who is coming and who was lost, and why."""
        parts = [f"epoch {self.membership.epoch.number}: {_names(self.membership.serving) or 'no rollout'}"]
        if newcomers := _names(self.membership.newcomers):
            parts.append(f"catching up: {newcomers}")
        parts += [f"lost: {unit.name} ({unit.reason})" for unit in self._losses]
        return ", ".join(parts)

    # ------------------------------------------------------------------------------------------ inside

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():  # again, as it may have changed before the waiter's turn
            if not await done_within(self._wait(holds), self._patience):
                who, why = ", ".join(unit.name for unit in self._losses), "; ".join(unit.reason for unit in self._losses)
                message = f"{why or 'lost'}; no rollout has served since"
                raise ServiceFault(who or "rollout", "run", message, self._patience)

    @property
    def _losses(self) -> list[Unit]:
        """Who was lost, while nobody has come in its place."""
        return [unit for unit in self.register.units(ROLLOUT) if unit.reason]


def _names(members: Sequence[Member]) -> str:
    return ", ".join(member.name for member in members)
