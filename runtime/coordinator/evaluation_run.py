"""`sluice eval`: one evaluation of the weights that the rollouts loaded, and nothing else."""

from __future__ import annotations

import asyncio

from runtime.cluster.topology import slots
from runtime.coordinator.devices import wake_without_trainer
from runtime.coordinator.evaluation import Evaluator
from runtime.coordinator.roles import EvaluationRoles
from runtime.coordinator.rollout_pool import RolloutPool
from runtime.coordinator.run_context import EvaluationMaterial
from runtime.errors import SluiceError
from runtime.evaluation import results as evaluation
from runtime.evaluation.results import EvaluationResult
from runtime.ports import Replaceable, RolloutPort
from runtime.status import Progress


class EvaluationRun:
    """One evaluation. `stop` cuts it short."""

    def __init__(self, material: EvaluationMaterial, roles: EvaluationRoles):
        self._material = material
        self._roles = roles
        self._pool = RolloutPool(roles.rollouts, slots(material.config), material.config.deadlines.start, material.lost)
        self._serving = {asyncio.ensure_future(self._serve(rollout)) for rollout in roles.rollouts}
        self._evaluator = Evaluator(material, roles, self._pool)
        self._stopped = False
        self._evaluating: asyncio.Task[EvaluationResult] | None = None

    def arrive(self, role: str, replica: Replaceable) -> None:
        """A process has come in the place of one that was lost."""
        if role == "rollout":
            self._pool.arrive(replica)  # type: ignore[arg-type]
            self._serving.add(asyncio.ensure_future(self._serve(replica)))  # type: ignore[arg-type]
        else:
            self._roles.arrive(role, replica)

    async def _serve(self, rollout: RolloutPort) -> None:
        try:
            await wake_without_trainer(self._material.config, rollout)
        except SluiceError as error:
            self._pool.lose(rollout, str(error))
        else:
            self._pool.serve_as_loaded()

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
        guard = asyncio.create_task(self._pool.guard())
        try:
            await asyncio.wait([self._evaluating, guard], return_when=asyncio.FIRST_COMPLETED)
            if guard.done():
                guard.result()
        finally:
            guard.cancel()
            self._evaluating.cancel()
        if self._evaluating.cancelled():
            return None
        found = self._evaluating.result()
        await self._material.trackers.log(0, evaluation.metrics(found))
        return found
