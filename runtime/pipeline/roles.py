"""Every process that the pipeline talks to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.ports import CriticPort, ReferencePort, RewardPort, RolloutPort, TrainerPort
from runtime.types import GeneratedGroup, GroupRequest


@dataclass(frozen=True, kw_only=True)
class EvaluationRoles:
    """Who generates replies and scores them: all that an evaluation needs."""

    rollouts: Sequence[RolloutPort]
    rewards: Sequence[RewardPort]
    reward_models: Sequence[RewardPort] = ()


@dataclass(frozen=True, kw_only=True)
class Roles(EvaluationRoles):
    trainer: TrainerPort
    references: Sequence[ReferencePort]
    critic: CriticPort | None = None


class RolloutPool:
    """Spreads groups over the rollout replicas: each goes to whoever has the fewest samples under way."""

    def __init__(self, rollouts: Sequence[RolloutPort]):
        self._rollouts = rollouts
        self._load = dict.fromkeys((rollout.name for rollout in rollouts), 0)

    def least_loaded(self) -> RolloutPort:
        return min(self._rollouts, key=lambda rollout: self._load[rollout.name])

    async def generate(self, rollout: RolloutPort, request: GroupRequest) -> GeneratedGroup:
        self._load[rollout.name] += request.n
        try:
            return await rollout.generate(request)
        finally:
            self._load[rollout.name] -= request.n
