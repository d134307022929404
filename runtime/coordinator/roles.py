"""Every process that the coordinator talks to, what becomes of a request whose replica is lost, and who is asked for scores."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, Protocol, TypeVar

from runtime.errors import ServiceFault, Unreachable
from runtime.ports import CriticPort, ReferencePort, Replaceable, RewardPort, RolloutPort, TrainerPort
from runtime.rewards.combination import combine
from runtime.status import Loss, replaced
from runtime.telemetry.metrics import SpanClock
from runtime.types import ScoreRequest, Scores

log = logging.getLogger("sluice")

T = TypeVar("T", bound=Replaceable)
R = TypeVar("R")


class LossListener(Protocol):
    """Is told of every process that the run does without."""

    def lose(self, loss: Loss) -> None: ...


class Replicas(Generic[T]):
    """Interchangeable replicas of a role, which take turns. A request whose replica is lost goes to another; when there is
    none, it waits for the process that comes in its place. No request is left out.
    """

    def __init__(self, replicas: Sequence[T] = (), patience: float = 120.0, listener: LossListener | None = None):
        """`patience`: seconds that a request waits when there is no replica. `listener` is told of each that is lost."""
        self._name = replicas[0].name.rpartition("-")[0] if replicas else ""
        self._living: list[T] = []
        self._patience = patience
        self._listener = listener
        self._reason = ""
        self._arrived = asyncio.Event()
        for replica in replicas:
            self.arrive(replica)

    def __bool__(self) -> bool:
        """Whether the run has such a role."""
        return bool(self._name)

    def arrive(self, replica: T) -> None:
        """A replica, perhaps in the place of one that is not known to be lost yet."""
        for former in [one for one in self._living if one.name == replica.name]:
            if former.incarnation >= replica.incarnation:
                return
            self.lose(former, replaced(replica.incarnation))
        self._living.append(replica)
        self._living.sort(key=lambda one: one.name)
        replica.when_lost(partial(self.lose, replica))
        self._arrived.set()

    def lose(self, replica: T, reason: str) -> None:
        """Do without `replica` from now on. Idempotent."""
        if replica in self._living:
            self._living.remove(replica)
            self._reason = f"{replica.name}: {reason}"
            log.warning("%s (incarnation %d) is lost: %s", replica.name, replica.incarnation, reason)
            replica.give_up(reason)
            if self._listener is not None:
                self._listener.lose(Loss(name=replica.name, incarnation=replica.incarnation, reason=reason))

    async def ask(self, turn: int, question: Callable[[T], Awaitable[R]]) -> R:
        """The answer of a replica. Raises what it raised, or ServiceFault when there is none for `patience` seconds."""
        while True:
            replica = await self._choose(turn)
            try:
                return await question(replica)
            except Unreachable as error:
                self.lose(replica, error.reason)

    async def tell(self, order: Callable[[T], Awaitable[None]]) -> None:
        """All that live carry out `order`, but for those that are lost meanwhile."""

        async def told(replica: T) -> None:
            try:
                await order(replica)
            except Unreachable as error:
                self.lose(replica, error.reason)

        await asyncio.gather(*map(told, list(self._living)))

    async def _choose(self, turn: int) -> T:
        while not self._living:  # again, as it may be lost before the waiter's turn
            try:
                await asyncio.wait_for(self._some(), self._patience)
            except asyncio.TimeoutError:
                raise ServiceFault(self._name, "run", f"{self._reason}; no other has come", self._patience) from None
        return self._living[turn % len(self._living)]

    async def _some(self) -> None:
        while not self._living:
            self._arrived.clear()
            await self._arrived.wait()


@dataclass(frozen=True, kw_only=True)
class EvaluationRoles:
    """Who generates replies and scores them: all that an evaluation needs."""

    rollouts: Sequence[RolloutPort]
    rewards: Replicas[RewardPort]
    reward_models: Replicas[RewardPort] = field(default_factory=Replicas)

    def arrive(self, role: str, replica: Replaceable) -> None:
        """A process of `role`, which is not rollout, has come in the place of one that was lost."""
        {"reward": self.rewards, "reward_model": self.reward_models}[role].arrive(replica)  # type: ignore[arg-type]


@dataclass(frozen=True)
class TrainedModels:
    """The groups under training."""

    trainer: TrainerPort
    critic: CriticPort | None = None


@dataclass(frozen=True, kw_only=True)
class Roles(EvaluationRoles):
    trainer: TrainerPort
    references: Replicas[ReferencePort]
    critic: CriticPort | None = None

    def arrive(self, role: str, replica: Replaceable) -> None:
        if role == "reference":
            self.references.arrive(replica)  # type: ignore[arg-type]
        else:
            super().arrive(role, replica)


class RewardScoring:
    """Asks one replica of each role that gives rewards, and adds up what they answer."""

    def __init__(self, roles: EvaluationRoles, spans: SpanClock | None = None):
        """`spans`: accounts the time as that of the phases `rule_reward` and `reward_model`."""
        by_phase = {"rule_reward": roles.rewards, "reward_model": roles.reward_models}
        self._replicas = {phase: replicas for phase, replicas in by_phase.items() if replicas}
        self._spans = spans

    async def score(self, request: ScoreRequest, turn: int, asked: set[str] | None = None) -> Scores:
        """Replicas take turns. `asked` holds, until this returns, the names of those that have not answered."""
        names = set() if asked is None else asked
        answers = (self._ask(phase, replicas, request, turn, names) for phase, replicas in self._replicas.items())
        return combine(await asyncio.gather(*answers))

    async def _ask(
        self, phase: str, replicas: Replicas[RewardPort], request: ScoreRequest, turn: int, asked: set[str]
    ) -> Scores:
        async def question(replica: RewardPort) -> Scores:
            asked.add(replica.name)
            try:
                return await replica.score(request)
            finally:
                asked.discard(replica.name)

        with self._spans.span(phase) if self._spans else nullcontext():
            return await replicas.ask(turn, question)
