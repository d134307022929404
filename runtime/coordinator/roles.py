"""Whom the run asks, by role; what becomes of a request whose replica is lost, and who is asked for scores."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TypeVar

import numpy as np

from runtime.coordinator.register import Register, Unit, UnitChange, UnitState
from runtime.errors import InvariantViolated, ServiceFault, Unanswered, Unreachable
from runtime.ports import RolePort, TrainerPort
from runtime.process.aio import now, still_missing
from runtime.rewards.combination import combine, played
from runtime.telemetry.metrics import SpanClock
from runtime.types import SCORERS, Command, ScoreRequest, Scores

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
