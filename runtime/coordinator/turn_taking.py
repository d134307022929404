"""Drives the turns of rollouts, reference and trainer: `turns.Turns` against the ports."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from runtime.commands import Level
from runtime.coordinator.membership import Member
from runtime.coordinator.roles import Roles
from runtime.coordinator.rollout_pool import RolloutPool, member_of
from runtime.coordinator.turns import (
    Action,
    Arrived,
    Event,
    GenerationDone,
    Lender,
    MemberLost,
    Offloaded,
    Onloaded,
    Phase,
    Reached,
    Referred,
    TellLevel,
    TellOnload,
    Trained,
    Turns,
    VersionPublished,
)
from runtime.coordinator.weight_sync import Publisher
from runtime.errors import InvariantViolated, SluiceError
from runtime.ports import RolloutPort
from runtime.status import replaced
from runtime.telemetry.metrics import PublicationFigures, SpanClock
from runtime.types import PolicyVersion

TO_TRAIN, TO_INFER = "resharding_to_train", "resharding_to_infer"


class TurnTaking:
    """The rollouts are asleep at first, and nobody has the devices.

    From `take` to the end of `give` the pool is closed, and no newcomer is sent the committed version: its weights may be off
    the devices. It joins the pool once it has come as far as the others, so that the next publication has it as a member.
    """

    def __init__(self, roles: Roles, pool: RolloutPool, publisher: Publisher, spans: SpanClock, *, refers: bool, brings: bool):
        """`refers`: the reference has a turn of its own. `brings`: the trainer's state comes with its turn; otherwise whoever
        orders its updates says when."""
        self._roles = roles
        self._pool = pool
        self._publisher = publisher
        self._spans = spans
        self._refers, self._brings = refers, brings
        self._turns = Turns(pool.membership.living)
        self._arriving: dict[Member, RolloutPort] = {}  # not in the pool yet
        self._calls: set[asyncio.Task[None]] = set()
        self._fault: BaseException | None = None
        self._changed = asyncio.Event()
        pool.close()
        pool.subscribe(self._look)
        if refers:
            roles.references.close()

    @property
    def phase(self) -> Phase:
        return self._turns.phase

    async def take(self, referred: Callable[[], Awaitable[None]] | None = None) -> None:
        """The trainer's turn. To be called when no rollout has anything to do; `referred()` returns once the reference has not.

        Raises what ends the run: whatever the trainer or the reference raised.
        """
        refers = self._refers and referred is not None
        self._pool.close()
        with self._spans.span(TO_TRAIN):
            await self._publisher.hold()
            self._handle(GenerationDone(refers))
            await self._until("ref_onload", "refer", "train")
        if refers:
            assert referred is not None
            await self._until("refer")
            self._roles.references.open()
            await referred()
            self._roles.references.close()
            self._handle(Referred())
            await self._until("onload", "train")
            with self._spans.span(TO_TRAIN):
                await self._until("train")

    async def give(self, version: PolicyVersion | None) -> PublicationFigures | None:
        """The rollouts' turn, with `version` if the trainer made one. Raises what ends the run."""
        with self._spans.span(TO_INFER):
            self._handle(Trained(publishes=version is not None))
            figures = None
            if version is not None:
                await self._until("publish")
                figures = await self._publisher.publish(version)
                self._handle(VersionPublished())
            await self._until("generate")
            self._publisher.free()
        self._pool.open()
        return figures

    def arrive(self, rollout: RolloutPort) -> None:
        """A process has come, asleep."""
        member = member_of(rollout)
        formers = [one for one in (*self._turns.members, *self._pool.membership.living) if one.name == member.name]
        if any(one.incarnation >= member.incarnation for one in formers):
            return
        for former in set(formers) & set(self._pool.membership.living):
            self._pool.lose(self._pool.port(former), replaced(member.incarnation))
        self._arriving = {one: port for one, port in self._arriving.items() if one not in formers} | {member: rollout}
        self._handle(Arrived(member))
        if not self._turns.told(member):
            self._join(member)

    def _join(self, member: Member) -> None:
        """It is one of the pool's from now on."""
        self._pool.arrive(self._arriving[member])
        del self._arriving[member]

    def _look(self) -> None:
        """Tell the turns who was lost."""
        there = {*self._pool.membership.living, *self._arriving}
        for member in self._turns.members - there:
            self._handle(MemberLost(member))

    def _handle(self, event: Event) -> None:
        for action in self._turns.handle(event):
            task = asyncio.ensure_future(self._carry_out(action))
            self._calls.add(task)
            task.add_done_callback(self._done)
        self._changed.set()

    def _carry_out(self, action: Action) -> Coroutine[Any, Any, None]:
        if isinstance(action, TellLevel):
            return self._move(action.member, action.level)
        return self._onload(action.who) if isinstance(action, TellOnload) else self._offload(action.who)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._calls.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fault = self._fault or error
            self._changed.set()

    async def _until(self, *phases: Phase) -> None:
        while self._fault is None and self._turns.phase not in phases:
            self._changed.clear()
            await self._changed.wait()
        if self._fault is not None:
            raise self._fault

    async def _move(self, member: Member, level: Level) -> None:
        """A rollout that does not come as far is lost, whatever kept it."""
        rollout = self._arriving.get(member)
        if rollout is None:
            if member not in self._pool.membership.living:
                return
            rollout = self._pool.port(member)
        try:
            await rollout.move(level)
        except InvariantViolated:
            raise
        except SluiceError as error:
            if member in self._arriving:
                self._join(member)
            self._pool.lose(rollout, str(error))
            return
        self._handle(Reached(member, level))
        if member in self._arriving and not self._turns.told(member):
            self._join(member)

    async def _onload(self, who: Lender) -> None:
        if who == "reference":
            with self._spans.span("ref_onload"):
                await self._roles.references.tell(lambda reference: reference.onload())
        elif self._brings:
            await self._roles.trainer.onload()
        self._handle(Onloaded(who))

    async def _offload(self, who: Lender) -> None:
        if who == "reference":
            with self._spans.span("ref_offload"):
                await self._roles.references.tell(lambda reference: reference.offload())
        else:
            await self._roles.trainer.offload()
        self._handle(Offloaded(who))
