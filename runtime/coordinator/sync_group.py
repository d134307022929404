"""The weight sync's group: the trainer and the rollouts of one epoch, who meet for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from runtime.commands import AbortWeights, HostWeights, JoinWeights
from runtime.config import Publication as Settings
from runtime.coordinator.pools import RolloutPool
from runtime.coordinator.weight_sync_protocol import Epoch
from runtime.errors import SluiceError, Unanswered, Unreachable
from runtime.ports import RolePort, TrainerPort
from runtime.types import PolicyVersion
from runtime.weights.plan import resolve_transport

TRIES = 3  # of a rendezvous, or of a publication, that fail although no rollout is lost

log = logging.getLogger("sluice")


class SyncGroup:
    """The trainer and the rollouts of one epoch, connected for weights. Others read `epoch`, `members`, `transport`."""

    def __init__(self, trainer: TrainerPort, pool: RolloutPool, settings: Settings):
        self.trainer = trainer
        self.pool = pool
        self.settings = settings
        self.epoch = Epoch(0, ())
        """The newest epoch that was connected."""
        self.members: dict[str, RolePort] = {}
        """Its rollouts by name."""
        self.transport = ""
        """The transport of its weights; "" before the first epoch."""

    @property
    def machines(self) -> Mapping[str, str]:
        """Where those run that send, by name."""
        return self.trainer.machines

    def lost(self, reason: str) -> None:
        """The sender is. Of the trainer nobody has to be told: whoever publishes raises."""

    async def open(self) -> None:
        """Connect the trainer and every living rollout. A rollout that does not come is lost, and left out of the next epoch.

        Raises ServiceFault when no rollout comes, or when the group fails `TRIES` times although no rollout is lost.
        """
        fruitless = 0
        while True:
            await self.pool.somebody()
            epoch = self.pool.membership.open()
            fault = await self._meet(epoch)
            if fault is None:
                return
            log.warning("epoch %d: %s", epoch.number, fault)
            if set(epoch.members) <= set(self.pool.membership.living):
                fruitless += 1
            if fruitless == TRIES:
                raise fault

    async def _meet(self, epoch: Epoch) -> SluiceError | None:
        """Connect the group. Returns None when it is connected, else the fault. Raises UserError when its members cannot use
        the configured transport."""
        ports: list[RolePort] = [self.pool.register.port(member) for member in epoch.members]
        machines = {**self.machines, **{port.name: port.machine for port in ports}}
        transport = resolve_transport(self.settings.transport, self.settings.backend, machines)
        names = [self.trainer.name, *(port.name for port in ports)]
        # The trainer opens the rendezvous and answers at once; it connects beside this, once the rollouts have come.
        hosted = await self.trainer.call(HostWeights(epoch.number, len(names), transport, tuple(names)))
        address, manifest = hosted.address, hosted.manifest
        joins = [asyncio.ensure_future(self.trainer.post(JoinWeights(address, manifest)))] if address.senders > 1 else []
        joins += [
            asyncio.ensure_future(port.post(JoinWeights(replace(address, rank=rank), manifest)))
            for rank, port in enumerate(ports, start=address.senders)
        ]
        try:
            # All at once, as each blocks until all are there; the first failure ends the wait for the others.
            await asyncio.wait(joins, return_when=asyncio.FIRST_EXCEPTION)
            if not any(join.done() and join.exception() for join in joins):
                self.epoch, self.members, self.transport = epoch, {port.name: port for port in ports}, transport
                log.info("epoch %d: %s to %s by %s", epoch.number, self.trainer.name, ", ".join(self.members), transport)
                return None
            self.pool.membership.break_up(epoch.number)
            failed = next(error for join in joins if join.done() and (error := join.exception()))
            if not isinstance(failed, SluiceError):
                raise failed
            # The members that came would wait for the failed one until their own deadline: tell them to leave.
            return await self._leave(epoch, ports, failed)
        finally:
            for join in joins:
                join.add_done_callback(seen)
                join.cancel()

    async def _leave(self, epoch: Epoch, ports: Sequence[RolePort], failed: SluiceError) -> SluiceError:
        """Tell all members to leave the group. A rollout that does not confirm is lost; the others only waited for it.

        Returns the fault to report: that of a lost rollout where there is one, else `failed`.
        """
        version = self.pool.membership.committed or PolicyVersion()
        members: tuple[RolePort, ...] = (self.trainer, *ports)
        left = await asyncio.gather(*(one.call(AbortWeights(version, epoch.number)) for one in members), return_exceptions=True)
        for error in left:
            if isinstance(error, BaseException) and not isinstance(error, SluiceError):
                raise error
        if isinstance(left[0], SluiceError):
            raise left[0]
        for port, error in zip(ports, left[1:], strict=True):
            if isinstance(error, Unreachable | Unanswered):
                self.pool.register.lose(port, str(error))
                failed = failed if isinstance(failed, Unreachable | Unanswered) else error
        return failed


class PeerGroup(SyncGroup):
    """A rollout that has the committed version, in the trainer's place, and the newcomers. The trainer hears nothing of it."""

    trainer: RolePort  # type: ignore[assignment]

    def __init__(self, peer: RolePort, pool: RolloutPool, settings: Settings):
        super().__init__(peer, pool, settings)  # type: ignore[arg-type]

    @property
    def machines(self) -> Mapping[str, str]:
        return {self.trainer.name: self.trainer.machine}

    def lost(self, reason: str) -> None:
        self.pool.register.lose(self.trainer, reason)

    async def open(self) -> None:
        """Once. Raises SluiceError when somebody does not come, who is lost."""
        try:
            fault = await self._meet(self.pool.membership.open(self.pool.membership.newcomers))
        except (Unreachable, Unanswered) as error:
            self.lost(str(error))
            raise
        if fault is not None:
            raise fault


def nearest(newcomers: Sequence[RolePort], serving: Sequence[RolePort], trainer: Collection[str]) -> RolePort | None:
    """Who of the `serving` is to bring the newcomers the version that all of those have: one on a newcomer's machine, else any.
    None where the trainer, on the machines `trainer`, is nearer than all of them."""
    late = {newcomer.machine for newcomer in newcomers} - {""}
    close = [rollout for rollout in serving if rollout.machine in late]
    if close or not late.intersection(trainer):
        return next(iter([*close, *serving]), None)
    return None


def seen(task: asyncio.Future[Any]) -> None:
    """Read the result of a withdrawn call, so that asyncio does not report that nobody did."""
    if not task.cancelled():
        task.exception()
