"""The first stages of the pipeline: admission under the staleness bound, generation, marks; dynamic sampling.

One coroutine handles one group from its dispatch to `ready`. Admission limits their number, and so every queue behind them: a
group is dispatched only while a step may still train on it in time.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

from runtime import types
from runtime.commands import HANDED_OVER, FinishGroup, RolePort
from runtime.coordinator.buffer import Buffer, DynamicSampling, Group
from runtime.coordinator.failover import FailoverState
from runtime.coordinator.gateways import concurrency_of
from runtime.coordinator.metrics_recorder import Load, RunContext
from runtime.coordinator.pools import RewardScoring, Roles, RolloutPool, request_for, score_request
from runtime.coordinator.register import member_of
from runtime.coordinator.weight_sync import Devices
from runtime.data.prompts import PromptStream
from runtime.errors import BlobLost, Cancelled, SluiceError, Unreachable
from runtime.ledger.journal import Note, Ticket
from runtime.ledger.states import Mark, Phase
from runtime.types import LogprobRequest, ValueRequest

log = logging.getLogger("sluice")

STREAM = "stream"  # the key of the ledger's note with the position of the prompt stream

# Samples that one replica gets before the next is chosen: a decode step of few sequences costs nearly as much as one of many.
SAMPLES_PER_DISPATCH = 64


class GroupStage:
    """Keeps the rollouts busy, and brings every group from its prompt to `ready`."""

    def __init__(
        self,
        context: RunContext,
        roles: Roles,
        pool: RolloutPool,
        devices: Devices,
        buffer: Buffer,
        stream: PromptStream,
        dynamic_sampling: DynamicSampling | None,
    ):
        config = context.config
        self._roles, self._pool, self._devices, self._buffer, self._stream = roles, pool, devices, buffer, stream
        self._config, self._ledger, self._prompts, self._spans = config, context.ledger, context.train, context.spans
        self._size, self._sampling, self._concurrency = config.sampling.group_size, context.sampling, concurrency_of(config)
        self._dynamic_sampling = dynamic_sampling
        unrewarded = self._size if config.algorithm.advantage == "none" else 0
        self._scoring = RewardScoring(roles.scorers, config.rewards.environment, context.spans, unrewarded)
        self._most: int | None = None  # the most groups on all rollouts; None: compute it again after a change
        self._pool.subscribe(self._look)
        self._lives: set[asyncio.Task[None]] = set()
        self._alarm: asyncio.TimerHandle | None = None  # wakes `run` when a group may be late

    async def run(self, tasks: asyncio.TaskGroup, taken_up: FailoverState | None = None) -> None:
        """Admit groups until cancelled, up to the buffer's `last_step`. `taken_up`: the state of groups already under way."""
        buffer = self._buffer
        for group in list(buffer):
            if group.state.phase == Phase.GENERATED:
                self._spawn(tasks, self._annotate(group))
            elif group.state.phase == Phase.GENERATING:
                self._spawn(tasks, self._live(group, self._former(group, taken_up)))
        while True:
            buffer.room_changed.clear()
            waiting, together = buffer.waiting(), 0
            for index in range(buffer.capacity(self._max_in_flight(), buffer.last_step)):
                if not together:
                    await asyncio.sleep(0)  # lets the spawned tasks begin: their load counts for the choice
                    if not self._pool.admits:
                        break
                    rollout = self._pool.least_loaded()
                    together = self._together(rollout)
                together -= 1
                group = waiting[index] if index < len(waiting) else self._admit()
                buffer.dispatch(group.group_id, rollout.name)
                self._spawn(tasks, self._live(group, rollout))
            self._hurry(tasks)
            await buffer.room_changed.wait()

    def _hurry(self, tasks: asyncio.TaskGroup) -> None:
        """Notify the gateways of the groups for which alone the trainer waits."""
        if self._config.gateway is None:
            return
        if self._alarm is not None:
            self._alarm.cancel()
        soonest = math.inf
        for group, seconds in self._buffer.late():
            gateway = self._pool.find(group.replica)
            if seconds:
                soonest = min(seconds, soonest)
            elif gateway is not None and group.hurried != group.attempt:
                group.hurried = group.attempt
                self._spawn(tasks, self._finish(gateway, group.group_id))
        if soonest < math.inf:
            self._alarm = asyncio.get_running_loop().call_later(soonest, self._buffer.room_changed.set)

    async def _finish(self, gateway: RolePort, group_id: int) -> None:
        with suppress(SluiceError):  # a lost gateway's groups are repeated
            await gateway.call(FinishGroup(group_id))

    def _former(self, group: Group, taken_up: FailoverState | None) -> RolePort | None:
        """Return the rollout that an earlier coordinator asked for a group, or None if it is lost or was replaced."""
        rollout, bound = self._pool.find(group.replica), self._buffer.staleness
        if rollout is None or taken_up is None or group.deadline is None:
            return None
        # A gateway of another incarnation plays the group again.
        same = self._config.gateway is not None or taken_up.has_since(member_of(rollout), group.deadline - bound)
        return rollout if same else None

    async def close(self, handed_over: bool = False) -> None:
        """End all work on groups. `handed_over`: calls under way are not withdrawn, as the next attempt makes them again."""
        self._pool.unsubscribe(self._look)
        if self._alarm is not None:
            self._alarm.cancel()
        for life in self._lives:
            life.cancel(HANDED_OVER if handed_over else None)
        await asyncio.gather(*self._lives, return_exceptions=True)

    def _admit(self) -> Group:
        draw = self._stream.draw()
        problem = self._prompts.problems[draw.index]
        ticket = Ticket(group_id=draw.ordinal, problem=draw.index, source=problem.source, label=problem.label, seed=draw.seed)
        group = self._buffer.admit(ticket)
        # In one transaction with the admission, so a resume always draws the next prompt.
        self._ledger.record(Note(key=STREAM, value=types.encode(self._stream.state())))
        return group

    def _look(self) -> None:
        self._most = None
        self._buffer.room_changed.set()

    def measured(self, load: Load) -> None:
        if self._concurrency is not None:
            self._concurrency.look(load, self._buffer.generating)
            self._look()

    def _max_in_flight(self) -> int:
        if not self._pool.admits:
            return 0
        if self._most is None and self._concurrency is not None:
            self._most = self._concurrency.limit(sum(self._pool.slots[each.name] for each in self._pool.units()))
        elif self._most is None:
            self._most = sum(map(self._max_groups, self._pool.units()))
        return self._most

    def _max_groups(self, rollout: RolePort) -> int:
        """Return how many groups `rollout` may hold: what fits into twice its slots, since replies are long-tailed, and one."""
        return 2 * self._pool.slots[rollout.name] // self._size + 1

    def _together(self, rollout: RolePort) -> int:
        """Return how many groups go to `rollout` before the next rollout is chosen."""
        wanted = min(SAMPLES_PER_DISPATCH, self._pool.slots[rollout.name]) // self._size
        return max(1, min(wanted, self._max_groups(rollout) - self._pool.load(rollout) // self._size))

    def _spawn(self, tasks: asyncio.TaskGroup, life: Coroutine[Any, Any, None]) -> None:
        task = tasks.create_task(life)
        self._lives.add(task)
        task.add_done_callback(self._lives.discard)

    async def _live(self, group: Group, rollout: RolePort | None) -> None:
        """Handle a group from its dispatch to `rollout`, by this or an earlier coordinator, on. None: the rollout is lost."""
        problem = group.ticket.problem
        request = request_for(
            self._config,
            self._prompts.problems[problem],
            self._prompts.tokens[problem],
            group_id=group.group_id,
            n=self._size,
            seed=group.ticket.seed,
            attempt=group.attempt,
            sampling=self._sampling,
        )
        try:
            if rollout is None:
                raise Unreachable(group.replica, "Generate", "was lost with the coordinator")
            # The ledger has the dispatch before the rollout gets it, so a new coordinator knows which rollout to ask.
            with self._spans.span("rollout"):
                result = await self._pool.generate(rollout, request, self._ledger.flush())
        except (Unreachable, Cancelled):
            self._pool.repeat()
            self._buffer.lose(group.group_id)  # back to waiting: another rollout generates it, from the same seed
            return
        self._buffer.generated(result)
        self._ledger.then(partial(rollout.acknowledge, request))
        await self._annotate(group)

    async def _annotate(self, group: Group) -> None:
        assert group.payload is not None
        payload = await self._ledger.bytes_of(group.payload)
        missing = group.state.needs & ~group.state.marks
        if missing & Mark.SCORED and self._dynamic_sampling is not None:
            # Wait for the score first: the other marks cost a forward pass each, and most groups may be dropped.
            await self._score(group, payload)
            if group.group_id not in self._buffer:
                return
            missing &= ~Mark.SCORED
        jobs = {Mark.SCORED: self._score, Mark.REFERENCED: self._reference, Mark.VALUED: self._value}
        works = [asyncio.ensure_future(job(group, payload)) for mark, job in jobs.items() if missing & mark]
        try:
            await asyncio.gather(*works)
        except BlobLost as error:
            for work in works:
                work.cancel()
            await asyncio.gather(*works, return_exceptions=True)
            log.warning("group %d is generated again: %s", group.group_id, error)
            self._buffer.lose(group.group_id)

    async def _score(self, group: Group, payload: bytes) -> None:
        problem = self._prompts.problems[group.ticket.problem]
        request = score_request(problem, group_id=group.group_id, attempt=group.attempt, payload=payload)
        # Replicas take turns by group, so a new coordinator asks the replica that has the answer.
        answered: list[Callable[[], None]] = []
        given = group.generated.rewards if group.generated is not None else []
        self._buffer.scored(await self._scoring.score(request, given, group.group_id, group.asked, answered))
        self._ledger.then(*answered)
        # No await before the judgement, so neither a step nor the ledger sees a group without signal as ready.
        if self._dynamic_sampling is not None:
            self._dynamic_sampling.judge(group)

    async def _reference(self, group: Group, payload: bytes) -> None:
        request = LogprobRequest(
            group_id=group.group_id,
            attempt=group.attempt,
            payload=payload,
            temperature=self._sampling.temperature,
            model=self._prompts.problems[group.ticket.problem].reference,
        )
        answered: list[Callable[[], None]] = []
        with self._spans.span("reference_model"):
            async with self._devices.lease("reference"):
                logprobs = await self._roles.references.ask(group.group_id, request, answered=answered)
        self._buffer.referenced(group.group_id, logprobs)
        self._ledger.then(*answered)

    async def _value(self, group: Group, payload: bytes) -> None:
        assert self._roles.critic is not None
        request = ValueRequest(group_id=group.group_id, tokens=group.tokens, payload=payload)
        try:
            with self._spans.span("critic_model"):
                values = await self._roles.critic.call(request)
        except Unreachable:
            return  # the run goes back to its checkpoint with another critic, which is asked again
        self._buffer.valued(group.group_id, values)
