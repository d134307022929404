"""A run from its first evaluation to its last check, through all its lineages: the coordinator's logic, above the ports."""

from __future__ import annotations

import time
from dataclasses import replace

from runtime.cluster.topology import slots
from runtime.coordinator.buffer import Buffer
from runtime.coordinator.history import History
from runtime.coordinator.lineage import INTERRUPTED, Lineage
from runtime.coordinator.roles import Roles
from runtime.coordinator.rollout_pool import RolloutPool
from runtime.coordinator.run_context import Material
from runtime.ledger.reader import LedgerReader
from runtime.ports import Replaceable
from runtime.telemetry.summary import Summary


class TrainingRun:
    """One run. `stop` ends it in order; everything else happens in `execute`."""

    def __init__(self, material: Material, roles: Roles):
        config = material.config
        self._material, self._config, self._roles = material, config, roles
        self._started = time.monotonic()
        self._pool = RolloutPool(roles.rollouts, slots(config), config.deadlines.start, material.lost)
        self._history = History(config.run.resume)
        self._lineage = Lineage(material, roles, self._pool, self._history)
        self._interrupted = False

    def stop(self, reason: str) -> None:
        """End after the step under way and save; with INTERRUPTED, without another evaluation."""
        self._interrupted = self._interrupted or reason == INTERRUPTED
        self._lineage.stop(reason)

    @property
    def buffer(self) -> Buffer:
        return self._lineage.buffer

    @property
    def pool(self) -> RolloutPool:
        return self._pool

    @property
    def last_abort(self) -> str:
        """Why the newest publication that was aborted was, or ""."""
        return self._lineage.publisher.abort

    @property
    def transport(self) -> str:
        """Which one the weights of the newest epoch take, or "" before the first."""
        return self._lineage.publisher.group.transport

    @property
    def gap(self) -> str:
        """How far rollouts and trainer were apart in the newest step; "" where nothing was compared."""
        return self._lineage.gap

    @property
    def alarm(self) -> str:
        """Of the newest rollout that was too far from the trainer, or ""."""
        return self._history.alarm

    def arrive(self, role: str, replica: Replaceable) -> None:
        """A process has come in the place of one that was lost, of a role that holds nothing of the run's."""
        if role == "rollout":
            self._lineage.arrive(replica)  # type: ignore[arg-type]
        else:
            self._roles.arrive(role, replica)

    async def execute(self) -> Summary:
        """The whole run. Raises ServiceFault, UserError (a full disk), InvariantViolated."""
        while (updated := await self._lineage.execute()) is not None:
            self._roles = replace(self._roles, trainer=updated.trainer, critic=updated.critic)
            self._lineage = Lineage(self._material, self._roles, self._pool, self._history)
            if self._interrupted:
                self._lineage.stop(INTERRUPTED)
        return self._summary()

    def _summary(self) -> Summary:
        history, config = self._history, self._config
        with LedgerReader(self._material.ledger.folder) as reader:
            # A resumed run may have begun in another folder, or with other groups per step.
            groups = reader.check_final(None if config.run.resume else config.training.groups_per_step)
            dropped = reader.dropped()
        final = {name: number for name, number in groups.items() if number or name in ("retired", "dropped")}
        return history.totals.summary(
            rl_seconds=history.rl_seconds,
            stop_reason=self._lineage.stop_reason,
            accuracy_before=history.accuracy_before,
            accuracy_after=self._lineage.accuracy_after,
            total_seconds=time.monotonic() - self._started,
            startup=self._material.startup.phases,
            startup_processes=self._material.startup.processes,
            groups=final,
            mismatch_alarm=history.alarm,
            mismatch_alarms=history.alarms,
            dropped=dropped,
            peak_pss_bytes=0,
        )
