"""Scores of a group by everybody who is to give some: the reward service, the reward model, or both at once."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext

from runtime.coordinator.roles import EvaluationRoles, Replicas
from runtime.ports import RewardPort
from runtime.rewards.combination import combine
from runtime.telemetry.metrics import SpanClock
from runtime.types import ScoreRequest, Scores


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
