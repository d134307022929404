"""Every process that the pipeline talks to."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from runtime.config import Config
from runtime.errors import Unreachable
from runtime.ports import CriticPort, ReferencePort, RewardPort, RolloutPort, TrainerPort
from runtime.topology import replicas
from runtime.types import GeneratedGroup, GroupRequest

log = logging.getLogger("sluice")


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
    """Spreads groups over the rollouts that live: each goes to whoever has the fewest samples under way for its slots.

    A rollout whose connection breaks is lost for good, and what it had under way is for others to generate, until none is left.
    """

    def __init__(self, rollouts: Sequence[RolloutPort], slots: Mapping[str, int]):
        """`slots`: how many sequences each decodes at once, by name."""
        self.living = list(rollouts)
        self.lost: list[str] = []
        self.slots = slots
        self.load = dict.fromkeys((rollout.name for rollout in rollouts), 0)  # samples under way

    @classmethod
    def of(cls, config: Config, rollouts: Sequence[RolloutPort]) -> RolloutPool:
        return cls(rollouts, {name: fleet.slots for name, fleet in replicas(config).items()})

    def least_loaded(self) -> RolloutPort:
        return min(self.living, key=lambda rollout: self.load[rollout.name] / self.slots[rollout.name])

    async def generate(self, rollout: RolloutPort, request: GroupRequest) -> GeneratedGroup | None:
        """None when the rollout was lost, and others live. Raises Unreachable when it was the last one."""
        self.load[rollout.name] += request.n
        try:
            return await rollout.generate(request)
        except Unreachable as fault:
            if self.living == [rollout]:
                raise
            self._lose(rollout, str(fault))
            return None
        finally:
            self.load[rollout.name] -= request.n

    def _lose(self, rollout: RolloutPort, why: str) -> None:
        if rollout in self.living:
            self.living.remove(rollout)
            self.lost.append(rollout.name)
            log.warning("%s; the run goes on with %s", why, ", ".join(other.name for other in self.living))
