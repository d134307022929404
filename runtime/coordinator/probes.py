"""Probes: whether each rollout samples with the weights that the trainer has.

Once a version is committed, every rollout that serves continues the same short prompt with it. The trainer has that version
too, until its next update, before which it computes the same tokens' log-probabilities itself. So every version that rollouts
have is measured, whatever the staleness; and a rollout that says that it took over new weights, and did not, is found out.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence

from runtime.coordinator.recovery import RunHistory
from runtime.coordinator.register import Member, member_of
from runtime.coordinator.rollout_pool import RolloutPool
from runtime.coordinator.run_context import RunContext
from runtime.data.prompts import group_seed
from runtime.errors import InvariantViolated, SluiceError
from runtime.ports import RolePort
from runtime.telemetry.metrics import SpanClock
from runtime.types import GroupRequest, PolicyVersion, SamplingParams

PROMPT_TOKENS = 64  # at most, the last ones of a training prompt: another for each version
NEW_TOKENS = 8  # at most
FIRST_ID = -(1 << 62)  # of their groups, one a version: far from those of training, which count up from 0, and of evaluations

log = logging.getLogger("sluice")


class Probes:
    """Asks whenever a rollout has come to the committed version. A probe that is not answered is counted, and fails nothing."""

    def __init__(self, context: RunContext, pool: RolloutPool, history: RunHistory, spans: SpanClock, answered: asyncio.Event):
        """`history` is told of alarms. `answered` is set after each answer, and after each that did not come in time."""
        config = context.config
        self._prompts, self._seed = context.train.tokens, config.run.seed
        self._limit, self._seconds = config.mismatch.limit, config.publication.commit_timeout
        self._sampling = SamplingParams(
            max_new_tokens=min(NEW_TOKENS, config.sampling.max_new_tokens),
            temperature=config.sampling.temperature,
            stop_token_ids=context.stop_token_ids,
        )
        self._pool, self._history, self._spans, self._answered = pool, history, spans, answered
        self._version: PolicyVersion | None = None
        self._asked: dict[Member, asyncio.Task[bytes | None]] = {}
        self._compared: list[str] = []  # whose probes the trainer was given last
        self._unanswered = 0
        self._off: set[str] = set()  # whose newest probe was over the limit
        pool.subscribe(self._look)

    def close(self) -> None:
        """Ask for no more, and wait for none. Idempotent."""
        self._pool.unsubscribe(self._look)
        self._drop()

    @property
    def pending(self) -> bool:
        return not all(asked.done() for asked in self._asked.values())

    async def answers(self, version: PolicyVersion) -> list[bytes]:
        """What the rollouts sampled with `version`, once each of them has answered or had its time; nothing where rollouts have
        another version. Then `close_step` has to follow."""
        self._compared, self._unanswered = [], 0
        if version != self._version:
            return []
        while self.pending:
            with self._spans.span("probe"):
                await asyncio.wait(self._asked.values())
        found = [(member.name, asked.result()) for member, asked in self._asked.items()]
        answers = [(name, answer) for name, answer in found if answer is not None]
        self._compared, self._unanswered = [name for name, _ in answers], len(found) - len(answers)
        return [answer for _, answer in answers]

    def close_step(self, version: PolicyVersion, gaps: Sequence[float]) -> dict[str, float]:
        """The metrics of the step that trained `version`, given what the trainer found of each probe: the mean |Δ log p|, in
        nats."""
        for name, gap in zip(self._compared, gaps, strict=True):
            if not self._limit or gap <= self._limit:
                self._off.discard(name)
                continue
            told = (
                f"{name}, version {version}: its log-probabilities are {gap:.3g} nats from the trainer's on average, more than "
                f"mismatch.limit {self._limit:g}; it may have other weights"
            )
            self._history.off(told if name not in self._off else "")
            self._off.add(name)
        figures = {"mismatch/probes": float(len(gaps)), "mismatch/unanswered": float(self._unanswered)}
        finite = [gap for gap in gaps if math.isfinite(gap)]
        return figures | ({"mismatch/worst_rollout": max(finite)} if finite else {})

    def _look(self) -> None:
        """Ask whoever has come to the committed version since."""
        version = self._pool.membership.committed
        if version != self._version:
            self._drop()
            self._version = version
        if version is None:
            return
        for rollout in self._pool.admitting:
            member = member_of(rollout)
            if member not in self._asked:
                self._asked[member] = asyncio.ensure_future(self._ask(rollout, version))
                self._asked[member].add_done_callback(lambda _: self._answered.set())

    def _drop(self) -> None:
        for asked in self._asked.values():
            asked.cancel()
        self._asked = {}

    async def _ask(self, rollout: RolePort, version: PolicyVersion) -> bytes | None:
        """The encoded group; None when it does not come."""
        request = GroupRequest(
            group_id=FIRST_ID + version.pack(),
            prompt=self._prompts[version.step % len(self._prompts)][-PROMPT_TOKENS:],
            n=1,
            seed=group_seed(self._seed, version.step),
            sampling=self._sampling,
            purpose="probe",
        )
        try:
            return (await asyncio.wait_for(self._pool.generate(rollout, request), self._seconds)).payload
        except InvariantViolated:
            raise
        except (asyncio.TimeoutError, SluiceError) as error:
            why = str(error) or f"no answer within {self._seconds:g} s (publication.commit_timeout)"
            log.warning("%s did not answer the probe of version %s: %s", rollout.name, version, why)
            return None
