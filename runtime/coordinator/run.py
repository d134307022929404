"""A run from its first evaluation to its last check, through all its attempts: the coordinator's logic, above the ports."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runtime.cluster.topology import slots
from runtime.coordinator import takeover
from runtime.coordinator.attempt import INTERRUPTED, Attempt
from runtime.coordinator.buffer import Buffer
from runtime.coordinator.gateways import GatewayPool
from runtime.coordinator.history import Course, RunHistory
from runtime.coordinator.metrics_recorder import gap
from runtime.coordinator.pools import RolloutPool
from runtime.coordinator.recovery import models_back
from runtime.coordinator.register import Register
from runtime.coordinator.roles import Roles, models
from runtime.coordinator.run_context import RunContext
from runtime.coordinator.takeover import TakenUp
from runtime.errors import SluiceError, UserError
from runtime.ledger import checkpoint
from runtime.ledger.reader import LedgerReader
from runtime.process.aio import now
from runtime.telemetry.summary import Summary

log = logging.getLogger("sluice")


class TrainingRun:
    """One run. `stop` ends it in order; everything else happens in `execute`."""

    def __init__(
        self, context: RunContext, register: Register, history: RunHistory | None = None, taken_up: TakenUp | None = None
    ):
        """`history`, `taken_up`: as an earlier coordinator has left it. Raises Unreachable when trainer or critic is lost."""
        config = context.config
        self._context, self._config, self._register = context, config, register
        self._started = now()
        self.pool = RolloutPool(register, slots(config), config.deadlines.start, context.term)
        if config.gateway is not None:
            GatewayPool(self.pool, config, context.keys)
        self._history = history or RunHistory(config.run.resume)
        self._attempt = self._begin(taken_up)
        self._interrupted = False

    @classmethod
    async def taken_up(cls, context: RunContext, register: Register, course: Course) -> TrainingRun:
        """Go on after `course`; from the newest checkpoint where its trainer or critic is not there. Raises DeadlineExceeded
        when no other comes either."""
        config, history = context.config, course.history
        history.rl_began = now() - course.rl_seconds if course.rl_seconds else 0.0
        try:
            found = await takeover.take_up(config, register, course)
        except SluiceError as error:
            log.warning("the run goes back to its newest checkpoint: %s", error)
            for unit in models(register):
                register.lose(unit, str(error))
            history.lost(history.version.step)
            await models_back(config, register)
            await _require_whole(history)
            return cls(context, register, history)
        return cls(context, register, history, found)

    def _begin(self, taken_up: TakenUp | None = None) -> Attempt:
        roles = Roles(self._register, self._config.deadlines.start)
        return Attempt(self._context, roles, self.pool, self._history, taken_up)

    def stop(self, reason: str) -> None:
        """End after the step under way and save; with INTERRUPTED, without another evaluation."""
        self._interrupted = self._interrupted or reason == INTERRUPTED
        self._attempt.stop(reason)

    @property
    def buffer(self) -> Buffer:
        return self._attempt.buffer

    @property
    def vacated(self) -> bool:
        """Whether the devices of a trainer that is lost are free for another."""
        return self._attempt.vacated

    def gauges(self) -> dict[str, float]:
        """Figures for the status call."""
        membership = self.pool.membership
        counts = {name: float(number) for name, number in self.buffer.counts().items()}
        return counts | {"epoch": membership.epoch.number, "rollouts": len(membership.serving)}

    def figures(self) -> dict[str, Any]:
        """Fields of `RunFigures`."""
        recorder = self._attempt.recorder
        return {
            "groups": self.buffer.counts(),
            "newest": recorder.newest | recorder.evaluated,
            "stepped": recorder.stepped and self._context.epoch + recorder.stepped,
            "alarms": self._history.alarms,
        }

    def told(self) -> Iterator[str]:
        """What there is to say of it now: what it waits for, who is there, how weights travel, and what is wrong."""
        if (wait := self.buffer.oldest_wait()) is not None:
            yield f"waits for group {wait.group_id} ({wait.phase}, {wait.service}, {wait.seconds:.1f} s)"
        yield str(self.pool)
        publisher = self._attempt.publisher
        if publisher.group.transport:
            yield f"weights by {publisher.group.transport}"
        if apart := gap(self._attempt.recorder.figures):
            yield apart
        if self._history.alarm:
            yield f"ALARM: {self._history.alarm}"
        if publisher.abort:
            yield f"last abort: {publisher.abort}"

    async def execute(self) -> Summary:
        """The whole run. Raises ServiceFault, UserError (a full disk), InvariantViolated."""
        while await self._attempt.execute():
            await _require_whole(self._history)
            self._attempt = self._begin()
            if self._interrupted:
                self._attempt.stop(INTERRUPTED)
        return self._summary()

    def _summary(self) -> Summary:
        history, config = self._history, self._config
        with LedgerReader(self._context.ledger.folder) as reader:
            # A resumed run may have begun in another folder, or with other groups per step.
            groups = reader.check_final(None if config.run.resume else config.training.groups_per_step)
            dropped = reader.dropped()
        final = {name: number for name, number in groups.items() if number or name in ("retired", "dropped")}
        return history.totals.summary(
            rl_seconds=history.rl_seconds,
            stop_reason=self.buffer.stop_reason,
            accuracy_before=history.accuracy_before,
            accuracy_after=self._attempt.accuracy_after,
            total_seconds=now() - self._started,
            startup=self._context.startup.phases,
            startup_processes=self._context.startup.processes,
            groups=final,
            mismatch_alarm=history.alarm,
            mismatch_alarms=history.alarms,
            dropped=dropped,
            peak_pss_bytes=0,
        )


async def _require_whole(history: RunHistory) -> None:
    """Raises UserError where the checkpoint that the next attempt begins with has changed since it was written."""
    if history.folder and (why := await asyncio.to_thread(checkpoint.fault, Path(history.folder))):
        raise UserError(f"the run cannot go back to {history.folder}: {why}; run.resume=auto goes on from one before it")
