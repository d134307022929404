"""`sluice eval`: one evaluation of the weights that the rollouts loaded, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from runtime import evaluation
from runtime.config import Config
from runtime.data.held_out import HeldOut
from runtime.evaluation import EvaluationResult
from runtime.generations import TextDecoder
from runtime.pipeline.evaluation import Evaluator
from runtime.pipeline.roles import EvaluationRoles, RolloutPool
from runtime.status import Progress
from runtime.trackers import Trackers


@dataclass
class EvaluationMaterial:
    """What an evaluation is made of, besides its roles."""

    config: Config
    trackers: Trackers
    held_out: list[HeldOut]
    text: TextDecoder
    stop_token_ids: tuple[int, ...]
    report: Callable[[Progress], None]


class EvaluationRun:
    """One evaluation. `stop` cuts it short."""

    def __init__(self, material: EvaluationMaterial, roles: EvaluationRoles):
        self._material = material
        pool = RolloutPool.of(material.config, roles.rollouts)
        self._evaluator = Evaluator(material.config, material.held_out, roles, pool, material.text, material.stop_token_ids)
        self._stopped = False
        self._evaluating: asyncio.Task[EvaluationResult] | None = None

    def stop(self) -> None:
        self._stopped = True
        if self._evaluating is not None:
            self._evaluating.cancel()

    async def execute(self) -> EvaluationResult | None:
        """The results, which also lie in the run's folder; None when it was stopped before. Raises ServiceFault, UserError."""
        if self._stopped:
            return None

        def report(done: int, total: int) -> None:
            self._material.report(Progress(phase="evaluating", done=done, total=total))

        report(0, 0)
        self._evaluating = asyncio.create_task(self._evaluator.run(0, alone=True, progress=report))
        try:
            await asyncio.wait([self._evaluating])
        finally:
            self._evaluating.cancel()
        if self._evaluating.cancelled():
            return None
        found = self._evaluating.result()
        await self._material.trackers.log(0, evaluation.metrics(found))
        return found
